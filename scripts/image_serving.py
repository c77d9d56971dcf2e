"""Starts a server from the folder of an image as a careful container would be, and asks it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scripts.dockerfile import Image

PATIENCE = 300.0  # seconds until it is ready, on a busy machine
DEVICES = ("null", "zero", "random", "urandom")
ASKED = '{"text": "def read_json(path):", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 24}}'
GENERATE = "whippet.v1.GenerationService/Generate"
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Serving:
    """Serves from an image whose files lie in `root`."""

    root: Path
    image: Image

    def prove(self) -> None:
        """Serves, is asked, is stopped; exits with a line at the first thing that is not as it should be."""
        with tempfile.NamedTemporaryFile("w+") as log:
            process = subprocess.Popen(self._command(), stdout=log, stderr=subprocess.STDOUT)
            try:
                self._ask(process, Path(log.name))
            except SystemExit:
                sys.stderr.write(Path(log.name).read_text())
                raise
            finally:
                process.kill()

    def _command(self) -> list[str]:
        """Builds the command, under which the server is process 1, without a right, a name or a HOME."""
        root, (user, group) = str(self.root), self.image.user.split(":")
        lines = ["set -e", 'mount --bind "$0" "$0"', 'mount -t proc proc "$0/proc"']
        lines += ['mount -t tmpfs -o mode=0755 tmpfs "$0/dev"', 'mkdir "$0/dev/shm"']
        lines += [f'touch "$0/dev/{name}" && mount --bind /dev/{name} "$0/dev/{name}"' for name in DEVICES]
        lines += [f'mount -t tmpfs -o mode=0777 tmpfs "$0{path}"' for path in ("/tmp", "/dev/shm", *self.image.volumes)]
        lines += ['mount -o remount,ro,bind "$0"', "ip link set lo up", 'exec "$@"']
        drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
        drop += ["--bounding-set=-all", "--inh-caps=-all"]
        namespaces = ["unshare", "--mount", "--propagation=private", "--net", "--pid", "--fork", "--kill-child"]
        inside = [*drop, "env", "--ignore-environment", f"--chdir={self.image.folder}", *self._environment()]
        started = [*inside, *self.image.entrypoint, *self.image.command]
        return [*namespaces, "sh", "-c", "\n".join(lines), root, "chroot", root, *started]

    def _environment(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.image.env.items()]

    def _inside(self, pid: int, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as `docker exec` would."""
        user, group = self.image.user.split(":")
        enter = ["nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--root", f"--setuid={user}"]
        words = [*enter, f"--setgid={group}", "env", "--ignore-environment", *self._environment(), *command]
        return subprocess.run(words, capture_output=True, text=True)

    def _ask(self, process: subprocess.Popen[bytes], log: Path) -> None:
        began = time.monotonic()
        server = _await(lambda: _child(process.pid), process)
        _await(lambda: self._inside(server, *self.image.health).returncode == 0, process)
        step_done(f"healthy after {time.monotonic() - began:.1f} s: {' '.join(self.image.health)} → 0")
        links = self._inside(server, "cat", "/proc/net/dev").stdout.splitlines()[2:]
        check([line.split(":")[0].strip() for line in links] == ["lo"], "a network of loopback alone")
        status = Path(f"/proc/{server}/status").read_text()
        uid = self.image.user.split(":")[0]
        check(f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in status, f"user {uid}")
        check("CapBnd:\t0000000000000000\n" in status and "NoNewPrivs:\t1\n" in status, "no capability, none to come")
        for path in ("/", "/opt/whippet", "/opt/whippet/prebuilt/kernels", "/etc", "/var"):
            there = self._inside(server, "touch", f"{path}/written")
            check(there.returncode != 0 and "Read-only" in there.stderr, f"{path} cannot be written")
        answer = self._grpcurl(server, "-d", ASKED, "127.0.0.1:50051", GENERATE)
        check(answer.returncode == 0 and '"text"' in answer.stdout, f"grpcurl … {GENERATE}: {answer.stdout[:160]!r}")
        _await(lambda: "the embedder runs" in log.read_text(), process)
        log_text = log.read_text()
        check(
            "the embedder runs" in log_text, next(line for line in log_text.splitlines() if "the embedder runs" in line)
        )
        warned = [line for line in log_text.splitlines() if "WARNING" in line and "--insecure" not in line]
        check(not warned, "no warning in the log but that anybody may call" + "".join(f"\n{line}" for line in warned))
        kept = [path for volume in self.image.volumes for path in Path(f"/proc/{server}/root{volume}").rglob("*")]
        check(not [path for path in kept if path.is_file()], "nothing was compiled, exported or written")
        os.kill(server, signal.SIGTERM)
        check(process.wait(PATIENCE) == 0, "SIGTERM as process 1: exit code 0")

    def _grpcurl(self, pid: int, *words: str) -> subprocess.CompletedProcess[str]:
        grpcurl = Path(sysconfig.get_path("scripts")) / "grpcurl"
        command = ["nsenter", f"--target={pid}", "--net", str(grpcurl), "-plaintext", *words]
        return subprocess.run(command, capture_output=True, text=True)


def step_done(what: str) -> None:
    print(f"        ok  {what}", flush=True)


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"not so: {what}")
    step_done(what)


def _child(pid: int) -> int | None:
    """Returns the process that `unshare` made, once it has become the server."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not listed or b"/whippet\0" not in Path(f"/proc/{listed[0]}/cmdline").read_bytes():
        return None
    return int(listed[0])


def _await(look: Callable[[], Found | None], process: subprocess.Popen[bytes]) -> Found:
    """Polls until something is found; exits where the process has ended or it takes too long."""
    end = time.monotonic() + PATIENCE
    while not (found := look()):
        if process.poll() is not None or time.monotonic() > end:
            sys.exit("the server ended" if process.poll() is not None else f"nothing after {PATIENCE:.0f} s")
        time.sleep(0.2)
    return found
