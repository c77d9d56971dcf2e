"""Servers forked from one process that has already imported them: their start costs no second of imports.

A forked server is a process like any other: it has its own environment, files, signals and exit code. What it does
not show is that a fresh interpreter can start one; tests/service/test_main.py and tests/e2e start those.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Template:
    """The process that forks. Not safe for threads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.service.forked", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
        self._line = ours.makefile("rw")
        ours.close()

    def call(self, **request: object) -> int | None:
        json.dump(request, self._line)
        self._line.write("\n")
        self._line.flush()
        answer: int | None = json.loads(self._line.readline())
        return answer

    def start(self, flags: list[str], environ: dict[str, str], out: Path, err: Path) -> ForkedProcess:
        pid = self.call(flags=flags, environ=environ, out=str(out), err=str(err))
        assert pid is not None
        return ForkedProcess(self, pid)

    def run(self, flags: list[str], folder: Path, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A start that must fail; what it says goes through files in `folder`."""
        out, err = folder / "stdout", folder / "stderr"
        for path in (out, err):
            path.unlink(missing_ok=True)
        code = self.start(flags, dict(os.environ), out, err).wait(timeout)
        return subprocess.CompletedProcess(flags, code, out.read_text(), err.read_text())

    def close(self) -> None:
        self._line.close()
        self._process.wait(60)


class ForkedProcess:
    """What subprocess.Popen offers, as far as tests use it."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template = template
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._template.call(reap=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become(request: dict[str, object], line: socket.socket) -> None:
    """In the new process: its own files and environment."""
    line.close()
    for number, path in ((1, request["out"]), (2, request["err"])):
        fd = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[arg-type,call-overload]


def main(fd: int) -> int:
    import service.serving  # noqa: F401 - before there are forks, not in each
    from service.main import serve

    gc.collect()
    gc.freeze()  # or the collection at a server's start would copy all of these pages into each fork
    line = socket.socket(fileno=fd)
    requests = line.makefile("r")
    while text := requests.readline():
        request = json.loads(text)
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            become(request, line)
            return serve(request["flags"])
        with contextlib.suppress(BrokenPipeError):
            line.sendall(json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
