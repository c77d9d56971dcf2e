"""An engine without torch and weights, deterministic, which holds the scheduler to its plans. For tests and benches."""

from engine.fake.runner import FakeRunner, Fault, plain_request

__all__ = ["FakeRunner", "Fault", "plain_request"]
