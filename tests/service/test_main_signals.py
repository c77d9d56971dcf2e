"""Signals at any moment of a server's life, sent as an init system or a terminal does."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.conftest import PATIENCE, ROOT, Server, all_flags, ask
from tests.service.transport.test_token_file import entry

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def masks(pid: int) -> dict[str, int]:
    """Signals that a process handles (SigCgt) and ignores (SigIgn), as bits from SIGHUP on."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        name: int(value, 16)
        for name, _, value in (line.partition(":\t") for line in lines)
        if name in ("SigCgt", "SigIgn")
    }


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@contextlib.contextmanager
def starting(before: Callable[[], None]) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a user starts it, in the moment in which it first handles SIGTERM."""
    line = [sys.executable, "-m", "service.cli", "serve", *all_flags()]
    with subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=before
    ) as process:
        try:
            wait_for(lambda: bool(masks(process.pid)["SigCgt"] >> (signal.SIGTERM - 1) & 1))
            yield process
        finally:
            process.kill()


def as_usual() -> None:
    """Whatever pytest was started with."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def as_pid_1() -> None:
    """What a process finds that is the first of its pid namespace: signals have no effect unless it handles them."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("before", [as_usual, as_pid_1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_among_the_imports_stops_it_at_once(before: Callable[[], None], number: int) -> None:
    with starting(before) as process:
        assert masks(process.pid)["SigIgn"] & 1  # SIGHUP
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        # gRPC's core, where it was being set up at that moment, may say a word of its own.
        assert [line for line in errors.splitlines() if b"event_engine" not in line] == []


def has_mapped(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


def has_an_engine(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@pytest.mark.parametrize(
    "moment",
    [
        lambda pid: has_mapped(pid, "uvloop"),
        lambda pid: has_mapped(pid, "tokenizers"),
        lambda pid: has_mapped(pid, "cygrpc"),
        has_an_engine,
    ],
    ids=["uvloop is there", "tokenizers are there", "gRPC is there", "the engine starts"],
)
def test_so_does_one_at_any_later_moment_of_the_start(moment: Callable[[int], bool]) -> None:
    with starting(as_pid_1) as process:
        wait_for(lambda: moment(process.pid))
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        assert b"Traceback" not in errors


def test_sighup_reads_the_tokens_again_and_ends_nothing(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry())
    with serve(f"--auth.tokens-file={path}") as server:
        for times in (1, 2):
            server.process.send_signal(signal.SIGHUP)
            wait_for(lambda times=times: server.log.read_text().count("tokens read again: 1 entries") == times)
        token = (("authorization", "Bearer secret"),)
        assert server.generation.Generate(ask("x", 3), timeout=10, metadata=token).text
        assert server.stop() == 0


def test_sighup_without_tokens_is_a_line(serve: Serve) -> None:
    with serve() as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.generation.Generate(ask("x", 3), timeout=10).text
        assert server.stop() == 0
        assert "no tokens file" in server.log.read_text()
