"""Times decode steps made of `engine.kernels` on a GPU with random weights of real shapes.

    python -m bench.kernels --model qwen3-0.6b --format bf16 --context 128 1024 8192

Prints a table and ends in one JSON line. A rate is 512 steps over the median of five timings; the tokens are checked to
have arrived in the host's ring, and their values are not: `tests/kernels` does that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch
from torch.nn import functional

from bench.result import device, revision, run_one_of, summary
from engine.kernels import plain_product as few
from engine.kernels import prefill as ops
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.build import KernelLibrary, Kernels, open_library
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Launch, Launcher, Trigger
from engine.kernels.sampling import Sampling
from engine.kernels.tiling import Tiling, choose
from engine.kernels.weights import Format, Matrix
from engine.model.layers.few_rows import (
    ChainPlan,
    LayerWeights,
    StepBuffers,
    StepProduct,
    StepWeights,
    allocate,
    prepare_start,
    prepare_step,
)

H100_BANDWIDTH = 3.07  # TB/s, what one large read reaches on an H100 80GB HBM3
STEPS = 512
RING = 4096


@dataclass(frozen=True, slots=True)
class Spec:
    layers: int
    hidden: int
    inner: int
    heads: Heads
    vocabulary: int
    window: int | None = None


SPECS = {
    "qwen3-0.6b": Spec(28, 1024, 3072, Heads(16, 8, 128, True), 151936),
    "mistral-7b": Spec(32, 4096, 14336, Heads(32, 8, 128, False), 32000),
    "llama-3.2-1b": Spec(16, 2048, 8192, Heads(32, 8, 64, False), 128256),
}
FORMATS = {"bf16": Format.BF16, "int8": Format.INT8, "int4": Format.INT4}


def random_matrix(form: Format, rows: int, columns: int) -> Matrix:
    """Returns random bits that stand for small numbers; no zeros, which would run faster."""
    if form is Format.BF16:
        data = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=columns**-0.5)
        return Matrix(form, rows, columns, data)
    if form is Format.INT8:
        data = torch.randint(-128, 128, (rows, columns), device="cuda", dtype=torch.int8)
        return Matrix(form, rows, columns, data, row_scale=torch.full((rows,), columns**-0.5 / 74, device="cuda"))
    words = torch.randint(-(2**31), 2**31, (rows // 8, columns // 128, 32, 4), device="cuda", dtype=torch.int32)
    scale = torch.full((rows // 8, columns // 128, 8), columns**-0.5 / 4.6, device="cuda").half()
    zero = torch.full_like(scale, -136.0, dtype=torch.bfloat16)
    packed = scale.view(torch.int16).int() & 0xFFFF | zero.view(torch.int16).int() << 16
    return Matrix(form, rows, columns, words, scales=packed, group=128)


def random_weights(spec: Spec, form: Format, pages: int, positions: int) -> StepWeights:
    """Makes a model of this size; layers share one pool shape and one set of gains."""
    heads, hidden = spec.heads, spec.hidden
    ones = torch.ones(hidden, device="cuda")
    gain = torch.ones(heads.dim, device="cuda") if heads.norm else None

    def layer() -> LayerWeights:
        pool = torch.empty(2, pages, heads.keys, 16, heads.dim, device="cuda", dtype=torch.bfloat16).normal_()
        return LayerWeights(
            input_gain=ones,
            qkv=StepProduct(random_matrix(form, heads.rows, hidden)),
            attention=LayerAttention(pool[0], pool[1], gain, gain, spec.window),
            output=StepProduct(random_matrix(form, hidden, heads.queries * heads.dim)),
            mlp_gain=ones,
            gate_up=StepProduct(random_matrix(form, 2 * spec.inner, hidden)),
            down=StepProduct(random_matrix(form, hidden, spec.inner)),
        )

    head = random_matrix(Format.BF16, spec.vocabulary, hidden)
    angles = torch.rand(positions, 2, heads.dim, device="cuda")
    return StepWeights(head.data, [layer() for _ in range(spec.layers)], ones, head, heads, 1e-6, angles)


def step_bytes(weights: StepWeights, context: float, batch: int) -> int:
    """Counts weights once, keys and values of every row."""
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv.matrix, layer.output.matrix, layer.gate_up.matrix, layer.down.matrix]
    held = len(weights.layers) * 2 * weights.heads.keys * weights.heads.dim * 2 * context * batch
    return sum(matrix.nbytes for matrix in matrices) + int(held)


def timers() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    event: type[torch.cuda.Event] = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def median_us(launcher: Launcher, launches: Sequence[Launch], each: int) -> float:
    """Returns µs of one of `each` equal parts, in a graph: the median of nine replays."""
    return median_of_replays(lambda: launcher.enqueue(launches), each)


def median_of_replays(enqueue: Callable[[], None], each: int) -> float:
    enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    graph.replay()
    times = []
    for _ in range(9):
        begin, end = timers()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / each)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Timing:
    tokens_per_second: float  # of one row
    microseconds: float  # a step
    spread: float  # (slowest - fastest) / median
    roofline: float


class KernelBench:
    def __init__(
        self, library: Kernels, launcher: Launcher, weights: StepWeights, pages: int, bandwidth: float
    ) -> None:
        self.library, self.launcher, self.weights, self.pages = library, launcher, weights, pages
        self.bandwidth = bandwidth  # TB/s
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def graph(self, chain: Sequence[Launch], times: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                self.launcher.enqueue(chain)
        return graph

    def decode(
        self, plan: ChainPlan, context: int, batch: int, steps: int = 4, sampled: Sampling | None = None
    ) -> Timing:
        """Times `STEPS` tokens a row, from a context of `context`."""
        buffers = allocate(self.weights, batch, self.pages // batch, RING)
        table = torch.randperm(self.pages, device="cuda")[: self.pages // batch * batch].view(batch, -1)
        buffers.places.pages.copy_(table)
        graph = self.graph(prepare_step(self.library, self.weights, buffers, plan, sampled), steps)
        start = prepare_start(self.library, self.weights, buffers)
        times = [self._run(graph, start, buffers, context, steps) for _ in range(6)][1:]
        middle = statistics.median(times) / STEPS
        bound = step_bytes(self.weights, context + STEPS / 2, batch) / (self.bandwidth * 1e12)
        return Timing(1 / middle, middle * 1e6, (max(times) - min(times)) / statistics.median(times), bound / middle)

    def _run(self, graph: torch.cuda.CUDAGraph, start: Launch, buffers: StepBuffers, context: int, steps: int) -> float:
        buffers.places.position.fill_(context)
        buffers.progress.count.zero_()
        buffers.progress.token.random_(1, 1000)
        self.launcher.enqueue([start])
        begin, end = timers()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(STEPS // steps):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        last = buffers.progress.ring[:, STEPS - 1].tolist()
        if any(entry >> 32 != STEPS or entry >> 24 & 0xFF for entry in last):
            raise RuntimeError(f"tokens are missing from the ring: {last}")
        return float(begin.elapsed_time(end)) / 1e3

    def stages(self, plan: ChainPlan, context: int, batch: int) -> dict[str, tuple[float, float]]:
        """Returns microseconds of a stage and its TB/s, each stage's launches of all layers in a chain of their own."""
        buffers = allocate(self.weights, batch, self.pages // batch, RING)
        buffers.places.position.fill_(context)
        buffers.places.pages.copy_(torch.arange(self.pages // batch * batch, device="cuda").view(batch, -1))
        for part in (buffers.qkv, buffers.attended, buffers.inner, buffers.stream.scaled, buffers.stream.squares):
            part.uniform_(0.1, 1)
        chain = prepare_step(self.library, self.weights, buffers, plan)
        names = ("qkv", "attention", "output", "gate_up", "down")
        found = {}
        for place, name in enumerate(names):
            found[name] = self._stage([launch for launch in chain[place:-2:5]])
        found["head"] = self._stage([chain[-2]])
        layer = self.weights.layers[0]
        sizes = {
            "qkv": layer.qkv.matrix.nbytes,
            "output": layer.output.matrix.nbytes,
            "gate_up": layer.gate_up.matrix.nbytes,
            "down": layer.down.matrix.nbytes,
            "head": self.weights.head.nbytes,
        }
        return {name: (time, sizes.get(name, 0) / time / 1e6) for name, time in found.items()}

    def _stage(self, chain: Sequence[Launch]) -> float:
        graph = self.graph(chain, max(1, 112 // len(chain)))
        count = len(chain) * max(1, 112 // len(chain))
        begin, end = timers()
        graph.replay()
        times = []
        for _ in range(5):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e3 / count)
        return statistics.median(times)


def plans(base: ChainPlan, weights: StepWeights, sweep: str) -> dict[str, ChainPlan]:
    found = {"base": base}
    if sweep in ("overlap", "all"):
        found["no overlap"] = replace(base, dependent=False)
        found["trigger after wait"] = replace(base, trigger=Trigger.AFTER_WAIT)
        found["trigger at end"] = replace(base, trigger=Trigger.AT_END)
    if sweep in ("tiling", "all"):
        layer = weights.layers[0]
        matrices = {
            "qkv": layer.qkv.matrix,
            "output": layer.output.matrix,
            "gate_up": layer.gate_up.matrix,
            "down": layer.down.matrix,
        }
        for warps, window, resident in ((8, 1, 1), (8, 3, 1), (8, 4, 1), (8, 31, 1)):
            how = {
                name: replace(tiled(base, name, matrix, warps), window=window, min_blocks=resident)
                for name, matrix in matrices.items()
            }
            found[f"{warps} warps, {window} under way, {resident} resident"] = replace(base, tilings=how)
        for warps, window in ((8, 2), (8, 3), (8, 31)):
            how = {"head": replace(tiled(base, "head", weights.head, warps), window=window)}
            found[f"head {warps} warps, {window} under way"] = replace(base, tilings=how)
    return found


def tiled(plan: ChainPlan, name: str, matrix: Matrix, warps: int) -> Tiling:
    return choose(matrix, plan.multiprocessors, pairs=name == "gate_up", warps=warps)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SPECS, default="qwen3-0.6b")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--context", type=int, nargs="+", default=[128])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--sweep", choices=("none", "overlap", "tiling", "all"), default="none")
    parser.add_argument("--stages", action="store_true", help="time each stage by itself")
    parser.add_argument("--bandwidth", type=float, default=H100_BANDWIDTH, help="TB/s that the roofline stands on")
    parser.add_argument("--revision", default=None, help="the commit to write down")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    launcher = Launcher()
    library = open_library(torch.cuda.get_device_capability())
    most = max(given.context) + STEPS + 16
    pages = -(-most // 16) * max(given.batch)
    weights = random_weights(SPECS[given.model], FORMATS[given.format], pages, most)
    bench = KernelBench(library, launcher, weights, pages, given.bandwidth)
    rows = []
    for context in given.context:
        base = ChainPlan(bench.multiprocessors, longest=context + STEPS)
        for batch in given.batch:
            for name, plan in plans(base, weights, given.sweep).items():
                try:
                    timing = bench.decode(plan, context, batch)
                except Exception as failure:  # one variant's failure must not cost the others
                    print(f"{context:6} {batch:2} {name:24} failed: {failure}", flush=True)
                    continue
                rows.append({"context": context, "batch": batch, "plan": name, **timing_fields(timing)})
                rate = f"{timing.tokens_per_second:8.0f} tok/s {timing.microseconds:8.1f} µs ±{timing.spread:.1%}"
                print(f"{context:6} {batch:2} {name:24} {rate}  {timing.roofline:.0%} of the roofline", flush=True)
            if given.stages:
                found = bench.stages(base, context, batch)
                rows.append({"context": context, "batch": batch, "stages": found})
                print("       " + "  ".join(f"{n} {t:.2f} µs {b:.2f} TB/s" for n, (t, b) in found.items()), flush=True)
    record = {
        "bench": "kernels",
        "revision": given.revision or revision(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": given.model,
        "format": given.format,
        "steps": STEPS,
        "bandwidth": given.bandwidth,
        "rows": rows,
    }
    print(json.dumps(record))
    return 0


def timing_fields(timing: Timing) -> dict[str, float]:
    return {
        "tokens_per_second": round(timing.tokens_per_second, 1),
        "microseconds": round(timing.microseconds, 2),
        "spread": round(timing.spread, 4),
        "roofline": round(timing.roofline, 3),
    }


_CHAIN_BYTES = 400e6  # of weights, at least
_ROUNDED, _NEAR_ZERO = 2**-7, 0.02  # of a number, results in bf16; where the sum's own rounding counts


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    columns: int
    gated: bool = False
    normed: bool = False  # residual and norm follow


def cases(model: str) -> list[Case]:
    spec = SPECS[model]
    return [
        Case("queries, keys, values", spec.heads.rows, spec.hidden),
        Case("gate and up", 2 * spec.inner, spec.hidden, gated=True),
        Case("output", spec.hidden, spec.heads.queries * spec.heads.dim, normed=True),
        Case("down", spec.hidden, spec.inner, normed=True),
    ]


def divisions(case: Case, tokens: int, gpu: GpuShape) -> Iterator[few.Division]:
    """Yields all divisions that the GPU may hold at a time and that leave few multiprocessors idle."""
    slices = (1,) if case.gated else range(1, few.MOST_SLICES + 1)
    for one in product(few.TILES, few.PEERS, slices):
        how = few.division(tokens, case.columns, gpu, *one)
        if gpu.multiprocessors // 3 <= how.blocks(tokens, case.rows) <= gpu.multiprocessors:
            yield how


class ProductCase:
    def __init__(self, case: Case, tokens: int, library: KernelLibrary, launcher: Launcher) -> None:
        self._case, self._tokens, self._library, self._launcher = case, tokens, library, launcher
        count = int(-(-_CHAIN_BYTES // (2 * case.rows * case.columns)))
        scale = case.columns**-0.5
        self._weights = [self._random(case.rows, case.columns, scale).bfloat16() for _ in range(count)]
        self._x = self._random(tokens, case.columns).bfloat16()
        self._width = case.rows // 2 if case.gated else case.rows
        self._gain = torch.ones(case.rows, device="cuda")
        normed = torch.empty(tokens, case.rows, device="cuda", dtype=torch.bfloat16)
        self._stream = ops.Stream(self._random(tokens, case.rows), normed, 1e-6)

    def library_us(self) -> float:
        out = torch.empty(self._tokens, self._case.rows, device="cuda", dtype=torch.bfloat16)
        inner = torch.empty(self._tokens, self._width, device="cuda", dtype=torch.bfloat16)

        def enqueue() -> None:
            for weight in self._weights:
                torch.mm(self._x, weight.t(), out=out)
                if self._case.gated:
                    self._launcher.enqueue([ops.gate(self._library, ops.ProductParts(out), inner)])
                self._launcher.enqueue(self._after(ops.ProductParts(out)))

        return median_of_replays(enqueue, len(self._weights))

    def own_us(self, how: few.Division) -> float:
        """Times our product. Raises ValueError where its result is wrong."""
        kind = torch.bfloat16 if how.slices == 1 else torch.float32
        out = torch.full((how.slices, self._tokens, self._width), float("nan"), device="cuda", dtype=kind)
        launches: list[Launch] = []
        for weight in self._weights:
            launches.append(few.plain_product(self._library, self._x, weight, out, how, gated=self._case.gated))
            launches += self._after(ops.ProductParts(out if how.slices > 1 else out[0]))
        self._launcher.enqueue([launches[0].alone()])
        expected = self._expected()
        error = (out.double().sum(0) - expected).abs() / (expected.abs() + _NEAR_ZERO)
        if not float(error.nan_to_num(nan=float("inf")).max()) < _ROUNDED:
            raise ValueError(f"{self._case.name} of {self._tokens} tokens, {how}: wrong")
        return median_of_replays(lambda: self._launcher.enqueue(launches), len(self._weights))

    def _after(self, parts: ops.ProductParts) -> list[Launch]:
        return [ops.add_norm(self._library, parts, self._gain, self._stream)] if self._case.normed else []

    def _expected(self) -> torch.Tensor:
        found = self._x.double() @ self._weights[0].double().T
        if not self._case.gated:
            return found
        gate, up = found[:, : self._width], found[:, self._width :]
        return functional.silu(gate) * up

    @staticmethod
    def _random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda") * scale


def measure(case: Case, tokens: int, library: KernelLibrary, launcher: Launcher, every: bool) -> dict[str, object]:
    chosen = few.divide(tokens, case.rows, case.columns, library.gpu, gated=case.gated)
    tried = list(divisions(case, tokens, library.gpu)) if every else [] if chosen is None else [chosen]
    chain = ProductCase(case, tokens, library, launcher)
    theirs = chain.library_us()
    own = sorted(((chain.own_us(how), how) for how in tried), key=lambda one: one[0])
    print(f"{case.name:22} {tokens:4} tokens: the library's {theirs:6.2f} µs", flush=True)
    for took, how in own:
        print(f"{took:46.2f} µs {how}{' chosen' if how == chosen else ''}", flush=True)
    return {
        "case": case.name,
        "rows": case.rows,
        "columns": case.columns,
        "tokens": tokens,
        "library_us": round(theirs, 2),
        "own": [{"us": round(took, 2), **asdict(how), "chosen": how == chosen} for took, how in own],
    }


def products_main(argv: Sequence[str] | None = None) -> int:
    """Products of few tokens with plain weights on a GPU, the library's and ours: µs of one in a chain of products with
    weights of their own, so that none comes out of the L2, each with what follows it in a layer.

        python -m bench.kernels products --model qwen3-0.6b --tokens 16 64 128 256

    Ours are checked against float64. With --divisions, all that the GPU holds at a time, not the one that is chosen
    alone. Prints a table and ends in one JSON line.
    """
    parser = argparse.ArgumentParser(description=summary(products_main))
    parser.add_argument("--model", choices=SPECS, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64, 96, 128, 160, 192, 256, 384])
    parser.add_argument("--divisions", action="store_true", help="all of them")
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    library, launcher = open_library(torch.cuda.get_device_capability()), Launcher()
    records = [
        measure(case, tokens, library, launcher, given.divisions)
        for case in cases(given.model)
        for tokens in given.tokens
    ]
    print(json.dumps({"device": device(), "revision": revision(), "model": given.model, "products": records}))
    return 0


if __name__ == "__main__":
    sys.exit(run_one_of(main, products=products_main))
