"""Computes a part of a model that a server on another host serves: `whippet rank`.

Each rank is a process, which connects to the first rank anew whenever it has ended: a server that starts its engine
again awaits it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from engine.ipc.joining import JoinRefused, code_digest, join, read_secret, split_address
from engine.launch import launch_rank
from service.cli.channel import USAGE, complain

_log = logging.getLogger(__name__)
_BETWEEN = 1.0  # seconds between two attempts to connect
_AFTER_REFUSAL = 10.0  # seconds, where the other side or this one does not fit
_LOOK = 0.2  # seconds between two looks at a rank and its connection
_GRACE = 5.0  # seconds that a rank has to end
_REFUSED = 2  # exit code of a rank that will never be able to load the model


def run(argv: Sequence[str]) -> int:
    flags = _parser().parse_args(argv)
    try:
        split_address(flags.leader)
        secret = read_secret(flags.secret_file)
    except ValueError:
        return complain(f"--leader {flags.leader}: write HOST:PORT", USAGE)
    except (OSError, JoinRefused) as error:
        return complain(f"--secret-file: {error}", USAGE)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ranks = RanksOfHost(flags.leader, secret, flags.ranks)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ranks.stop())
    ranks.run()
    return 0


class RanksOfHost:
    """Starts all ranks of this host, and starts each again when it has ended."""

    def __init__(self, leader: str, secret: bytes, count: int) -> None:
        self._leader, self._secret, self._count = leader, secret, count
        self._code = code_digest()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Returns once it was stopped and no rank runs any more."""
        threads = [threading.Thread(target=self._serve, args=(at,), name=f"rank {at}") for at in range(self._count)]
        for thread in threads:
            thread.start()
        while not self._stopped.wait(_LOOK):  # so that the main thread hears signals
            pass
        self._end_all()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        self._stopped.set()

    def _serve(self, at: int) -> None:
        logged = ""
        while not self._stopped.is_set():
            pause = _BETWEEN
            try:
                sock = join(self._leader, self._secret, self._code)
            except JoinRefused as error:
                logged, pause = self._log(f"the first rank does not take this one: {error}", logged), _AFTER_REFUSAL
            except OSError as error:
                logged = self._log(f"the first rank at {self._leader} cannot be reached: {error}", logged)
            else:
                logged = ""
                if self._computed(at, sock):
                    pause = _AFTER_REFUSAL
            self._stopped.wait(pause)

    def _log(self, words: str, logged: str) -> str:
        """Logs the words unless they were the last that were. Returns them."""
        if words != logged:
            _log.warning("%s", words)
        return words

    def _computed(self, at: int, sock: socket.socket) -> bool:
        """Runs a rank until it ends. Returns whether it refused the model."""
        with sock:
            with self._lock:
                if self._stopped.is_set():
                    return False
                process = self._processes[at] = launch_rank(sock.fileno(), at, self._count)
            _log.info("rank process %d has joined the group of %s", process.pid, self._leader)
            code = _ended(process, sock)
        with self._lock:
            del self._processes[at]
        _log.info("rank process %d has ended (%s)", process.pid, f"signal {-code}" if code < 0 else f"exit code {code}")
        return code == _REFUSED

    def _end_all(self) -> None:
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            process.kill()  # its group cannot go on without it, however it ends
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)


def _ended(process: subprocess.Popen[bytes], sock: socket.socket) -> int:
    """Waits for the process, and kills one that stays after the first rank has closed the connection."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    while not poll.poll(0):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_GRACE)
    process.kill()
    return process.wait()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("write a number from 1 on")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whippet rank",
        description="Computes a part of a model that a server on another host serves, which has the settings"
        " `engine.ranks-elsewhere`, `engine.ranks-listen` and `engine.ranks-secret-file`, and the model under the same"
        " path. Goes on until it is stopped: where the server starts its engine again, it connects again.",
        allow_abbrev=False,
    )
    parser.add_argument("--leader", required=True, metavar="HOST:PORT", help="what the server's ranks-listen is here")
    parser.add_argument("--secret-file", required=True, type=Path, metavar="FILE", help="the same as the server's")
    parser.add_argument(
        "--ranks", type=_count, default=1, metavar="N", help="processes, each with a GPU; default: %(default)s"
    )
    return parser
