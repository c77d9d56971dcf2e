"""Soaks a server with a Redis of its own, callers of every kind, and trouble; then asks whether each request ended once
and rightly, and whether the server holds more than before.

    python -m bench.soaking --seconds 600 --engine fake
    python -m bench.soaking --seconds 600 --model models/demo

Towards the end engines are left alone, and memory is measured. Prints a line every half minute and ends
in one JSON line. Exit code 1 where anything is wrong; each fault has a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.redis_server import RedisServer, redis_server, write_keys
from bench.soaking.callers import Metadata, SoakCallers, bearer, oracle
from bench.soaking.history import SoakVerdict, verdict
from bench.soaking.trouble import MemoryWatch, Sample, Trouble, write_quotas, write_tokens
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1.admin_pb2_grpc import AdminServiceStub

TENANTS = ("acme", "bravo", "guest")  # the last one's token comes and goes
PROMPTS = 12  # of each tenant
GROWTH = 0.04  # of what a process holds, over the measured time: what its allocator may keep
LEAST_GROWTH = 6 << 20  # bytes, however small the process
QUIET = (0.6, 0.7)  # of the time: from when on engines are left alone, and memory is measured
POOLS = 4 * 16  # connections to Redis that a front keeps at most
KV_BYTES = 32 << 20
HOME = 20.0  # seconds until what a request held must have been given back
_ADDRESSES = re.compile(r"^ready: data (\S+) admin (\S+) ", re.MULTILINE)
_METRICS = re.compile(r"^ready: .* metrics (http://\S+)$", re.MULTILINE)
_CALLS = re.compile(
    r'^whippet_requests_total\{(?=.*code="(\w+)")(?=.*method="[\w./]*Generate\w*").*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Soaked:
    process: subprocess.Popen[bytes]
    data: str
    admin: str
    metrics: str
    log: Path


@contextmanager
def serving(folder: Path, flags: Sequence[str]) -> Iterator[Soaked]:
    """Starts a server on free ports, until the context ends. Its log is a file."""
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen", "metrics-listen")]
    code = "import sys; from service.main import serve; sys.exit(serve(sys.argv[1:]))"
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", code, *ports, *flags], stdout=sink, stderr=sink)
    try:
        while (found := _ADDRESSES.search(log.read_text())) is None:
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        named = _METRICS.search(log.read_text())
        yield Soaked(process, found[1], found[2], named[1] if named else "", log)
    finally:
        process.kill()
        process.wait()


async def soak(server: Soaked, redis: RedisServer, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Soaks the server; the result has the faults."""
    questions, alone = await oracle(server.data, TENANTS, PROMPTS)
    callers = SoakCallers(server.data, questions, TENANTS[-1], given.callers)
    watch = MemoryWatch(server.process.pid)
    async with grpc.aio.insecure_channel(server.admin) as channel:
        make: Any = AdminServiceStub  # generated, without types
        admin, who = make(channel), bearer(TENANTS[0])
        trouble = Trouble(server.process.pid, redis, admin, folder, TENANTS, who)
        before = watch.look()
        beside = [asyncio.create_task(one) for one in (watch.run(), trouble.run(given.pause))]
        asking = asyncio.create_task(callers.run())
        began = time.monotonic()
        measured = began + given.seconds * QUIET[1]
        await _until(began + given.seconds * QUIET[0], callers, trouble)
        trouble.deadly = False
        await _until(began + given.seconds, callers, trouble)
        over = time.monotonic()
        callers.stop()
        await asking
        for task in beside:
            task.cancel()
        ended = await asyncio.gather(*beside, return_exceptions=True)
        broken = [error for error in ended if isinstance(error, Exception)]
        await trouble.settle()
        after = await _home(watch, before, admin, who)
        restarts = (await admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=who, timeout=20)).restarts
    judged = verdict(callers.events, questions)
    faults = [*judged.faults, *(f"trouble itself broke: {error!r}" for error in broken)]
    faults += [*_counted(server, judged, alone), *_held(watch, (measured, over), before, after)]
    return {
        "seconds": round(over - began, 1),
        "requests": judged.requests,
        "ends": {f"{kind} {code}": count for (kind, code), count in sorted(judged.ends.items())},
        "trouble": dict(sorted(trouble.happened.items())),
        "restarts": restarts,
        "grown_bytes": dict(zip(("front", "engine"), map(round, watch.grown(measured, over)), strict=True)),
        "resident_bytes": {"front": after.front, "engine": after.engine},
        "descriptors": [before.descriptors, after.descriptors],
        "threads": [before.threads, after.threads],
        "faults": faults,
    }


