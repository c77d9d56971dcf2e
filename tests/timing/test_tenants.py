"""What many callers, and one tenant that asks for ten times its share, leave to everybody else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.floods import Prober, rss
from tests.service.conftest import Server, ask_stream
from tests.service.tenants import metadata, write_tokens
from tests.timing.retrying_callers import CallerProcess, callers, share

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
CROWD = 2_000
SECONDS = 3.0  # that is looked at once
ATTEMPTS = 4  # what else the machine does can only make it slower


def test_two_thousand_callers(serve: Serve) -> None:
    """Seventy-two are let in, the others come back when they are told to. Memory is that of the first crowd, since
    allocators keep what a process has once needed."""
    flags = ("--fake.step-time=0.04", "--scheduler.max-sequences=8", "--limits.queued-requests=64")
    with serve(*flags, "--log-level=warning") as server:
        left: list[int] = []
        late: list[float] = []
        for crowd in range(2):
            with Prober(server.health, server.process.pid) as prober, callers(server.data, "", 50) as many:
                many.let(CROWD)
                seen = 0
                while seen < CROWD:
                    seen += sum(report(many, 1.0)["codes"].values()) + 72  # nobody of those has ended yet
                for _ in range(ATTEMPTS if crowd else 0):
                    refused = report(many, SECONDS)["refused"]
                    late.append(share(refused, 0.99) if len(refused) > 10 else 1.0)
                    if late[-1] < 0.05:
                        break
                many.let(0)
                server.idle()
            assert prober.worst < 1.0
            left.append(rss(server.process.pid))
        assert min(late) < 0.05, late
        assert left[1] < 1.05 * left[0], left


def report(many: CallerProcess, seconds: float) -> dict[str, Any]:
    """Of the next so many seconds."""
    time.sleep(seconds)
    return many.report()


def test_a_tenant_that_asks_for_ten_times_its_share(serve: Serve, tmp_path: Path) -> None:
    """Four of its requests run beside those of the other tenant, whether four ask or forty, in turns."""
    (tmp_path / "tenants.yaml").write_text("acme: {requests: 4}\n")
    flags = [f"--auth.tokens-file={write_tokens(tmp_path)}", f"--auth.tenants-file={tmp_path / 'tenants.yaml'}"]
    flags += ["--fake.step-time=0.02", "--scheduler.max-sequences=8", "--log-level=warning"]
    with serve(*flags) as server, callers(server.data, "acme", 50) as acme:
        ratios = []
        for _ in range(ATTEMPTS):
            waits: dict[int, list[float]] = {4: [], 40: []}
            for count in (4, 40) * 3:
                acme.let(count)
                report(acme, 0.3)
                waits[count] += [first_token(server) for _ in range(15)]
            ratios.append(share(waits[40], 0.95) / share(waits[4], 0.95))
            if ratios[-1] <= 1.2:
                break
        assert min(ratios) <= 1.2, ratios
        assert report(acme, 0.5)["codes"]["RESOURCE_EXHAUSTED"] > 0


def first_token(server: Server) -> float:
    """Seconds until the other tenant has it."""
    begun = time.perf_counter()
    call = server.generation.GenerateStream(ask_stream("hello", 3), metadata=metadata("bravo"), timeout=60)
    next(call)
    waited = time.perf_counter() - begun
    list(call)
    return waited
