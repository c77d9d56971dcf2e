"""Verifying steps on a GPU with random weights of real shapes: what k checked guesses cost beside a plain step, and
tokens a second where a set share of the guesses is right.

    python -m bench.verifying --model qwen3-0.6b --format bf16
    python -m bench.verifying --model mistral-7b --format int4 --draft

The draft is forced: it knows the text, and is right with the chance given, at each place anew. With `--draft` a random
draft model of 6 layers by 1,024 guesses beside it, so that its time is in the round's; what it guesses does not count.
Every text is checked against the plain steps' own, token by token. `predicted` is expected tokens a round over the cost
of its step, measured at four places of the text. Prints tables and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.about import device, revision
from bench.kernels import FORMATS, SPECS, Spec, random_weights, timers
from bench.two_pass import with_copy
from engine.api import GREEDY, Stopping
from engine.execution.graph_decode.pipeline import RowState
from engine.execution.speculation.captured.captured_rounds import CapturedRounds
from engine.execution.speculation.captured.draft_steps import DeviceDraft
from engine.execution.speculation.captured.rounds import GROUPS, RoundPipeline, RoundTold
from engine.kernels import two_pass
from engine.kernels.attention import Heads
from engine.kernels.build import KernelLibrary, WantedKernels, open_library
from engine.kernels.launch import Launcher
from engine.kernels.speculation import Future
from engine.kernels.step import ChainPlan, StepWeights, allocate, prepare_start, prepare_step
from engine.scheduling.plan import Admitted, Row, StepPlan
from engine.scheduling.sequence_state import SequenceState, SequenceTable

TOKENS = 512  # of a text
ROUNDS = 32  # of a timing of the device alone
DRAFT = Spec(6, 1024, 3072, Heads(16, 8, 128, True), 0)  # with the target's vocabulary
DRAFTED = ((0.8, 1), (0.8, 3), (0.9, 3), (0.9, 7))  # as CHANCES, with a draft model
CHANCES = ((0.5, 3), (0.7, 3), (0.9, 3), (0.5, 7), (0.7, 7), (0.9, 7))  # that a guess is right, and guesses a round


@dataclass
class Text:
    """One sequence, and what the plain steps make of it."""

    prompt: list[int]
    most: int  # tokens it may hold
    plain: list[int]

    def begin(self) -> tuple[SequenceTable, SequenceState]:
        table, pages = SequenceTable(), tuple(range(-(-self.most // 16)))
        stopping = Stopping(max_tokens=TOKENS)
        admitted = Admitted(0, 0, tuple(self.prompt), len(self.prompt), GREEDY, stopping)
        row = Row(0, 0, len(self.prompt) - 1, 1, True, 0, pages)
        table.apply(StepPlan(rows=(row,), admitted=(admitted,)))
        return table, table.of(row)


def plain_steps(library: KernelLibrary, launcher: Launcher, weights: StepWeights, text: Text) -> float:
    """Fills in the plain text; microseconds a step."""
    plan = ChainPlan(torch.cuda.get_device_properties(0).multi_processor_count, longest=text.most, two_pass=True)
    buffers = allocate(weights, 1, -(-text.most // 16), 1024)
    buffers.places.pages.copy_(torch.arange(-(-text.most // 16), device="cuda").view(1, -1))
    chain, start = prepare_step(library, weights, buffers, plan), prepare_start(library, weights, buffers)
    graph = torch.cuda.CUDAGraph()
    launcher.enqueue(chain)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(4):
            launcher.enqueue(chain)
    times = []
    for _ in range(4):
        buffers.places.position.fill_(len(text.prompt) - 1)
        buffers.progress.token.fill_(text.prompt[-1])
        buffers.progress.count.zero_()
        launcher.enqueue([start])
        begin, end = timers()
        begin.record()
        for _ in range(TOKENS // 4):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / TOKENS)
    text.plain = [entry & 0xFFFFFF for entry in buffers.progress.ring[0, :TOKENS].tolist()]
    return statistics.median(times[1:])


def round_costs(device: CapturedRounds, text: Text, group: int) -> list[float]:
    """Microseconds of a round, back to back on the device, its host not asked, at places spread over the text."""
    times: list[float] = []
    for done in range(0, TOKENS, TOKENS // 4):
        _, state = text.begin()
        state.token_ids += text.plain[:done]
        for _ in range(2):
            device.write([row_state(state)], [GROUPS[-1] - 1], 0)
            device.launch(group, text.most)
            begin, end = timers()
            begin.record()
            for _ in range(ROUNDS):
                device.launch(group, text.most)
            end.record()
            torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / ROUNDS)
    return times


def row_state(state: SequenceState) -> RowState:
    start = len(state.token_ids) - 1
    last = state.prompt_length + TOKENS - 1
    return RowState(state.token_ids[-1], start, last, (), 0.0, 0, tuple(state.pages), state, ())


@dataclass(frozen=True, slots=True)
class Run:
    """A text made in rounds."""

    seconds: float
    rounds: int
    proposed: int
    accepted: int
    same: int  # tokens until the first that is not the plain text's


def run(device: CapturedRounds, text: Text, group: int) -> Run:
    """The whole text, rounds launched ahead, the host reading along."""
    table, state = text.begin()
    pipeline = RoundPipeline(device, table, text.most)
    told: list[RoundTold] = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    while len(state.token_ids) < len(text.prompt) + TOKENS:
        row = Row(0, 0, len(state.token_ids) - 1, 1, True)
        brought = pipeline.step((row,), group, (GROUPS[-1] - 1,))[0]
        state.token_ids += brought.token_ids
        told += brought.rounds
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    made = state.token_ids[len(text.prompt) :]
    same = next((at for at, (a, b) in enumerate(zip(made, text.plain, strict=True)) if a != b), TOKENS)
    return Run(seconds, len(told), sum(one.proposed for one in told), sum(one.accepted for one in told), same)


def expected(chance: float, drafts: int) -> float:
    """Tokens a round brings."""
    return sum(chance**i for i in range(drafts + 1))


def random_draft(vocabulary: int, most: int) -> DeviceDraft:
    """A draft model over the same pages."""
    spec = replace(DRAFT, vocabulary=vocabulary)
    weights = random_weights(spec, FORMATS["bf16"], -(-most // 16), most)
    if two_pass.why_not(weights.head) is None:
        weights = with_copy(weights)
    return DeviceDraft(weights, lambda sequence, until: None)


def future_of(text: Text) -> torch.Tensor:
    """What a forced draft knows."""
    ids = torch.zeros(text.most, dtype=torch.int32, device="cuda")
    known = [*text.prompt, *text.plain]
    ids[: len(known)] = torch.tensor(known, dtype=torch.int32)
    return ids


def forced(
    library: KernelLibrary,
    weights: StepWeights,
    text: Text,
    cost: dict[int, float],
    plain: float,
    draft: DeviceDraft | None,
) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    ids = future_of(text)
    for chance, drafts in DRAFTED if draft else CHANCES:
        rounds = CapturedRounds(library, weights, text.most, Future(ids, chance), draft)
        rounds.build()
        run(rounds, text, drafts + 1)
        runs = sorted((run(rounds, text, drafts + 1) for _ in range(3)), key=lambda one: one.seconds)
        one = runs[1]
        predicted = expected(chance, drafts) / cost[drafts + 1] * 1e6
        rate = TOKENS / one.seconds
        yield {
            "proposer": "draft_model" if draft else "forced",
            "chance": chance,
            "k": drafts,
            "acceptance": round(one.accepted / max(one.proposed, 1), 3),
            "rounds": one.rounds,
            "tokens_per_second": round(rate, 1),
            "baseline_tokens_per_second": round(1e6 / plain, 1),
            "predicted_tokens_per_second": round(predicted, 1),
            "same": one.same,
        }
        rounds.close()


def measure(model: str, form: str, context: int, drafted: bool) -> dict[str, Any]:
    """One model at one context."""
    launcher, library = Launcher(), open_library(torch.cuda.get_device_capability())
    most = context + TOKENS + 64
    weights = random_weights(SPECS[model], FORMATS[form], -(-most // 16), most)
    if two_pass.why_not(weights.head) is None:
        weights = with_copy(weights)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, SPECS[model].vocabulary, (context,), generator=generator).tolist()
    text = Text(prompt, most, [])
    draft = random_draft(SPECS[model].vocabulary, most) if drafted else None
    wanted = WantedKernels(library.gpu)
    CapturedRounds(wanted, weights, most, Future(future_of(text), 0.0), draft).build()
    library.compile_ahead(wanted.sources)
    rounds = CapturedRounds(library, weights, most)
    rounds.build()
    plain = plain_steps(library, launcher, weights, text)
    wrong = CapturedRounds(library, weights, most, Future(future_of(text), 0.0), draft)  # so that each brings one token
    wrong.build()
    places = {group: round_costs(wrong, text, group) for group in GROUPS}
    cost = {group: statistics.mean(times) for group, times in places.items()}
    wrong.close()
    print(f"{model} {form} at {context}: plain step {plain:.1f} µs; round of", end=" ")
    print(", ".join(f"{group}: {each:.1f} ({each / plain:.2f} x)" for group, each in cost.items()), flush=True)
    for group, times in places.items():
        print(f"  round of {group}, from front to back: " + ", ".join(f"{each:.1f}" for each in times), flush=True)
    own = run(rounds, text, 4)
    print(
        f"  prompt lookup: {own.same} of {TOKENS} tokens the same, {own.accepted} of {own.proposed} accepted",
        flush=True,
    )
    rounds.close()
    rows = []
    for row in forced(library, weights, text, cost, plain, draft):
        rows.append(row)
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return {"model": model, "format": form, "context": context, "plain_us": plain, "round_us": cost, "rows": rows}


def main(given: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SPECS, default="qwen3-0.6b")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--revision", default=None, help="the commit to write down")
    parser.add_argument("--draft", action="store_true", help="with a draft model of 6 layers by 1,024")
    asked = parser.parse_args(given)
    with torch.inference_mode():
        found = measure(asked.model, asked.format, asked.context, asked.draft)
    print(json.dumps({"bench": "verifying", "revision": asked.revision or revision(), "device": device(), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
