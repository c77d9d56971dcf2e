"""Measures verifying steps on a GPU with random weights of real shapes: what k checked drafts cost beside a plain step,
and tokens a second where a set share of the drafts is right.

    python -m bench.verifying --model qwen3-0.6b --format bf16
    python -m bench.verifying --model mistral-7b --format int4 --draft
    python -m bench.verifying --model mistral-7b --format int4 --draft --streams 2

The draft is forced: it knows the text, and is right with the chance given, at each place anew. With `--draft` a random
draft model of 6 layers by 1,024 guesses beside it, so that its time is in the round's; what it guesses does not count.
With `--streams`, two or four sequences of the same text share each round, and figures are of all of them.
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

from bench.attention import with_copy
from bench.kernels import FORMATS, H100_BANDWIDTH, SPECS, STEPS, KernelBench, Spec, median_us, random_weights, timers
from bench.result import device, revision, run_one_of, summary
from engine.api import GREEDY, Stopping
from engine.execution.graphs.prefill import DeviceDraft
from engine.execution.graphs.verify import VerifyGraphs
from engine.execution.pipeline import GROUPS, Pipeline, Rewrite, RowState, StepLaunch, verify_lookahead
from engine.execution.speculation.verify_executor import SEVERAL
from engine.kernels import batch_sampling as many_rows
from engine.kernels import two_pass
from engine.kernels.attention import Heads, RowPages
from engine.kernels.build import KernelLibrary, Kernels, WantedKernels, open_library
from engine.kernels.launch import Launch, Launcher
from engine.kernels.prefill import ProductParts
from engine.kernels.sampling import SampledRow, Sampling, sampling, write_marks
from engine.kernels.sampling import allocate as allocate_sampling
from engine.kernels.speculation import Future
from engine.kernels.tokens import Choice
from engine.model.layers.few_rows import ChainPlan, StepWeights, allocate, prepare_start, prepare_step
from engine.scheduling.plan import Admitted, Row, StepPlan
from engine.scheduling.sequence_state import SequenceState, SequenceTable

TOKENS = 512  # of a text
ROUNDS = 32  # of a timing of the device alone
DRAFT = Spec(6, 1024, 3072, Heads(16, 8, 128, True), 0)  # with the target's vocabulary
DRAFTED = ((0.8, 1), (0.8, 3), (0.9, 3), (0.9, 7))  # as CHANCES, with a draft model
CHANCES = ((0.5, 3), (0.7, 3), (0.9, 3), (0.5, 7), (0.7, 7), (0.9, 7))  # that a guess is right, and guesses a round


@dataclass
class Text:
    prompt: list[int]
    most: int  # tokens it may hold
    streams: int  # sequences of it
    plain: list[int]

    @property
    def pages(self) -> int:
        return -(-self.most // 16)

    @property
    def all_pages(self) -> torch.Tensor:
        return torch.arange(self.streams * self.pages, dtype=torch.int32).view(self.streams, -1)

    def begin(self) -> tuple[SequenceTable, list[SequenceState]]:
        table, rows, admitted = SequenceTable(), [], []
        for at, pages in enumerate(self.all_pages.tolist()):
            stopping = Stopping(max_tokens=TOKENS)
            admitted.append(Admitted(at, at, tuple(self.prompt), len(self.prompt), GREEDY, stopping))
            rows.append(Row(at, at, len(self.prompt) - 1, 1, True, 0, tuple(pages)))
        table.apply(StepPlan(rows=tuple(rows), admitted=tuple(admitted)))
        return table, [table.of(row) for row in rows]


def plain_steps(library: KernelLibrary, launcher: Launcher, weights: StepWeights, text: Text) -> float:
    """Fills in the plain text; microseconds a step."""
    plan = ChainPlan(torch.cuda.get_device_properties(0).multi_processor_count, longest=text.most, two_pass=True)
    buffers = allocate(weights, text.streams, text.pages, 1024)
    buffers.places.pages.copy_(text.all_pages)
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


def round_costs(device: VerifyGraphs, text: Text, group: int) -> list[float]:
    """Measures microseconds of verifying steps, back to back on the device, its host not asked, at places spread over
    the text."""
    times: list[float] = []
    for done in range(0, TOKENS, TOKENS // 4):
        _, states = text.begin()
        for state in states:
            state.token_ids += text.plain[:done]
        for _ in range(2):
            device.update(Rewrite(tuple(row_state(state, group - 1) for state in states), 0))
            launch = StepLaunch(text.most, group=group)
            device.launch(launch)
            begin, end = timers()
            begin.record()
            for _ in range(ROUNDS):
                device.launch(launch)
            end.record()
            torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / ROUNDS)
    return times


def row_state(state: SequenceState, drafts: int) -> RowState:
    start = len(state.token_ids) - 1
    last = state.prompt_length + TOKENS - 1
    return RowState(state.token_ids[-1], start, last, (), 0.0, 0, tuple(state.pages), state, (), drafts)


@dataclass(frozen=True, slots=True)
class VerifyRun:
    tokens: int
    seconds: float
    rounds: int
    proposed: int
    accepted: int
    same: int  # tokens until the first that is not the plain text's


def run(device: VerifyGraphs, text: Text, group: int) -> VerifyRun:
    """Generates the whole text, steps launched ahead, the host reading along, until the first sequence has it."""
    table, states = text.begin()
    buckets = (text.streams,)
    pipeline = Pipeline(device, table, text.most, buckets=buckets, sizes=(1,), settles=False)
    pipeline.lookahead = {text.streams: verify_lookahead(1.0)}
    until = len(text.prompt) + TOKENS
    torch.cuda.synchronize()
    began = time.perf_counter()
    while all(len(state.token_ids) < until for state in states):
        rows = [Row(state.key, state.slot, len(state.token_ids) - 1, 1, True) for state in states]
        brought = pipeline.step(rows, group=group, most_drafts=[group - 1] * len(rows))
        for state in states:
            state.token_ids += brought[state.key].token_ids
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    made = [state.token_ids[len(text.prompt) :] for state in states]
    pairs = [(at, a, b) for ids in made for at, (a, b) in enumerate(zip(ids, text.plain, strict=False))]
    same = min((at for at, a, b in pairs if a != b), default=TOKENS)
    verified = [one for _, one in pipeline.verified]
    proposed, accepted = sum(one.proposed for one in verified), sum(one.accepted for one in verified)
    return VerifyRun(sum(map(len, made)), seconds, pipeline.read.total(), proposed, accepted, same)


def expected(chance: float, drafts: int) -> float:
    return sum(chance**i for i in range(drafts + 1))


def random_draft(vocabulary: int, pages: int, most: int) -> DeviceDraft:
    spec = replace(DRAFT, vocabulary=vocabulary)
    weights = random_weights(spec, FORMATS["bf16"], pages, most)
    if two_pass.why_not(weights.head) is None:
        weights = with_copy(weights)
    return DeviceDraft(weights, lambda sequence, until: None, lambda sequence, until: None)


def future_of(text: Text) -> torch.Tensor:
    ids = torch.zeros(text.most, dtype=torch.int32, device="cuda")
    known = [*text.prompt, *text.plain]
    ids[: len(known)] = torch.tensor(known, dtype=torch.int32)
    return ids.repeat(text.streams)


def forced(
    library: KernelLibrary,
    weights: StepWeights,
    text: Text,
    cost: dict[int, float],
    plain: float,
    draft: DeviceDraft | None,
) -> Iterator[dict[str, Any]]:
    ids = future_of(text)
    chances: Sequence[tuple[float, int]] = DRAFTED if draft else CHANCES
    if text.streams > 1:
        chances = [(chance, SEVERAL[text.streams] - 1) for chance in (0.5, 0.7, 0.8, 0.9)]
    for chance, drafts in chances:
        rounds = rounds_of(library, weights, text, Future(ids, chance), draft)
        run(rounds, text, drafts + 1)
        runs = sorted((run(rounds, text, drafts + 1) for _ in range(3)), key=lambda one: one.seconds)
        one = runs[1]
        predicted = text.streams * expected(chance, drafts) / cost[drafts + 1] * 1e6
        rate = one.tokens / one.seconds
        yield {
            "proposer": "draft_model" if draft else "forced",
            "chance": chance,
            "k": drafts,
            "acceptance": round(one.accepted / max(one.proposed, 1), 3),
            "rounds": one.rounds,
            "tokens_per_second": round(rate, 1),
            "baseline_tokens_per_second": round(text.streams * 1e6 / plain, 1),
            "predicted_tokens_per_second": round(predicted, 1),
            "same": one.same,
        }
        rounds.close()


def rounds_of(
    library: Kernels, weights: StepWeights, text: Text, future: Future | None, draft: DeviceDraft | None
) -> VerifyGraphs:
    """Makes graphs for as many sequences as there are of the text."""
    groups = GROUPS if text.streams == 1 else (SEVERAL[text.streams],)
    made = VerifyGraphs(library, weights, text.most, future, draft, sequences=text.streams, groups=groups)
    made.build()
    return made


def measure(model: str, form: str, context: int, drafted: bool, streams: int) -> dict[str, Any]:
    launcher, library = Launcher(), open_library(torch.cuda.get_device_capability())
    most = context + TOKENS + 64
    pages = streams * -(-most // 16)
    weights = random_weights(SPECS[model], FORMATS[form], pages, most)
    for layer in weights.layers:  # the prompt's, which are not computed: of each sequence the same
        for kept in (layer.attention.keys, layer.attention.values):
            by_sequence = kept.view(streams, -1, *kept.shape[1:])
            by_sequence[1:] = by_sequence[:1]
    if two_pass.why_not(weights.head) is None:
        weights = with_copy(weights)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, SPECS[model].vocabulary, (context,), generator=generator).tolist()
    text = Text(prompt, most, streams, [])
    draft = random_draft(SPECS[model].vocabulary, pages, most) if drafted else None
    groups = GROUPS if streams == 1 else (SEVERAL[streams],)
    wanted = WantedKernels(library.gpu)
    rounds_of(wanted, weights, text, Future(future_of(text), 0.0), draft)
    library.compile_ahead(wanted.sources)
    rounds = rounds_of(library, weights, text, None, None)
    plain = plain_steps(library, launcher, weights, text)
    wrong = rounds_of(library, weights, text, Future(future_of(text), 0.0), draft)  # so that each adds one token
    places = {group: round_costs(wrong, text, group) for group in groups}
    cost = {group: statistics.mean(times) for group, times in places.items()}
    wrong.close()
    print(f"{model} {form} at {context}, {streams} at once: plain step {plain:.1f} µs; round of", end=" ")
    print(", ".join(f"{group}: {each:.1f} ({each / plain:.2f} x)" for group, each in cost.items()), flush=True)
    for group, times in places.items():
        print(f"  round of {group}, from front to back: " + ", ".join(f"{each:.1f}" for each in times), flush=True)
    own = run(rounds, text, 4 if streams == 1 else groups[0])
    print(
        f"  prompt lookup: {own.same} of {TOKENS} tokens the same, {own.accepted} of {own.proposed} accepted",
        flush=True,
    )
    rounds.close()
    rows = []
    for row in forced(library, weights, text, cost, plain, draft):
        rows.append(row)
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return {
        "model": model,
        "format": form,
        "context": context,
        "streams": streams,
        "plain_us": plain,
        "round_us": cost,
        "rows": rows,
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SPECS, default="qwen3-0.6b")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--revision", default=None, help="the commit to write down")
    parser.add_argument("--draft", action="store_true", help="with a draft model of 6 layers by 1,024")
    parser.add_argument("--streams", type=int, choices=(1, *SEVERAL), default=1, help="sequences that share a round")
    asked = parser.parse_args(given)
    with torch.inference_mode():
        found = measure(asked.model, asked.format, asked.context, asked.draft, asked.streams)
    print(json.dumps({"bench": "verifying", "revision": asked.revision or revision(), "device": device(), **found}))
    return 0


TIMES = 50
PLAIN = SampledRow(temperature=1.0, noise_key=12345)
ROWS = {
    "top-k 50, top-p 0.95": replace(PLAIN, top_k=50, top_p=0.95),
    "top-k 50": replace(PLAIN, top_k=50),
    "top-p 0.95": replace(PLAIN, top_p=0.95),
    "min-p 0.05": replace(PLAIN, min_p=0.05),
    "penalties, greedy": replace(PLAIN, temperature=0.0, marked=True, repetition=1.1, frequency=0.2),
    "penalties, bias, top-k 50, top-p 0.95": replace(
        PLAIN, marked=True, biased=True, repetition=1.1, presence=0.1, top_k=50, top_p=0.95
    ),
}


def make_logits(kind: str, batch: int, vocabulary: int) -> torch.Tensor:
    noise = torch.randn(batch, vocabulary, device="cuda")
    if kind == "flat":
        return noise * 0.5
    return noise * 2 - 8 + 18 * torch.rand(batch, vocabulary, device="cuda") ** 200


def prepared(library: KernelLibrary, row: SampledRow, logits: torch.Tensor) -> tuple[Sampling, tuple[Launch, ...]]:
    """Returns the stages for a batch of rows that are all alike."""
    batch, vocabulary = logits.shape
    state = allocate_sampling(batch, vocabulary, logits.device)
    state.logits.copy_(logits)
    for at in range(batch):
        state.place(at, row)
        state.set_marks(at, list(range(100)), list(range(50, 200)), [])
    wide = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    choice = Choice(torch.ones(batch, device=logits.device), wide, wide.clone())
    place = torch.full((batch,), 500, dtype=torch.int32, device=logits.device)
    return state, sampling(library, state, choice, RowPages(place, place.view(batch, 1)))


def sampling_measure(
    library: KernelLibrary, launcher: Launcher, batches: list[int], vocabulary: int
) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for batch in batches:
        for kind in ("model", "flat"):
            logits = make_logits(kind, batch, vocabulary)
            for name, row in ROWS.items():
                _, chain = prepared(library, row, logits)
                upto = {
                    one.kernel.name: round(median_us(launcher, chain[: at + 1] * TIMES, TIMES), 2)
                    for at, one in enumerate(chain)
                }
                times = "  ".join(f"{stage} {time:.1f}" for stage, time in upto.items())
                print(f"{batch:3} {kind:6} {name:38} µs up to {times}", flush=True)
                records.append({"batch": batch, "logits": kind, "row": name, "us_upto": upto})
    return records


def measure_many(
    library: KernelLibrary, launcher: Launcher, batches: list[int], vocabulary: int
) -> list[dict[str, object]]:
    """Measures rows that are all alike, by the kernel of many rows."""
    records: list[dict[str, object]] = []
    for batch in batches:
        for kind in ("model", "flat"):
            logits = make_logits(kind, batch, vocabulary)
            device = logits.device
            for name, row in ROWS.items():
                bias = torch.zeros(vocabulary, device=device)
                marks = torch.zeros(vocabulary, dtype=torch.int32, device=device)
                write_marks(marks, list(range(100)), list(range(50, 200)), [])
                packed = row.packed(bias.data_ptr(), marks.data_ptr())
                state = torch.frombuffer(bytearray(packed * batch), dtype=torch.int32).view(batch, -1).to(device)
                place = torch.full((batch,), 500, dtype=torch.int32, device=device)
                best = torch.zeros(batch, dtype=torch.int64, device=device)
                one = many_rows.sample(library, state, ProductParts(logits), place, best)
                found = round(median_us(launcher, [one] * TIMES, TIMES), 1)
                print(f"{batch:3} {kind:6} {name:38} {found:8.1f} µs", flush=True)
                records.append({"batch": batch, "logits": kind, "row": name, "us": found})
    return records


def in_steps(library: KernelLibrary, launcher: Launcher, model: str, context: int) -> dict[str, float]:
    """Measures microseconds of a step, by the parameters of its one row."""
    longest = context + STEPS + 16
    weights = random_weights(SPECS[model], FORMATS["bf16"], -(-longest // 16), longest)
    bench = KernelBench(library, launcher, weights, -(-longest // 16), H100_BANDWIDTH)
    plan = ChainPlan(bench.multiprocessors, longest=context + STEPS)
    found = {}
    for name, row in {"greedy": None, **ROWS}.items():
        state = None
        if row is not None:
            state = allocate_sampling(1, weights.head.rows, weights.table.device)
            state.place(0, row)
        found[name] = round(bench.decode(plan, context, 1, sampled=state).microseconds, 1)
        print(f"{model}, ctx {context}: {name:38} {found[name]:7.1f} µs a step", flush=True)
    return found


def sampling_main() -> int:
    """Measures what the sampling stages add to a decode step, on a GPU: microseconds of the chain, and up to each
    stage.

        python -m bench.verifying sampling --vocabulary 151936 --batch 1 8

    Prints a table and ends in one JSON line. Each figure is the median of nine replays of a graph of fifty chains.
    Logits are like a model's (a few likely tokens over a wide floor) or flat (random weights' way: nearly all tokens
    alike). Then whole steps of a model with random weights, one row.
    """
    parser = argparse.ArgumentParser(description=summary(sampling_main))
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--many", type=int, nargs="+", default=[16, 64, 256], help="rows of a launch of many")
    parser.add_argument("--model", choices=SPECS, default="qwen3-0.6b")
    parser.add_argument("--revision", default=None, help="the commit to write down")
    given = parser.parse_args()
    launcher = Launcher()
    library = open_library(torch.cuda.get_device_capability())
    record = {
        "bench": "sampling",
        "revision": given.revision or revision(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vocabulary": given.vocabulary,
        "rows": sampling_measure(library, launcher, given.batch, given.vocabulary),
        "many_rows": measure_many(library, launcher, given.many, given.vocabulary),
        "steps": {"model": given.model, "context": 128, "us": in_steps(library, launcher, given.model, 128)},
    }
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(run_one_of(main, sampling=sampling_main))
