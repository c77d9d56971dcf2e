"""Runs every attack in turns for a minute against a server with little memory, beside a probe of its health, a stream
and a polite caller. Prints a line for each kind and ends in one JSON line; exit code 1 where a bound was exceeded.

    python -m bench.attack [--seconds 60] [--memory 2048]

`--memory` is the front's address room in MiB, or the machine would find out. Attackers, server and its engine share
this machine's cores.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread

import grpc

from bench.floods import HEALTH, REFLECTION, Prober, addresses, crowded, cut_message, flood, rss, silent
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from service.transport.process.heap import ENVIRONMENT

_STEP = 0.01  # seconds of the fake engine
_TURN = 2.0  # seconds of one kind of attack
_GENERATE = "/whippet.v1.GenerationService/Generate"
_TOKENIZE = "/whippet.v1.GenerationService/Tokenize"


@dataclass
class AttackOutcome:
    rest_mib: float = 0.0  # of the front, after a first round of everything
    peak_mib: float = 0.0
    end_mib: float = 0.0
    worst_health_ms: float = 0.0
    p99_health_ms: float = 0.0
    stream_tokens: int = 0
    stream_failed: str = ""
    polite: dict[str, int] = field(default_factory=dict)  # answers of small requests, by status
    alive: bool = True


@contextmanager
def server(memory: int, context: int) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Starts a fake engine with `memory` MiB of address room, in the image's environment; yields its addresses."""
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen", "metrics-listen")]
    code = "import sys; from service.main import serve; sys.exit(serve(sys.argv[1:]))"
    engine = (f"--fake.step-time={_STEP}", f"--fake.max-context={context}", "--fake.total-pages=20000")
    room = memory << 20
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--engine=fake", "--log-level=warning", *ports, *engine],
            stdout=log,
            stderr=log,
            env={**os.environ, **ENVIRONMENT},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (room, room)),
        )
        try:
            yield process, addresses(Path(log.name), process)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            outcome = Path(log.name).read_text()
            if len(outcome) > 4000:
                print(f"the log has {len(outcome)} bytes")
            print(outcome[-2000:], file=sys.stderr)


def calls(address: str, method: str, message: bytes, count: int) -> Counter[str]:
    """Makes `count` calls at once; counts how they ended."""
    unbounded = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=unbounded) as channel:
        begun = [channel.unary_unary(method, bytes, bytes).future(message, timeout=20) for _ in range(count)]
        return Counter(one.code().name for one in begun)


