"""Measures the same work with the optimisations switched on one after another, and each one's own gain, in one run.

    whippet bench ladder --model models/demo

Two servers of one model: with its weights as they are, and with them as 8-bit rows made while loading, where that can
be. Every rung is a set of switches, set live; within a round all rungs do the same work, so that a slow minute slows
all of them. A rung that does nothing for this model on this machine is left out and named with the server's own reason.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.live import DEMO, Live, LiveRequest, copying, free, started
from bench.result import Result, Samples

# In the order in which they are switched on. What a build has beyond these comes before the caches.
ORDER = ("batching", "fused_kernels", "graphs", "two_pass_head")
LATER = ("speculation",)
CACHES = ("prefix_cache", "response_cache")
NOT_HERE = ("prefix_redis", "semantic_cache")  # need Redis, or questions in other words
QUANTIZED = "8-bit weights"
_SHARED = "\n".join(f"LIMIT_{n} = {n * 37 % 101}" for n in range(12))


@dataclass(frozen=True, slots=True)
class Rung:
    """Switches that are on, and which of the two servers runs."""

    name: str
    on: frozenset[str]
    quantized: bool


@dataclass(frozen=True, slots=True)
class Left:
    """A rung that has no effect here."""

    name: str
    why: str


def rungs(switches: Mapping[str, str], quantized: str) -> tuple[list[Rung], list[Left]]:
    """Returns the ladder. `switches` by name, with the server's reason why one has no effect, else empty; `quantized`
    likewise for 8-bit weights."""
    found, left = [Rung("eager", frozenset(), False)], list[Left]()
    others = tuple(name for name in switches if name not in (*ORDER, *LATER, *CACHES, *NOT_HERE))
    for name in (*ORDER, *others, QUANTIZED, *LATER, *CACHES):
        last = found[-1]
        why = quantized if name == QUANTIZED else switches.get(name, "this build has no such switch")
        if why:
            left.append(Left(name, why))
        elif name == QUANTIZED:
            found.append(Rung(name, last.on, True))
        else:
            found.append(Rung(name, last.on | {name}, last.quantized))
    return found, left


def work(tokens: int, turn: int) -> list[list[LiveRequest]]:
    """Groups of requests, one group after the other, those of a group at once: a copy and a free text alone, four
    together that begin alike, then two of them asked again."""
    alone = [[LiveRequest(copying(turn), tokens, answers=True)], [LiveRequest(free(turn), tokens, answers=True)]]
    together = [LiveRequest(f"{_SHARED}\n# {turn} {n}\ndef f{n}():", tokens, answers=True) for n in range(4)]
    return [*alone, together, together[:2]]


def climb(
    live: Live, rung: Rung, known: Sequence[str], groups: Sequence[Sequence[LiveRequest]]
) -> tuple[float, list[int]]:
    """Measures tokens a second of the whole work, and all ids of the two that ran alone."""
    for name in known:
        live.switch(name, name in rung.on)
    live.forget()
    ids, count, began = list[int](), 0, time.monotonic()
    for number, group in enumerate(groups):
        with ThreadPoolExecutor(len(group)) as pool:
            replies = list(pool.map(live.ask, group))
        count += sum(one.tokens for one in replies)
        if number < 2:
            ids += [token for one in replies for token in one.ids]
    return count / (time.monotonic() - began), ids


def table(rates: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Returns a row per rung: its rate, its gain over the rung below as the median of the rounds, and over the
    first."""
    rows: list[dict[str, Any]] = []
    names = list(rates)
    for number, name in enumerate(names):
        below, first = rates[names[max(0, number - 1)]], rates[names[0]]
        gain = statistics.median(a / b for a, b in zip(rates[name], below, strict=True))
        total = statistics.median(a / b for a, b in zip(rates[name], first, strict=True))
        rate = round(statistics.median(rates[name]), 1)
        rows.append({"rung": name, "tokens_per_second": rate, "gain": round(gain, 3), "total": round(total, 3)})
    return rows


def command(argv: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(
        prog="whippet bench ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(DEMO) if DEMO.exists() else None, help="a folder or a GGUF file")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    with ExitStack() as stack:
        own = stack.enter_context(started(given.model, ()))
        plain = Live(own.address, admin=own.admin)
        stack.callback(plain.close)
        quantized, why = _quantized(stack, given.model)
        switches = _reasons(plain)
        steps, left = rungs(switches, why)
        for one in left:
            print(f"{one.name:18} left out: {one.why}")
        rates: dict[str, list[float]] = {one.name: [] for one in steps}
        answers: dict[str, list[list[int]]] = {one.name: [] for one in steps}
        for turn in range(given.rounds + 1):  # the first is for warming up
            for rung in steps:
                live = quantized if rung.quantized and quantized is not None else plain
                rate, ids = climb(live, rung, tuple(switches), work(given.tokens, turn))
                if turn:
                    rates[rung.name].append(rate)
                    answers[rung.name].append(ids)
            print(f"round {turn} of {given.rounds}", flush=True)
    rows = table(rates)
    forms = [[one.name for one in steps if one.quantized is kind] for kind in (False, True)]
    same = all(answers[name] == answers[form[0]] for form in forms if form for name in form)
    print(f"{'':18} {'tokens/s':>10} {'gain':>8} {'in all':>8}")
    for row in rows:
        print(f"{row['rung']:18} {row['tokens_per_second']:10.1f} {row['gain']:7.2f}x {row['total']:7.2f}x")
    print(f"answers of one form of the weights are {'the same' if same else 'NOT the same'} on all rungs", flush=True)
    figures = {"rungs": rows, "left_out": [{"rung": one.name, "why": one.why} for one in left], "same": same}
    samples = {name: Samples("tokens/s", tuple(values)) for name, values in rates.items()}
    return Result("ladder", {**vars(given), "model": Path(given.model).name}, figures, samples)


def _quantized(stack: ExitStack, model: str) -> tuple[Live | None, str]:
    """Returns a server with 8-bit weights, or why there is none."""
    try:
        own = stack.enter_context(started(model, ["--quantization=int8"]))
    except RuntimeError:
        return None, "the weights are quantized already, or cannot be made so while loading"
    live = Live(own.address, admin=own.admin)
    stack.callback(live.close)
    return live, ""


def _reasons(live: Live) -> dict[str, str]:
    """Returns why each switch has no effect here; empty where it has one. All are turned on first."""
    found: dict[str, str] = {}
    for one in live.switches():
        if one.name in NOT_HERE:
            continue
        try:
            state = live.switch(one.name, True)
        except grpc.RpcError:
            state = one
        found[one.name] = "" if state.effective else state.why_not or "does nothing here"
    return found
