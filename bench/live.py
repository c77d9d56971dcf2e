"""Measures a running server as its callers see it: drafts, caches and switches, each with and without, in turns.

Works against any Whippet that answers (`--target`), or one that is started for the purpose.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.own_server import served_model, server, with_tokenizer
from bench.pace import quantile
from bench.result import ROOT, Result, Samples, finish
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.admin_pb2_grpc import AdminServiceStub
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

DEMO = ROOT / "models" / "demo"
_PATIENCE = 300.0  # seconds of a call
_CALLERS = 3  # in turn, where evidence must come from several
PLACE_NAMES = (
    "the library",
    "the post office",
    "the town hall",
    "the railway station",
    "the swimming pool",
    "the museum",
)
QUESTIONS_ALIKE = (  # each a question with the same one in other words, and one that only looks alike
    ("When does {0} open?", "when does {0} open", "When does {0} close?"),
    ("How do I get to {0}?", "How do I get to {0}", "How do I get from {0}?"),
    ("Is {0} open on Sundays?", "is {0} open on sundays?", "Is {0} closed on Sundays?"),
)


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A greedy request, of exactly `tokens` tokens."""

    text: str
    tokens: int
    drafts: bool = True
    prefix: bool = True  # what prompts begin with may come from a cache
    answers: bool = False  # the answer may


@dataclass(slots=True)
class Reply:
    """An answer's figures. Seconds from the request."""

    first: float = 0.0
    whole: float = 0.0
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    finish: pb.Finish = field(default_factory=pb.Finish)

    @property
    def rate(self) -> float:
        """Tokens a second after the first message."""
        return (self.tokens - 1) / max(self.whole - self.first, 1e-9)