def streams(address: str, message: bytes, count: int) -> None:
    """Opens `count` streams that live for a turn and are then cancelled."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        method = channel.unary_stream("/whippet.v1.GenerationService/GenerateStream", bytes, bytes)
        begun = [method(message, timeout=60) for _ in range(count)]
        time.sleep(_TURN)
        for one in begun:
            one.cancel()  # type: ignore[no-untyped-call]


def attacks(ports: dict[str, str]) -> dict[str, Callable[[], object]]:
    """Lists the attacks, each at twice the size that once was too much."""
    data = ports["data"]
    big = functools.partial(pb.GenerateRequest, stopping=pb.StoppingOptions(max_tokens=1))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="some words " * 340_000)])
    unknown = crowded(15, b"z", 3_900_000)
    live = pb.GenerateRequest(text="hold", stopping=pb.StoppingOptions(max_tokens=3000)).SerializeToString()

    def quiet(address: str, count: int) -> None:
        with silent(address, count):
            time.sleep(_TURN)

    cut, slow = cut_message(60_000), cut_message(600)
    return {
        "resets": lambda: flood(data, _TURN, connections=4, reset=True),
        "calls without a message": lambda: flood(data, _TURN, connections=40, most=100_000),
        "messages that end early": lambda: flood(data, _TURN, connections=40, most=100_000, body=slow),
        "messages that end after a window": lambda: flood(data, _TURN, connections=40, most=20_000, body=cut),
        "the same, for reflection": lambda: flood(data, _TURN, connections=20, most=20_000, body=cut, path=REFLECTION),
        "the same, for health": lambda: flood(data, _TURN, connections=20, most=20_000, body=cut, path=HEALTH),
        "2,200 silent connections": lambda: quiet(data, 2200),
        "400 of them at the metrics port": lambda: quiet(ports["metrics"], 400),
        "24 texts of 15.9 MB": lambda: calls(data, _TOKENIZE, crowded(2, b"x", 15_900_000), 24),
        "24 texts of 3.9 MB": lambda: calls(data, _GENERATE, big(text="x " * 1_950_000).SerializeToString(), 24),
        "24 chats of 3.7 MB": lambda: calls(data, _GENERATE, big(chat=chat).SerializeToString(), 24),
        "40 calls with 4 MB of biases": lambda: calls(
            data, _GENERATE, crowded(6, b"\x4a\x07\x08\x01\x15\0\0\x80\x3f", 3_900_000), 40
        ),
        "40 calls with 4 MB of empty messages": lambda: calls(data, _GENERATE, crowded(5, b"\x0a\0", 3_900_000), 40),
        "500 streams with 4 MB of unknown fields": lambda: streams(data, live + unknown, 500),
    }


def run_attacks(ports: dict[str, str], seconds: float) -> None:
    """Attacks from a process of its own. Every kind at least once."""
    end = time.monotonic() + seconds
    for number, (name, attack) in enumerate(itertools.cycle(attacks(ports).items())):
        if time.monotonic() > end and number >= len(attacks(ports)):
            return
        began = time.monotonic()
        try:
            result = attack()
        except (OSError, grpc.RpcError) as error:
            result = type(error).__name__
        print(f"{began % 1000:6.1f} {name:40} {time.monotonic() - began:5.1f} s  {result or ''}", flush=True)


def be_polite(address: str, stop: Event, found: AttackOutcome) -> None:
    """Makes small requests, one after the other, and waits a second after each refusal."""
    with grpc.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for number in itertools.count():
            if stop.wait(0.05):
                return
            message = pb.GenerateRequest(text=f"polite {number}", stopping=pb.StoppingOptions(max_tokens=2))
            try:
                stub.Generate(message, timeout=30)
                outcome = "OK"
            except grpc.RpcError as error:
                outcome = error.code().name
            found.polite[outcome] = found.polite.get(outcome, 0) + 1


def stream_on(address: str, tokens: int, found: AttackOutcome) -> None:
    """Reads one answer, from before the attack until it is over."""
    with grpc.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        message = pb.GenerateStreamRequest(text="beside", stopping=pb.StoppingOptions(max_tokens=tokens))
        message.output.token_ids = True
        try:
            for part in stub.GenerateStream(message):
                found.stream_tokens += len(part.token_ids)
        except grpc.RpcError as error:
            found.stream_failed = str(error.code())


def settled(pid: int) -> float:
    """Returns the MiB left once no more is given back, in as many seconds as the front may leave its heap alone."""
    seen = [rss(pid)]
    while len(seen) < 10 or min(seen[-10:]) < min(seen[:-9]):
        time.sleep(1.0)
        seen.append(rss(pid))
    return seen[-1] / 2**20


def attack(seconds: float, memory: int) -> AttackOutcome:
    """Attacks briefly first, so that permanent memory is allocated, and then in earnest."""
    found = AttackOutcome()
    tokens = int(seconds / _STEP)
    with server(memory, tokens + 1000) as (process, ports):
        print(f"at the start: {settled(process.pid):.0f} MiB", flush=True)
        stop = Event()
        beside = [
            Thread(target=stream_on, args=(ports["data"], tokens, found)),
            Thread(target=be_polite, args=(ports["data"], stop, found)),
        ]
        context = multiprocessing.get_context("spawn")
        first = context.Process(target=run_attacks, args=(ports, 0.0))
        first.start()
        first.join()
        found.rest_mib = settled(process.pid)
        print(f"at rest: {found.rest_mib:.0f} MiB", flush=True)
        with Prober(ports["health"], process.pid) as prober:
            for one in beside:
                one.start()
            attackers = context.Process(target=run_attacks, args=(ports, seconds))
            attackers.start()
            attackers.join()
            stop.set()
            for one in beside:
                one.join()
        waits = sorted(prober.waits)
        found.worst_health_ms = waits[-1] * 1000
        worst = ", ".join(f"{wait:.2f}" for wait in waits[:-4:-1])
        print(f"{prober.slowest % 1000:6.1f} the slowest health of {worst} s")
        found.p99_health_ms = waits[int(len(waits) * 0.99)] * 1000
        found.alive = process.poll() is None
        found.peak_mib = prober.peak / 2**20
        found.end_mib = settled(process.pid) if found.alive else 0.0
        if found.stream_tokens != tokens:
            found.stream_failed = found.stream_failed or f"{found.stream_tokens} of {tokens} tokens"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--memory", type=int, default=2048, help="MiB of address room for the front")
    options = parser.parse_args()
    found = attack(options.seconds, options.memory)
    print(json.dumps({"bench": "attack", "seconds": options.seconds, "memory_mib": options.memory, **asdict(found)}))
    held = found.alive and not found.stream_failed and found.worst_health_ms < 1000
    return 0 if held and found.end_mib < found.rest_mib * 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
