"""A deterministic engine without torch and weights, which checks the scheduler's plans. For tests and benches."""

from engine.fake.runner import FakeRunner, Fault, plain_request

__all__ = ["FakeRunner", "Fault", "plain_request"]
