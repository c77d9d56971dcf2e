"""The sources compile for the oldest and the fastest architecture, without a GPU, as the wrappers ask for them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import (
    batch_attention,
    batch_sampling,
    gated_product,
    gemm,
    plain_product,
    portable,
    prefill,
    sampling,
    speculation,
    tiling,
)
from engine.kernels import rows as row_states
from engine.kernels.attention import AttentionOp, Embedding, Heads, LayerAttention, RowPages, scratch
from engine.kernels.build import compile_with_nvrtc, source_text
from engine.kernels.exchange import Channels, exchange_sum
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Launch
from engine.kernels.linear import Normed, ResidualUpdate, linear_residual
from engine.kernels.speculation import Future
from engine.kernels.tokens import Choice, two_pass_head
from engine.kernels.two_pass import CoarseCopy
from engine.kernels.weights import Format, Matrix, to_matrix
from engine.model.layers.draft_steps import DRAFT_ROWS, DraftSteps, Draws
from engine.model.layers.few_rows import ChainPlan, StepWeights, allocate, first_norm, prepare_start, prepare_step
from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows

ARCHITECTURES = ["sm_80", "sm_90a"]
OTHERS = ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"]
KEPT = [torch.bfloat16, torch.uint8]  # keys and values, the second as fp8
LARGEST_BLOCK, FIXED = 227 << 10, 44 << 10  # bytes of shared memory; what a kernel declares itself, at most
Compiler = Callable[[str, str, Mapping[str, int], str], bytes]


def compile_with_nvcc(source: str, name: str, defines: Mapping[str, int], arch: str, folder: Path) -> bytes:
    target, out = folder / name, folder / f"{name}.cubin"
    target.write_text(source)
    command = ["nvcc", "-std=c++17", "-cubin", f"-arch={arch}", *(f"-D{key}={value}" for key, value in defines.items())]
    done = subprocess.run([*command, "-o", str(out), str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """NVRTC from its wheel, which the test requirements hold; where there is none, the toolkit's compiler. What was
    compiled once is known.
    """
    if find_spec("cuda") is not None and find_spec("cuda.core") is not None:
        compile_source: Compiler = compile_with_nvrtc
    elif shutil.which("nvcc"):
        compile_source = partial(compile_with_nvcc, folder=tmp_path_factory.mktemp("nvcc"))
    else:
        pytest.fail(
            "neither NVRTC (pip install cuda-core nvidia-cuda-nvrtc) nor nvcc is here to check the kernels with"
        )
    known: dict[tuple[str, tuple[tuple[str, int], ...], str], bytes] = {}

    def compiled(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        key = (source, tuple(sorted(defines.items())), arch)
        if key not in known:
            known[key] = compile_source(source, name, defines, arch)
        return known[key]

    return compiled


@pytest.mark.product
@pytest.mark.parametrize(
    ("form", "batch", "arch"),
    [
        ("int4", 3, "sm_90a"),
        *(
            pytest.param(*one, marks=pytest.mark.proof)
            for one in [("bf16", 1, "sm_90a"), ("int8", 8, "sm_80"), ("int8", 8, "sm_90a"), ("int4", 3, "sm_80")]
        ),
    ],
)
def test_a_step_compiles(
    recorder: Any,
    model: Callable[[str], StepWeights],
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    batch: int,
    arch: str,
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    weights = model(form)
    buffers = allocate(weights, batch, 4, 8)
    prepare_step(recorder, weights, buffers, ChainPlan(132))
    prepare_step(
        recorder, weights, buffers, ChainPlan(132), sampling.allocate(batch, weights.head.rows, torch.device("cpu"))
    )
    prepare_start(recorder, weights, buffers)
    prepare_start(recorder, replace(weights, embedding_scale=12.5), buffers)
    asked = {(name, tuple(sorted(defines.items()))) for name, _, defines, _ in recorder.asked}
    assert {name for name, _ in asked} == {
        "linear",
        "linear_residual",
        "gate_up",
        "attention",
        "head",
        "sampling",
        "advance",
    }
    for name, defines in sorted(asked):
        code = compiler(source_text(f"{name}.cu"), f"{name}.cu", dict(defines), arch)
        assert code.startswith(b"\x7fELF")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("sequences", "group", "arch"),
    [(1, 2, "sm_80"), (1, 8, "sm_90a"), (2, 4, "sm_80"), (2, 4, "sm_90a"), (4, 2, "sm_90a")],
)
def test_a_verifying_step_compiles(
    recorder: Any, model: Callable[[str], StepWeights], compiler: Compiler, sequences: int, group: int, arch: str
) -> None:
    weights = model("bf16")
    room = allocate(weights, 8, 4, 1)
    shared = RowPages(room.places.position, room.places.pages[:sequences])
    state = speculation.allocate(sequences, 8 // sequences, 64, 64, torch.device("cpu"))
    first = first_norm(weights, room)
    speculation.replay(recorder, state, shared, first, Future(state.history, 0.5))
    ending = (
        speculation.accept(recorder, room.choice, state, shared, group),
        speculation.lookup(recorder, state, shared, first),
    )
    chain = prepare_step(
        recorder,
        weights,
        replace(room, places=shared).first(sequences * group),
        ChainPlan(132, group=group),
        None,
        ending,
    )
    assert [launch.kernel.name for launch in chain[-3:]] == ["head", "accept", "lookup"]
    assert chain[1].shape.grid[2] == sequences * group
    for name, entry, defines, _ in recorder.asked:
        if name in ("accept", "propose", "attention"):
            assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch).startswith(b"\x7fELF"), entry


@pytest.mark.proof
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("longest", [100, 8192])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_over_fp8_compiles(recorder: Any, compiler: Compiler, arch: str, longest: int, group: int) -> None:
    for heads in (Heads(16, 8, 128, True), Heads(14, 2, 64, False), Heads(24, 2, 96, False), Heads(8, 1, 256, False)):
        pool, nothing = torch.zeros(2, 4, heads.keys, 16, heads.dim, dtype=torch.uint8), torch.zeros(1)
        gain = nothing if heads.norm else None
        places = RowPages(torch.zeros(group, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32))
        held = scratch(heads, group, torch.device("cpu"))
        bulk = arch == "sm_90a"
        op = AttentionOp(recorder, heads, places, Embedding(nothing, 1e-6), held, 132, longest, bulk, group=group)
        op.prepare(LayerAttention(pool[0], pool[1], gain, gain), torch.zeros(group, heads.rows), torch.zeros(group, 1))
    if group == 1:
        assert any(defines["OP_SLOTS"] for _, _, defines, _ in recorder.asked) == (bulk and longest == 8192)
    for name, entry, defines, _ in recorder.asked:
        assert defines["OP_KV_BYTES"] == 1
        assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch).startswith(b"\x7fELF"), entry


@pytest.mark.proof
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_draft_models_steps_compile(
    recorder: Any, model: Callable[[str], StepWeights], compiler: Compiler, arch: str
) -> None:
    weights = model("bf16")
    room = allocate(weights, 8, 4, 1)
    for sequences in (1, 2, 4):
        places = RowPages(room.places.position, room.places.pages[:sequences])
        state = speculation.allocate(sequences, 8 // sequences, 64, 64, torch.device("cpu"))
        choice = room.choice.noise_key, room.choice.temperature
        draws = tuple(Draws(*(part[: rows * sequences] for part in choice)) for rows in DRAFT_ROWS)
        steps = DraftSteps(weights, state, draws, places.pages)
        last = steps.drafted(recorder, places, first_norm(weights, room), 3)
        chain = steps.launches(recorder, ChainPlan(132), 3, last)
        assert [one.kernel.name for one in chain if one.kernel.name in ("follow", "head", "guess", "drafted")] == [
            *("follow", "head", "guess"),
            *("head", "guess"),
            *("head", "drafted"),
        ]
        rows = [launch.shape.grid[2] for launch in chain if launch.kernel.name == "attention"]
        newest, guesses = 2 * sequences, sequences  # the two newest tokens first, then one guess after another
        assert rows == [newest, newest, guesses, guesses, guesses, guesses]
        assert [one.kernel.name for one in steps.launches(recorder, ChainPlan(132), 0, last)] == ["drafted"]
    for name, entry, defines, _ in recorder.asked:
        if name in ("draft", "propose", "attention"):
            assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch).startswith(b"\x7fELF"), entry


@pytest.mark.proof
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("arch", [*ARCHITECTURES, "sm_100"])
def test_attention_of_many_rows_compiles(recorder: Any, compiler: Compiler, arch: str, kept: torch.dtype) -> None:
    device = torch.device("cpu")
    rows = batch_attention.BatchRows(torch.zeros(64, dtype=torch.int32), torch.zeros(64, 8, dtype=torch.int32))
    for heads in (Heads(16, 8, 128, True), Heads(20, 2, 64, False)):
        shape = batch_attention.grid(heads, GpuShape(132, 227 << 10 if arch == "sm_90a" else 99 << 10))
        held = batch_attention.workspace(heads, 64, shape, device)
        attention = batch_attention.BatchAttention(recorder, heads, rows, shape, held)
        pool = torch.zeros(2, 1, 1, 16, 64, dtype=kept)
        attention.plan(), attention.attend(LayerAttention(pool[0], pool[1], None, None), pool, pool)
    for name, entry, defines, _ in recorder.asked:
        code = compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch)
        assert code.startswith(b"\x7fELF"), entry


PORTABLE = [
    (Heads(4, 1, 256, True), 1152, 6912, portable.OF_HEADS, True),
    (Heads(9, 3, 64, False), 576, 1536, portable.NO_NORM, False),
    (Heads(6, 6, 96, True), 4098, 34, portable.OF_ALL, False),
    (Heads(4, 2, 16, True), 64, 96, portable.OF_HEADS, False),
]


@pytest.mark.product
@pytest.mark.parametrize("kept", [2, 1])
@pytest.mark.parametrize("dtype", portable.DTYPES, ids=str)
@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(one, marks=pytest.mark.proof) for one in OTHERS)])
def test_the_portable_kernels_compile(
    recorder: Any, compiler: Compiler, arch: str, dtype: torch.dtype, kept: int
) -> None:
    rows = batch_attention.BatchRows(torch.zeros(4, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32))
    for layout, columns, inner, norm, gelu in PORTABLE if arch != "sm_90a" else PORTABLE[:1]:
        kind = portable.LayerKind(columns, layout, inner, norm, gelu, dtype, kept)
        assert kind.why_not() is None
        x, gain = torch.zeros(4, columns, dtype=dtype), torch.zeros(columns)
        pool = torch.zeros(2, 1, 1, 16, layout.dim, dtype=torch.uint8 if kept == 1 else dtype)
        layer = LayerAttention(pool[0], pool[1], None, None, 32)
        stream = portable.NormedStream(torch.zeros(4, columns), x, 1e-6)
        places = portable.HeadPlaces(rows.lengths, rows.pages, gain, None, 1e-6)
        portable.join(recorder, kind, stream, gain, x, None)
        portable.heads(recorder, kind, layer, places, x, x)
        portable.attend(recorder, kind, layer, rows, x, x)
        portable.gate(recorder, kind, x, x)
        if batch_attention.why_not(layout) is None:
            shape = batch_attention.grid(layout, GpuShape(132, 99 << 10))
            held = batch_attention.workspace(layout, 4, shape, torch.device("cpu"))
            batch_attention.BatchAttention(recorder, layout, rows, shape, held, 32).attend(layer, x, x)
    for name, entry, defines, _ in recorder.asked:
        assert defines["OP_F16"] == (dtype == torch.float16)
        assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch).startswith(b"\x7fELF"), entry


@pytest.mark.proof
@pytest.mark.parametrize(
    ("rows", "columns", "batch", "arch"),
    [(151936, 1024, 1, "sm_90a"), (32000, 4096, 8, "sm_90a"), (1003, 896, 3, "sm_80")],
)
def test_the_head_in_two_passes_compiles(
    recorder: Any, compiler: Compiler, rows: int, columns: int, batch: int, arch: str
) -> None:
    plan, nothing = ChainPlan(132), torch.empty(batch, 1)
    head = Matrix(Format.BF16, rows, columns, nothing)
    coarse = CoarseCopy(Matrix(Format.INT8_TILES, -(-rows // 8) * 8, columns, nothing), nothing)
    passes = plan.two_passes(head, coarse)
    x = Normed(nothing, nothing, torch.empty(batch, columns // 8), 1e-6)
    places = RowPages(nothing, nothing)
    two_pass_head(recorder, x, passes, Choice(nothing, nothing, nothing, assured=nothing), places)
    state = sampling.allocate(batch, rows, torch.device("meta"))
    sampling.two_pass_top(recorder, x, passes, state, None, places)
    for name, _, defines, shared in recorder.asked:
        assert shared + FIXED <= LARGEST_BLOCK
        assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch).startswith(b"\x7fELF")


@pytest.mark.proof
@pytest.mark.parametrize("tile", gated_product.TILES)
def test_a_product_that_gates_its_results_compiles(recorder: Any, compiler: Compiler, tile: int) -> None:
    x, weight, out = (torch.empty(shape, device="meta") for shape in ((600, 1024), (6144, 1024), (600, 3072)))
    how = gated_product.division(tile, 600, 3072, GpuShape(132, 227 << 10, warpgroups=True))
    gated_product.gated_product(recorder, x, weight, out, how)
    for name, _, defines, shared in recorder.asked:
        assert shared <= LARGEST_BLOCK
        assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, "sm_90a").startswith(b"\x7fELF")


@pytest.mark.proof
@pytest.mark.parametrize("tile", plain_product.TILES)
def test_a_product_of_few_tokens_compiles(recorder: Any, compiler: Compiler, tile: int) -> None:
    x, weight, out = (torch.empty(shape, device="meta") for shape in ((100, 1024), (6144, 1024), (100, 6144)))
    for peers, slices, gated in ((2, 1, False), (4, 3, False), (2, 1, True)):
        how = plain_product.division(100, 1024, GpuShape(132, 227 << 10, warpgroups=True), tile, peers, slices)
        plain_product.plain_product(recorder, x, weight, out, how, gated=gated)
    for name, _, defines, shared in recorder.asked:
        assert shared <= LARGEST_BLOCK
        assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, "sm_90a").startswith(b"\x7fELF")


@pytest.mark.proof
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_row_states_compile(recorder: Any, compiler: Compiler, arch: str, kept: torch.dtype) -> None:
    states = row_states.allocate(16, 9, torch.device("cpu"))
    layout, queries = Heads(4, 2, 64, True), torch.zeros(16, 4, 64)
    pool = torch.zeros(2, 4, 2, 16, 64, dtype=kept)
    own = LayerAttention(pool[0], pool[1], torch.ones(64), torch.ones(64))
    places = prefill.TokenPlaces(states.position, states.pages)
    product = prefill.ProductParts(torch.zeros(16, layout.rows, dtype=torch.bfloat16))
    prefill.row_heads(recorder, layout, own, places, Embedding(torch.zeros(1), 1e-6), product, queries)
    row_states.change(recorder, states, torch.zeros(99, dtype=torch.int32))
    row_states.pick(recorder, prefill.ProductParts(torch.zeros(1, 16, 1003)), states)
    row_states.pick(recorder, prefill.ProductParts(torch.zeros(16, 1003, dtype=torch.bfloat16)), states)
    row_states.finish(recorder, states, row_states.Report(torch.zeros(1), torch.zeros(4, 16)))
    for name, entry, defines, _ in recorder.asked:
        code = compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch)
        assert code.startswith(b"\x7fELF"), entry


@pytest.mark.proof
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sampling_of_many_rows_compiles(recorder: Any, compiler: Compiler, arch: str) -> None:
    rows, four = torch.zeros(4, sampling.ROW_WORDS, dtype=torch.int32), torch.zeros(4)
    for logits in (torch.zeros(1, 4, 1003), torch.zeros(4, 1003, dtype=torch.bfloat16)):
        batch_sampling.sample(recorder, rows, prefill.ProductParts(logits), four, four)
    batch_sampling.fill(recorder, 1003, four, 1)
    for name, _, defines, _ in recorder.asked:
        assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch).startswith(b"\x7fELF")


@pytest.mark.product
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.proof)])
def test_sums_over_ranks_compile(recorder: Any, compiler: Compiler, ranks: int, arch: str) -> None:
    def channels(blocks: int, room: int) -> Channels:
        return Channels(ranks, 0, torch.zeros(ranks, dtype=torch.int64), torch.zeros(blocks, dtype=torch.int32), room)

    matrix = to_matrix(Dense(torch.zeros(256, 128, dtype=torch.bfloat16)))
    how = tiling.choose(matrix, 132)
    target = Normed(torch.zeros(8, 256), torch.zeros(8, 256), torch.zeros(8, 32), 1e-6)
    update = ResidualUpdate(torch.zeros(8, 128), target, torch.zeros(256))
    linear_residual(recorder, update, matrix, how, channels(132, 64 * how.block_tiles))
    stream = prefill.Stream(torch.zeros(16, 256), torch.zeros(16, 256), 1e-6)
    for product in (torch.zeros(16, 256, dtype=torch.bfloat16), torch.zeros(2, 16, 256)):
        prefill.add_norm(recorder, prefill.ProductParts(product), torch.zeros(256), stream, channels(16, 1024))
    for x in (torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(8)):
        exchange_sum(recorder, x, channels(16, 128))
    with pytest.raises(ValueError, match="17 blocks of 128 words have no channels"):
        channels(16, 128).values(17, 128)
    assert {defines["OP_RANKS"] for _, _, defines, _ in recorder.asked} == {ranks}
    for name, _, defines, _ in recorder.asked:
        assert compiler(source_text(f"{name}.cu"), f"{name}.cu", defines, arch).startswith(b"\x7fELF")


def chunk_stages(
    library: Any, weight: Int8Rows | Int4Groups, tokens: int, slices: int, gpu: GpuShape, kept: torch.dtype
) -> list[Launch]:
    """Every kernel that a prompt takes, once."""
    layout = Heads(4, 2, 64, True)
    chunk = prefill.Chunk(torch.zeros(2), torch.zeros(tokens))
    gain, pool = torch.ones(256), torch.zeros(2, 4, 2, 16, 64, dtype=kept)
    matrix = to_matrix(weight)
    how = replace(gemm.divide(matrix, tokens, gpu), slices=slices)
    order = gemm.order(matrix, how)
    stream = prefill.Stream(torch.zeros(tokens, 256), torch.zeros(tokens, 256), 1e-6, order)
    size = (tokens, 512) if slices == 1 else (slices, tokens, 512)
    out = torch.zeros(size, dtype=torch.bfloat16 if slices == 1 else torch.float32)
    product = prefill.ProductParts(out, None if slices == 1 else torch.zeros(512))
    own = LayerAttention(pool[0], pool[1], gain, gain)
    queries = torch.zeros(tokens, 4, 64)
    chunks = prefill.Chunks(torch.zeros(3, 4), torch.zeros(2, 4))
    splits = prefill.splits_of(layout, (tokens,), torch.device("cpu"), chunks=3, gpu=gpu)
    carried = prefill.Carried(stream.residual, queries)
    places, angles = prefill.TokenPlaces(torch.zeros(tokens), chunks.pages), Embedding(torch.zeros(1), 1e-6)
    return [
        prefill.embed(library, chunk, torch.zeros(9, 256), gain, stream),
        gemm.gemm(library, matrix, gemm.Batch(stream.x, out), how),
        prefill.row_heads(library, layout, own, places, angles, product, queries),
        prefill.attend_chunks(library, layout, chunks, splits, own, queries, torch.zeros(tokens, 256), order),
        prefill.keep_ends(library, chunks.table, carried, prefill.Carried(torch.zeros(3, 256), queries[:3])),
        prefill.add_norm(library, product, gain, stream),
        prefill.gate(library, product, torch.zeros(tokens, 256), order),
    ]


@pytest.mark.proof
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("tokens", "slices", "group"), [(16, 2, 128), (32, 1, 64), (64, 2, 32), (128, 1, 128), (128, 2, 0)]
)
def test_a_prompt_compiles(
    recorder: Any,
    compiler: Compiler,
    tokens: int,
    slices: int,
    group: int,
    arch: str,
    kept: torch.dtype,
) -> None:
    packed = torch.zeros(512, 128, dtype=torch.uint8)
    parts = torch.zeros(512, 256 // (group or 256))
    weight: Int8Rows | Int4Groups | None = Int4Groups(packed, parts, parts.to(torch.uint8), group) if group else None
    gpu = GpuShape(132, 227 << 10, arch == "sm_90a")
    weight = weight or Int8Rows(torch.zeros(512, 256, dtype=torch.int8), torch.ones(512))
    launches = chunk_stages(recorder, weight, tokens, slices, gpu, kept)
    assert all(one.shape.shared <= 227 << 10 for one in launches)
    assert ("gemm_wide" in {name for name, *_ in recorder.asked}) == (gpu.warpgroups and tokens >= 64)
    assert ("prefill_attention_wide" in {name for name, *_ in recorder.asked}) == gpu.warpgroups
    for name, entry, defines, _ in recorder.asked:
        if name.startswith("gemm") or tokens == 128:
            code = compiler(source_text(f"{name}.cu"), f"{name}.cu", dict(defines), arch)
            assert code.startswith(b"\x7fELF"), entry
