"""What a Redis that is sick adds to requests that nobody asked before, one after the other through one server: gone,
stalled, slow, cutting its answers, full, read-only, emptied again and again. Prints a table and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.about import device, revision
from bench.cache import Figures, ask, measuring, quantiles, redis
from bench.front import server
from bench.grpc_frames import FrameClient

SLOW = 0.1  # seconds an answer takes
CUT = 9  # bytes of an answer that come
RECOVERY = 2.0  # seconds


class Between:
    """A proxy in a thread of its own: passes, delays, or cuts what the other side answers."""

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self.cut: int | None = None
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(5)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        listening = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = listening.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, up = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, up, False), self._pump(answers, writer, True))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        try:
            while data := await source.read(65536):
                if answers and self.delay:
                    await asyncio.sleep(self.delay)
                if answers and self.cut is not None:
                    sink.write(data[: self.cut])
                    break
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@dataclass(frozen=True, slots=True)
class Patient:
    """A Redis, and what stands before it."""

    port: int
    process: subprocess.Popen[bytes]
    between: Between

    def command(self, *words: str) -> None:
        """One command over a bare socket."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            link.sendall(" ".join(words).encode() + b"\r\n")
            link.recv(1 << 16)


@contextmanager
def patient() -> Iterator[Patient]:
    """A redis-server of our own, behind a proxy."""
    with redis() as (url, process):
        port = int(url.rsplit(":", 1)[1].partition("/")[0])
        between = Between(port)
        try:
            yield Patient(port, process, between)
        finally:
            between.close()


def sicknesses(of: Patient) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """What makes it sick, and what makes it well again. The last is for ever."""

    def slow(seconds: float) -> None:
        of.between.delay = seconds

    def cut(after: int | None) -> None:
        of.between.cut = after

    def full(limit: str) -> None:
        of.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        of.command("CONFIG", "SET", "maxmemory", limit)

    def nothing() -> None:
        pass

    return {
        "well": (nothing, nothing),
        "slow": (lambda: slow(SLOW), lambda: slow(0.0)),
        "cut": (lambda: cut(CUT), lambda: cut(None)),
        "full": (lambda: full("1"), lambda: full("0")),
        "read-only": (lambda: of.command("REPLICAOF", "127.0.0.1", "1"), lambda: of.command("REPLICAOF", "NO", "ONE")),
        "emptied": (nothing, nothing),  # before every request
        "stalled": (lambda: of.process.send_signal(signal.SIGSTOP), lambda: of.process.send_signal(signal.SIGCONT)),
        "well again": (nothing, nothing),
        "gone": (of.process.kill, nothing),
    }


def measure(count: int) -> Figures:
    """Milliseconds of a whole request of one token; one that fails ends the run."""
    result: Figures = {}
    with tempfile.TemporaryDirectory() as folder, patient() as of:
        keys = Path(folder) / "keys"
        keys.write_text(f"names {secrets.token_hex(32)}\nfirst {secrets.token_hex(32)}\n")
        url = f"--cache.redis-url=redis://127.0.0.1:{of.between.port}/0"
        flags = (url, f"--cache.key-file={keys}", "--cache.semantic.mode=off", "--optimizations.response-cache=true")
        with server(*flags) as (address, _):
            client = FrameClient(address, time.monotonic)
            asked = 0
            for name, (sicken, heal) in sicknesses(of).items():
                sicken()
                times = []
                with measuring(f"requests, Redis {name}"):
                    for _ in range(count):
                        if name == "emptied":
                            of.command("FLUSHALL")
                        times.append(ask(client, asked, f"{name} {asked}", 1))
                        asked += 1
                result[name] = quantiles(times)
                heal()
                time.sleep(RECOVERY)
            client.close()
    return result


def main() -> None:
    """Prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="requests of each kind")
    given = parser.parse_args()
    figures = measure(given.count)
    for name, found in figures.items():
        added = found["p99"] - figures["well"]["p99"]
        print(
            f"{name:10}  p50 {found['p50']:7.2f}  p99 {found['p99']:7.2f} ms, {added:+.2f} against a Redis that is well"
        )
    print(json.dumps({"bench": "cache faults", "sha": revision(), "device": device(), "figures": figures}))


if __name__ == "__main__":
    main()