async def _until(moment: float, callers: SoakCallers, trouble: Trouble) -> None:
    while (left := moment - time.monotonic()) > 0:
        await asyncio.sleep(min(left, 30.0))
        print(f"{len(callers.events) // 2} requests, {sum(trouble.happened.values())} troubles", flush=True)


async def _home(watch: MemoryWatch, before: Sample, admin: AdminServiceStub, who: Metadata) -> Sample:
    """Returns what is held once the engine is idle and no caller is there; the last poll, if it never falls enough."""
    end = time.monotonic() + HOME
    while True:
        seen = watch.look()
        load = await admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=who, timeout=20)
        idle = not (load.running or load.waiting or load.paused or load.used_pages)
        if (idle and not _left(before, seen)) or time.monotonic() > end:
            return seen
        await asyncio.sleep(0.2)


def _left(before: Sample, after: Sample) -> list[str]:
    found = []
    if after.descriptors > before.descriptors + POOLS:
        found.append(f"{after.descriptors} descriptors are open, {before.descriptors} were")
    if after.threads > before.threads + 2:  # of a pool that is made when it is first needed
        found.append(f"{after.threads} threads, {before.threads} before")
    return found


def _held(watch: MemoryWatch, measured: tuple[float, float], before: Sample, after: Sample) -> list[str]:
    found = _left(before, after)
    sizes = {"front": after.front, "engine": after.engine}
    for (name, size), grown in zip(sizes.items(), watch.grown(*measured), strict=True):
        if grown > max(LEAST_GROWTH, GROWTH * size):
            found.append(f"the {name} grew by {grown / 2**20:.1f} MiB of {size / 2**20:.0f}")
    return found


def _counted(server: Soaked, judged: SoakVerdict, alone: int) -> list[str]:
    """Compares the server's own count of successful calls with the callers': one more for each that the caller left at
    the very end. `alone`: those of the oracle."""
    with urllib.request.urlopen(server.metrics, timeout=20) as page:
        theirs = sum(float(count) for code, count in _CALLS.findall(page.read().decode()) if code == "OK")
    ours = sum(count for (_, code), count in judged.ends.items() if code == "OK") + alone
    left = sum(count for (_, code), count in judged.ends.items() if code in ("CANCELLED", "DEADLINE_EXCEEDED"))
    return (
        [] if ours <= theirs <= ours + left else [f"{theirs:.0f} calls ended well for the server, {ours} for callers"]
    )


def stopped(server: Soaked) -> list[str]:
    """Stops the server, and checks how it ends and what its log has."""
    server.process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(60)
    log, found = server.log.read_text(), []
    if server.process.poll() != 0:
        found.append(f"SIGTERM ended it with {server.process.poll()}")
    found += [f"a {word} in the log" for word in ("Traceback", "Task was destroyed", "never retrieved") if word in log]
    return found


def run(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, redis_server() as redis:
        folder = Path(name)
        tokens, tenants, keys = folder / "tokens.yaml", folder / "tenants.yaml", write_keys(folder / "keys")
        write_tokens(tokens, TENANTS)
        write_quotas(tenants, TENANTS[-1], 6000)
        # Pages that were never used are not resident: so few that all have been used before memory is measured.
        model = (f"--model={given.model}", f"--scheduler.kv-bytes={KV_BYTES}")
        engine = ("--engine=fake", "--fake.step-time=0.002") if given.model is None else model
        flags = [*engine, f"--cache.redis-url={redis.url}", f"--cache.key-file={keys}", f"--auth.tokens-file={tokens}"]
        flags += [f"--auth.tenants-file={tenants}", "--cache.prefix.min-tokens=16", "--drain.delay=0"]
        with serving(folder, [*flags, *given.flag]) as server:
            found = asyncio.run(soak(server, redis, folder, given))
            found["faults"] += stopped(server)
            if found["faults"]:
                print(server.log.read_text()[-4000:], file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--callers", type=int, default=24)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two troubles, on average")
    parser.add_argument("--model", help="folder; unset: the fake engine")
    parser.add_argument("--flag", action="append", default=[], help="for the server, again and again")
    parser.add_argument("--revision", default="", help="the commit")
    given = parser.parse_args(argv)
    found = run(given)
    for fault in found["faults"][:50]:
        print(f"fault: {fault}")
    faults = len(found.pop("faults"))
    print(json.dumps({"bench": "soaking", "revision": given.revision, "model": given.model, **found, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
