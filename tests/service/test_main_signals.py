"""Signals at any moment of a server's life, sent as an init system or a terminal does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.conftest import PATIENCE, ROOT, Server, all_flags, ask
from tests.service.transport.identity.test_token_file import entry
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def masks(pid: int) -> dict[str, int]:
    """Signals that a process handles (SigCgt) and ignores (SigIgn), as bits from SIGHUP on."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        name: int(value, 16)
        for name, _, value in (line.partition(":\t") for line in lines)
        if name in ("SigCgt", "SigIgn")
    }


# Sets what the command finds of signals, then becomes it. Not by a function between fork and exec: where the process
# that forks has threads of gRPC, its handlers run there, and may hang.
_FIND = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.Handlers(int(sys.argv[1])))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
AS_USUAL = signal.SIG_DFL
AS_PID_1 = signal.SIG_IGN  # what the first process of a pid namespace finds: signals it does not handle have no effect


@contextlib.contextmanager
def starting(found: signal.Handlers) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a user starts it, in the moment in which it first handles SIGTERM."""
    line = [sys.executable, "-c", _FIND, str(int(found)), "-m", "service.cli", "serve", *all_flags()]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: bool(masks(process.pid)["SigCgt"] >> (signal.SIGTERM - 1) & 1))
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("found", [AS_USUAL, AS_PID_1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_among_the_imports_stops_it_at_once(found: signal.Handlers, number: int) -> None:
    with starting(found) as process:
        # Soon after SIGTERM is handled; of one that finds them ignored, SIGHUP is so from its beginning.
        wait_for(lambda: bool(masks(process.pid)["SigCgt"] >> (number - 1) & 1))
        wait_for(lambda: bool(masks(process.pid)["SigIgn"] & 1))  # SIGHUP
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert errors == b""


def has_mapped(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


def has_an_engine(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@pytest.mark.proof
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
    with starting(AS_PID_1) as process:
        wait_for(lambda: moment(process.pid))
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        assert b"Traceback" not in errors


NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def processor_time(pid: int) -> float:
    """Seconds, of the process alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loads_a_model(pid: int) -> bool:
    """Whether there is an engine process: nothing of the start comes later."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    with contextlib.suppress(OSError):  # one that has just ended
        return any(b"engine.worker" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)
    return False


@contextlib.contextmanager
def starting_in_a_namespace() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that is PID 1 of a pid namespace, in the moment in which it first handles SIGTERM, and its PID here."""
    line = [*NAMESPACE, sys.executable, "-m", "service.cli", "serve", *all_flags()]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_for(lambda: bool(children.read_text()))
            pid = int(children.read_text())
            wait_for(lambda: bool(masks(pid)["SigCgt"] >> (signal.SIGTERM - 1) & 1))
            yield process, pid
        finally:
            process.kill()


@pytest.mark.proof
@pytest.mark.parametrize("moment", range(12))
def test_the_first_process_of_a_pid_namespace_can_be_stopped_at_any_moment(moment: int) -> None:
    """Twelve of them, a twelfth of a second of processor time apart, from the first import to an engine that loads."""
    if subprocess.run([*NAMESPACE, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine's kernel lets nobody make a pid namespace")
    with starting_in_a_namespace() as (process, pid):
        begun = processor_time(pid)
        wait_for(lambda: processor_time(pid) >= begun + moment / 12 or loads_a_model(pid))
        os.kill(pid, signal.SIGTERM)
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
        assert server.generation.Generate(ask("x", 3), timeout=60, metadata=token).text
        assert server.stop() == 0


def test_sighup_without_anything_to_read_ends_nothing(serve: Serve) -> None:
    with serve() as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.generation.Generate(ask("x", 3), timeout=60).text
        assert server.stop() == 0
