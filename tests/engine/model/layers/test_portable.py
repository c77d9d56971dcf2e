"""The portable walk over rows against eager, on a CPU in float32: its order, norms, gates, angles, windows and idle
rows, with the kernels' references in place of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution.eager import Eager
from engine.execution.graphs import portable as executor
from engine.execution.step_state import Parts
from engine.kernels import portable as kernels
from engine.kernels import reference
from engine.kernels.attention import LayerAttention
from engine.kernels.batch_attention import BatchRows
from engine.kernels.build import GpuKernels, WantedKernels
from engine.kernels.gpu import gpu_of
from engine.kernels.portable import HeadPlaces, LayerKind, NormedStream
from engine.kernels.prefill import ProductParts
from engine.kernels.rows import RowStates, allocate
from engine.model.layers import portable
from engine.model.layers.portable import PortableRows, why_not
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import prepare
from tests.engine.conftest import Request
from tests.engine.execution.test_oracle import CASES, SMALL, make
from tests.engine.quantized import nothing
from tests.engine.stepped import known, put

pytestmark = [pytest.mark.product, pytest.mark.filterwarnings("ignore")]  # transformers' own
CPU = torch.device("cpu")
PROMPTS = (5, 40, 17)  # tokens
WIDTH = 5  # rows of the step, two of which idle
Call = Callable[[], None]


def join(
    library: object,
    kind: LayerKind,
    stream: NormedStream,
    gain: torch.Tensor | None,
    fresh: torch.Tensor | None = None,
    fresh_gain: torch.Tensor | None = None,
) -> Call:
    def call() -> None:
        residual, x = reference.join(stream.residual, fresh, fresh_gain, gain, stream.eps)
        stream.residual.copy_(residual)
        stream.x.copy_(x)

    return call


def heads(
    library: object,
    kind: LayerKind,
    layer: LayerAttention,
    places: HeadPlaces,
    qkv: torch.Tensor,
    queries: torch.Tensor,
) -> Call:
    def call() -> None:
        for row, position in enumerate(places.position.tolist()):
            if position < 0:
                continue
            together = kind.norm == kernels.OF_ALL
            found = reference.turned_heads(
                qkv[row], kind.heads, places.gains, places.angles[position], places.eps, together=together
            )
            page = int(places.pages[row, position // 16])
            queries[row], layer.keys[page, :, position % 16], layer.values[page, :, position % 16] = found

    return call


def attend(
    library: object,
    kind: LayerKind,
    layer: LayerAttention,
    rows: BatchRows,
    queries: torch.Tensor,
    out: torch.Tensor,
) -> Call:
    def call() -> None:
        pools = layer.keys, layer.values
        found = reference.attend_rows(queries, pools, rows.pages, rows.lengths, layer.window)
        out.copy_(found.flatten(1))

    return call


def gate(library: object, kind: LayerKind, product: torch.Tensor, out: torch.Tensor) -> Call:
    def call() -> None:
        out.copy_(reference.gate(product, gelu=kind.gelu))

    return call


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels become calls of their references; what torch has for GPUs alone is left to the CPU's."""
    named = {name: getattr(kernels, name) for name in ("NO_NORM", "OF_ALL", "OF_HEADS")}
    monkeypatch.setattr(portable, "ops", SimpleNamespace(join=join, heads=heads, attend=attend, gate=gate, **named))
    monkeypatch.setattr(portable.batch_attention, "why_not", lambda given: "none here")
    monkeypatch.setattr(portable, "launcher_of", lambda device: None)
    monkeypatch.setattr(PortableRows, "go", lambda self, call: call())
    monkeypatch.setattr(PortableRows, "_head", lambda self, x: ProductParts(self._model.weights.head(x)))


def loaded(folder: Path) -> Parts:
    settings = EngineSettings(model=str(folder), device="cpu", dtype="float32", max_sequences=4, kv_bytes=16 << 20)
    parts = prepare(settings, nothing).parts
    return replace(parts, gpu=GpuKernels(WantedKernels(gpu_of((9, 0), 132, 227 << 10))))


def decoding(parts: Parts, request_of: Request) -> tuple[RowStates, list[Any], torch.Tensor]:
    """Rows behind prompts that eager has fed, among idle ones whose states are left over; and eager's logits."""
    states = allocate(WIDTH, 8, CPU)
    states.token.fill_(7)
    states.pages.fill_(1)
    eager, found, rows, first = Eager(parts), [], [], 0
    generator = torch.Generator().manual_seed(5)
    for at, size in zip((0, 2, 3), PROMPTS, strict=True):
        ids = torch.randint(0, SMALL["vocab_size"], (size + 1,), generator=generator).tolist()
        pages = list(range(first, first + size // 16 + 1))
        first += len(pages)
        one = Sequence(request_of(ids[:size], 4), ids, slot=len(rows), pages=pages, key=at)
        put(parts.sequences, one)
        eager.feed([known(one, 0, size)])
        states.token[at], states.position[at], states.length[at] = ids[size], size, size + 1
        states.pages[at, : len(pages)] = torch.tensor(pages)
        rows.append((at, one, size))
    for _, one, size in rows:
        logits = eager.logits([known(one, size, 1)])
        assert logits is not None
        found.append(logits[0])
    return states, rows, torch.stack(found)


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_rows_is_eagers(case: str, tmp_path: Path, request_of: Request) -> None:
    make(case, tmp_path)
    parts = loaded(tmp_path)
    with torch.inference_mode():
        states, rows, expected = decoding(parts, request_of)
        kept = parts.pool.storage.clone()
        used = [slot for _, one, size in rows for slot in [one.pages[size // 16] * 16 + size % 16]]
        for slot in used:  # what eager wrote there for the token that is fed again
            parts.pool.layer(0)[:, slot // 16, :, slot % 16] = 0
        found = PortableRows(parts, (WIDTH,)).logits(states).data
        torch.testing.assert_close(found[[at for at, *_ in rows]], expected, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(parts.pool.storage, kept, atol=1e-3, rtol=1e-3, equal_nan=True)


def test_what_it_refuses(tmp_path: Path) -> None:
    make("llama-mha", tmp_path)
    parts = loaded(tmp_path)
    assert executor.why_not(parts) == "needs a CUDA device"
    assert why_not(parts) == "activations are torch.float32, the portable kernels read bfloat16 and float16"
    slow = portable.why_slow_attention(parts)
    assert slow == "heads of 16, the kernel for many rows knows multiples of 64 up to 256"
    kind = replace(portable._kind(parts), dtype=torch.float16)
    assert kind.why_not() is None
    odd = replace(kind, heads=replace(kind.heads, dim=20))
    assert odd.why_not() == "heads of 20, the portable kernels know multiples of 8 up to 256"
    assert replace(kind, columns=63).why_not() == "a hidden size of 63 or an inner one of 96 is odd"
