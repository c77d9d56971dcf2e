"""A server to which HTTP/2 is spoken as nobody should: it stays up, beside it health answers within a second, a caller
is served after each round, and nothing is kept of what was sent."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from bench.floods import Prober
from bench.fuzzed_frames import round_of
from service.pb.whippet.v1 import generation_pb2_grpc
from tests.service.config.front_proofs import certify
from tests.service.conftest import PATIENCE, Server, ask

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
WARM, ROUNDS = 3, 10
KEPT = 64 << 20  # bytes: what the C library keeps for itself, and no more than one round's worth


@pytest.fixture(params=[False, True], ids=["plaintext", "TLS"])
def tls(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def spoken_to(tls: bool, serve: Serve, tmp_path: Path) -> Iterator[Server]:
    certify(tmp_path)
    flags = [f"--tls.cert={tmp_path}/server.pem", f"--tls.key={tmp_path}/server.key"] if tls else []
    with serve("--fake.step-time=0.002", "--log-level=warning", *flags) as one:
        yield one
        assert one.stop() == 0
        log = one.log.read_text()
        assert "Traceback" not in log
        assert len(log) < 5000


@pytest.fixture
def polite(tls: bool, spoken_to: Server, tmp_path: Path) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
    """Of somebody who connects as clients do, once."""
    if not tls:
        yield spoken_to.generation
        return
    trusted = grpc.ssl_channel_credentials((tmp_path / "server.pem").read_bytes())
    with grpc.secure_channel(spoken_to.data, trusted) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def live_requests(server: Server) -> float:
    """By the metrics port, which has no TLS."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith("whippet_requests_live "))
    return float(value)


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def test_rubbish_in_frames(tls: bool, spoken_to: Server, polite: generation_pb2_grpc.GenerationServiceStub) -> None:
    expected = polite.Generate(ask("polite", 20), timeout=PATIENCE).text
    open_files, size = descriptors(spoken_to), 0
    with Prober(spoken_to.health, spoken_to.process.pid) as prober:
        for seed in range(ROUNDS):
            round_of(spoken_to.data, seed, tls)
            assert polite.Generate(ask("polite", 20), timeout=PATIENCE).text == expected, seed
            if seed == WARM:
                size = spoken_to.rss()
    *_, second, worst = sorted(prober.waits)  # some tens of milliseconds where nothing else runs
    assert second < 1.0, f"health took {second} s, and {worst} s once, which may be the machine's fault"
    assert spoken_to.rss() - size < KEPT, f"from {size} to {spoken_to.rss()} bytes"
    end = time.monotonic() + PATIENCE
    while (live := live_requests(spoken_to)) or descriptors(spoken_to) > open_files + 2:  # prober and polite caller
        assert time.monotonic() < end, f"{live} requests are live, or connections open"
        time.sleep(0.05)