class Live:
    def __init__(self, address: str, token: str = "", admin: str = "") -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", 1 << 24)])
        make: Any = GenerationServiceStub
        self._stub = make(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._admin_channel = grpc.insecure_channel(admin) if admin else None
        self._admin: Any = None if self._admin_channel is None else AdminServiceStub(self._admin_channel)  # type: ignore[no-untyped-call]

    def ask(self, asked: LiveRequest) -> Reply:
        """Reads one answer to its end. Raises grpc.RpcError."""
        message = pb.GenerateStreamRequest(text=asked.text)
        message.stopping.max_tokens, message.stopping.ignore_eos = asked.tokens, True
        message.output.text = message.output.token_ids = True
        message.sampling.temperature = 0.0
        message.sampling.repetition_penalty = 1.0
        message.cache.semantic = pb.CACHE_MODE_OFF
        message.cache.response = pb.CACHE_MODE_READ_WRITE if asked.answers else pb.CACHE_MODE_OFF
        message.cache.bypass_prefix = not asked.prefix
        message.speculation.disable = not asked.drafts
        began, reply = time.monotonic(), Reply()
        for part in self._stub.GenerateStream(message, metadata=self._metadata, timeout=_PATIENCE):
            if part.token_ids:
                reply.first = reply.first or time.monotonic() - began
                reply.ids += part.token_ids
            if part.HasField("finish"):
                reply.finish = part.finish
        reply.whole, reply.tokens = time.monotonic() - began, len(reply.ids)
        return reply

    def switches(self) -> list[admin_pb2.Optimization]:
        """Lists the server's switches. Raises grpc.RpcError."""
        answer = self._admin.ListOptimizations(
            admin_pb2.ListOptimizationsRequest(), metadata=self._metadata, timeout=_PATIENCE
        )
        return list(answer.optimizations)

    def switch(self, name: str, enabled: bool) -> admin_pb2.Optimization:
        """Turns an optimisation on or off. Raises grpc.RpcError."""
        request = admin_pb2.SetOptimizationRequest(name=name, enabled=enabled)
        answer = self._admin.SetOptimization(request, metadata=self._metadata, timeout=_PATIENCE)
        found: admin_pb2.Optimization = answer.optimization
        return found

    def forget(self) -> None:
        """Empties every cache. Raises grpc.RpcError."""
        self._admin.FlushCache(admin_pb2.FlushCacheRequest(), metadata=self._metadata, timeout=_PATIENCE)

    def close(self) -> None:
        self._channel.close()
        if self._admin_channel is not None:
            self._admin_channel.close()


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags of a bench that starts a server or calls one."""
    parser.add_argument("--target", metavar="HOST:PORT", help="a server that runs; default: one is started")
    parser.add_argument("--token", default="", help="of a caller of that server")
    parser.add_argument("--model", default=str(DEMO) if DEMO.exists() else None, help="a folder or a GGUF file")


@contextmanager
def opened(given: argparse.Namespace, flags: Sequence[str] = ()) -> Iterator[Live]:
    """Yields the server of --target, or one of ours. Raises ValueError where there is neither."""
    with ExitStack() as stack:
        if given.target is not None:
            live = Live(given.target, given.token, getattr(given, "admin", None) or "")
        else:
            own = stack.enter_context(started(given.model, flags))
            live = Live(own.address, admin=own.admin)
        stack.callback(live.close)
        yield live


@contextmanager
def started(model: str | None, flags: Sequence[str]) -> Iterator[Any]:
    if model is None:
        raise ValueError("name a model: --model FOLDER, or a GGUF file")
    with tempfile.TemporaryDirectory() as scratch:
        served = with_tokenizer(Path(model).resolve(), Path(scratch) / "model")
        with server([f"--model={served}", *flags]) as own:
            yield own


def settings(given: argparse.Namespace, live: Live) -> dict[str, Any]:
    """Returns a record's settings: the flags, and the model as the server names it."""
    name = Path(given.model).name if given.target is None else served_model(live.address, given.token).name
    return {**{key: value for key, value in vars(given).items() if key != "token"}, "model": name}


def copying(number: int) -> str:
    """Asks for a passage to be repeated, which prompt lookup predicts well."""
    generator = random.Random(number)
    lines = [f"    {generator.choice('abcdefgh')}{n} = read(path, {generator.randrange(100)})" for n in range(12)]
    passage = f"def load_{number}(path):\n" + "\n".join(lines)
    return f"{passage}\n\n# The same again:\n\n" + "\n".join(passage.splitlines()[:2]) + "\n"


def free(number: int) -> str:
    """Asks for text that cannot be copied."""
    return f"def step_{number}(state):\n    "


# Speculation


def speculation(argv: Sequence[str] | None = None) -> Result:
    """Drafts through the wire: the same prompts with and without, in turns; answers are compared, id for id."""
    parser = argparse.ArgumentParser(prog="whippet bench speculation", description=summary_of(speculation))
    add_server_flags(parser)
    parser.add_argument("--draft-model", help="for a server that is started")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args(argv)
    flags = [f"--draft-model={given.draft_model}"] if given.draft_model else []
    sets: Mapping[str, Callable[[int], str]] = {"copies": copying, "code": free}
    figures: dict[str, Any] = {}
    samples: dict[str, Samples] = {}
    with opened(given, flags) as live:
        for name, prompt in sets.items():
            live.ask(LiveRequest(prompt(0), given.tokens))
            turns = [_with_and_without(live, prompt(n), given.tokens, n) for n in range(1, given.rounds + 1)]
            on, off = [turn[0] for turn in turns], [turn[1] for turn in turns]
            proposed = sum(one.finish.usage.draft_proposed for one in on)
            accepted = sum(one.finish.usage.draft_accepted for one in on)
            figures[name] = {
                "tokens_per_second": round(statistics.median(one.rate for one in on), 1),
                "without": round(statistics.median(one.rate for one in off), 1),
                "ratio": round(statistics.median(a.rate / b.rate for a, b in turns), 3),
                "proposed": proposed,
                "accepted": accepted,
                "acceptance": round(accepted / proposed, 3) if proposed else None,
                "same": all(a.ids == b.ids for a, b in turns),
            }
            samples[f"{name}, with drafts"] = Samples("tokens/s", tuple(one.rate for one in on))
            samples[f"{name}, without"] = Samples("tokens/s", tuple(one.rate for one in off))
            print(f"{name:8} {figures[name]}", flush=True)
        return Result("speculation", settings(given, live), {"sets": figures}, samples)


def _with_and_without(live: Live, text: str, tokens: int, turn: int) -> tuple[Reply, Reply]:
    order = (True, False) if turn % 2 else (False, True)
    found = {drafts: live.ask(LiveRequest(text, tokens, drafts=drafts)) for drafts in order}
    return found[True], found[False]


# Caches


def cache(argv: Sequence[str] | None = None) -> Result:
    """Measures what the caches save: a stored answer, a prompt with a known beginning; and how often the semantic cache
    serves rightly and wrongly, on questions of our own with their interval."""
    parser = argparse.ArgumentParser(prog="whippet bench cache", description=summary_of(cache))
    add_server_flags(parser)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shared", type=int, default=40, help="lines that prompts begin with")
    given = parser.parse_args(argv)
    run = f"{time.time_ns():x}"  # so that a server that ran before has none of this
    shared = "\n".join(f"    value_{n} = measure({n * 37 % 101})" for n in range(given.shared))
    with opened(given) as live:
        arms = {"generated": [], "stored": [], "computed": [], "prefix found": []}  # type: dict[str, list[Reply]]
        live.ask(LiveRequest(f"# {run}\n{shared}\n# 0", 2))
        for n in range(given.rounds):
            arms["generated"].append(live.ask(LiveRequest(f"# {run} {n}\ndef f():", given.tokens, answers=True)))
            _settle(live)
            arms["stored"].append(live.ask(LiveRequest(f"# {run} {n}\ndef f():", given.tokens, answers=True)))
            arms["computed"].append(live.ask(LiveRequest(f"# {run}\n{shared}\n# {n}", 2, prefix=False)))
            arms["prefix found"].append(live.ask(LiveRequest(f"# {run}\n{shared}\n# {n}", 2)))
        kept = settings(given, live)
    stored = sum(one.finish.cache_source == pb.CACHE_SOURCE_RESPONSE for one in arms["stored"])
    cached = [one.finish.usage.cached_tokens for one in arms["prefix found"]]
    figures: dict[str, Any] = {
        "stored_hits": [stored, given.rounds],
        "cached_tokens": statistics.median(cached),
        "prompt_tokens": arms["computed"][0].finish.usage.prompt_tokens,
        "same": all(a.ids == b.ids for a, b in zip(arms["generated"], arms["stored"], strict=True)),
        "ms": {
            "generated": _ms([one.whole for one in arms["generated"]]),
            "stored": _ms([one.whole for one in arms["stored"]]),
            "first token, computed": _ms([one.first for one in arms["computed"]]),
            "first token, prefix found": _ms([one.first for one in arms["prefix found"]]),
        },
        "semantic": semantic(),
    }
    for name, row in figures["ms"].items():
        print(f"{name:28} p50 {row['p50']:9.3f} ms  p95 {row['p95']:9.3f} ms")
    print(f"stored answers found {stored} of {given.rounds}; semantic cache: {figures['semantic']}", flush=True)
    samples = {
        "answer, generated": Samples("ms", tuple(1e3 * one.whole for one in arms["generated"])),
        "answer, stored": Samples("ms", tuple(1e3 * one.whole for one in arms["stored"])),
        "first token, computed": Samples("ms", tuple(1e3 * one.first for one in arms["computed"])),
        "first token, prefix found": Samples("ms", tuple(1e3 * one.first for one in arms["prefix found"])),
    }
    return Result("cache", kept, figures, samples)


def _settle(live: Live) -> None:
    """Waits until answers are stored, which happens behind the last message."""
    time.sleep(0.05)


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": round(1e3 * quantile(seconds, share / 100), 3) for share in (50, 95)}


def semantic() -> dict[str, Any]:
    """Counts what the semantic cache serves of reworded questions, and of those that only look alike. Without the
    embedder the reason stands in its place."""
    try:
        from cache.semantic.embedder import open_embedder
        from cache.semantic.export import ExportFailed, exported, missing
        from cache.semantic.guard import strictly_equal, veto
    except ImportError as error:
        return {"missing": f"{error.name}, of the extra `embed`"}
    if absent := missing(None):
        return {"missing": f"{', '.join(absent)}, of the extra `embed`"}
    try:
        embedder = open_embedder(exported(None))
    except ExportFailed as error:
        return {"missing": str(error)}
    right, wrong, of = 0, 0, 0
    for place, (one, same, other) in itertools.product(PLACE_NAMES, QUESTIONS_ALIKE):
        first = one.format(place)
        for text, means in ((same.format(place), True), (other.format(place), False)):
            near = float(embedder.embed(first) @ embedder.embed(text)) >= 0.80
            served = near and strictly_equal(first, text) and not veto(first, text)
            right += served and means
            wrong += served and not means
        of += 1
    low, high = interval(wrong, of)
    return {"right": right, "wrong": wrong, "of": of, "wrong_share_95": [round(low, 4), round(high, 4)]}


def interval(wrong: int, of: int) -> tuple[float, float]:
    """Returns Wilson's interval of 95 %."""
    if not of:
        return 0.0, 1.0
    z, share = 1.959964, wrong / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * (share * (1 - share) / of + z * z / (4 * of * of)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


# Rollback


def rollback(argv: Sequence[str] | None = None) -> int:
    """Turns one optimisation off on a running server and shows what that changes. It stays off."""
    parser = argparse.ArgumentParser(prog="whippet rollback", description=summary_of(rollback))
    parser.add_argument("name", help="as in optimizations.NAME; `list` names all")
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="data port; %(default)s")
    parser.add_argument("--admin", default="127.0.0.1:50052", metavar="HOST:PORT", help="admin port; %(default)s")
    parser.add_argument("--token", default="", help="of an operator, who may call both")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer that is measured")
    parser.add_argument("--answers", type=int, default=4, help="before and after")
    parser.add_argument("--undo", action="store_true", help="turn it on again instead")
    parser.add_argument("--output", type=Path, metavar="NAME", help="a file for the result")
    given = parser.parse_args(argv)
    live = Live(given.target, given.token, given.admin)
    try:
        return _rollback(live, given)
    except grpc.RpcError as error:
        call: Any = error
        sys.stderr.write(f"whippet rollback: {call.code().name}: {call.details()}\n")
        return 64 + int(call.code().value[0])
    finally:
        live.close()


def _rollback(live: Live, given: argparse.Namespace) -> int:
    known = {found.name: found for found in live.switches()}
    if given.name not in known:
        for switch in known.values():
            state = "on" if switch.effective else f"{'on' if switch.enabled else 'off'} {switch.why_not}".strip()
            print(f"{switch.name:16} {state:40} {switch.description}")
        return 0 if given.name == "list" else 2
    before = _measured(live, given)
    began = time.monotonic()
    switched = live.switch(given.name, given.undo)
    took = time.monotonic() - began
    after = _measured(live, given)
    state = "on" if switched.enabled else "off"
    print(f"{given.name}: {state} after {1e3 * took:.0f} ms. {switched.why_not}".rstrip())
    for name, less in (("tokens/s", False), ("first token, ms", True)):
        one, two = statistics.median(before[name]), statistics.median(after[name])
        word = "better" if (two < one) == less else "worse"
        print(f"{name:16} before {one:10.1f}  after {two:10.1f}  {two / one - 1:+.1%} {word}")
    turn = "off again" if given.undo else "on again"
    print(f"To turn it {turn}: whippet rollback {given.name}{'' if given.undo else ' --undo'}")
    samples = {
        f"{name}, {when}": Samples("ms" if name.endswith("ms") else name, tuple(values))
        for when, found in (("before", before), ("after", after))
        for name, values in found.items()
    }
    figures = {"switch": given.name, "enabled": switched.enabled, "switched_ms": round(1e3 * took, 1)}
    asked = {key: value for key, value in vars(given).items() if key not in ("token", "output")}
    return finish(Result("rollback", asked, figures, samples), given.output)


def _measured(live: Live, given: argparse.Namespace) -> dict[str, list[float]]:
    """Measures answers that copy and answers that do not, one after the other; the first of each is repeated, so that
    caches count as they do for callers."""
    replies = []
    for n in range(given.answers):
        text = copying(n // 2) if n % 2 else free(n // 2)
        live.ask(LiveRequest(text, given.tokens, answers=True))
        began = time.monotonic()
        reply = live.ask(LiveRequest(text, given.tokens, answers=True))
        replies.append((reply, time.monotonic() - began))
    return {
        "tokens/s": [one.tokens / max(took, 1e-9) for one, took in replies],
        "first token, ms": [1e3 * one.first for one, _ in replies],
    }


def summary_of(function: Callable[..., object]) -> str:
    return " ".join((function.__doc__ or "").split())


if __name__ == "__main__":
    sys.exit(rollback(sys.argv[1:]))
