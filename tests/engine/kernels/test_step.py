"""The chain of launches of a step, prepared without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.kernels import sampling, two_pass
from engine.kernels.attention import (
    SPLITS,
    AttentionOp,
    Embedding,
    Heads,
    LayerAttention,
    RowPages,
    attention_defines,
    most_splits,
    scratch,
)
from engine.kernels.build import BuildError
from engine.kernels.exchange import Channels
from engine.kernels.gpu import LARGEST_SHARED, SHARED
from engine.kernels.launch import Trigger, prepare
from engine.kernels.tiling import Tiling
from engine.kernels.tokens import Fed
from engine.model.layers.few_rows import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    prepare_first,
    prepare_start,
    prepare_step,
)

Models = Callable[[str], StepWeights]
FORMS = ["bf16", "int8", "int4"]


@pytest.fixture(autouse=True)
def _no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory needs a GPU; the address is all that counts here."""
    zeros = torch.zeros

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", unpinned)


def buffers_of(weights: StepWeights, batch: int) -> StepBuffers:
    return allocate(weights, batch, 4, 8, logits=True)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("form", FORMS)
def test_order_and_overlap(recorder: Any, model: Models, form: str, batch: int) -> None:
    weights = model(form)
    chain = prepare_step(recorder, weights, buffers_of(weights, batch), ChainPlan(132))
    layer = ["linear", "attention", "linear_residual", "gate_up", "linear_residual"]
    assert [launch.kernel.name for launch in chain] == [*layer, *layer, "head", "advance"]
    triggers = [launch.values["trigger"] for launch in chain]
    assert triggers == [Trigger.AFTER_WAIT] + [Trigger.AT_ENTRY] * (len(chain) - 1)
    assert all(launch.dependent for launch in chain)


def test_the_head_in_two_passes(recorder: Any, model: Models) -> None:
    weights = model("bf16")
    how = ChainPlan(132).tiling("head", weights.head)
    weights = replace(weights, coarse=two_pass.coarse_copy(weights.head, how.warps))
    buffers = buffers_of(weights, 2)
    plain = prepare_step(recorder, weights, buffers, ChainPlan(132))
    chain = prepare_step(recorder, weights, buffers, ChainPlan(132, two_pass=True))
    assert [launch.kernel.name for launch in chain[-2:]] == ["two_pass_head", "advance"]
    assert [launch.values for launch in chain[:-2]] == [launch.values for launch in plain[:-2]]
    both, advance = chain[-2], chain[-1]
    assert both.values["best"] == advance.values["best"] == plain[-2].values["best"]
    assert both.values["assured"] == advance.values["assured"] != 0
    assert both.values["weights"] == plain[-2].values["weights"]
    assert both.shape.threads == plain[-2].shape.threads
    # What decides the order of the plain head's sums.
    (asked,) = [defines for name, _, defines, _ in recorder.asked if name == "two_pass_head"]
    (head,) = [defines for name, _, defines, _ in recorder.asked if name == "head"]
    assert (asked["OP_WARPS"], asked["OP_PLAIN_DEPTH"], asked["OP_PLAIN_TILES"]) == tuple(
        head[name] for name in ("OP_WARPS", "OP_DEPTH", "OP_TILES")
    )
    # Rows that the sampling stages choose for need every logit.
    state = sampling.allocate(2, weights.head.rows, torch.device("cpu"))
    sampled = prepare_step(recorder, weights, buffers, ChainPlan(132, two_pass=True), state)
    assert [launch.kernel.name for launch in sampled[-6:]] == ["head", "adjust", "bins", "sift", "draw", "advance"]
    few = prepare_step(recorder, weights, buffers, ChainPlan(132, two_pass=True, within_top=True), state)
    assert [launch.kernel.name for launch in few[-6:]] == ["two_pass_top", "adjust", "bins", "sift", "draw", "advance"]
    assert few[-6].values["logits"] == few[-5].values["logits"] == sampled[-6].values["logits"] != 0
    assert few[-6].values["weights"] == plain[-2].values["weights"]


def test_each_rank_reads_its_part_of_the_head(recorder: Any, model: Models) -> None:
    weights = model("bf16")
    how = ChainPlan(132).tiling("head", weights.head)
    weights = replace(weights, coarse=two_pass.coarse_copy(weights.head, how.warps))
    buffers, plan = buffers_of(weights, 2), ChainPlan(132, two_pass=True)
    row_bytes, parts = weights.head.data[0].nbytes, []
    for rank in range(2):
        inboxes, counts = torch.empty(2, dtype=torch.int64), torch.empty(132, dtype=torch.int32)
        own = replace(weights, channels=Channels(2, rank, inboxes, counts, 512))
        recorder.asked.clear()
        *_, head, advance = prepare_step(recorder, own, buffers, plan)
        defines = {name: found for name, _, found, _ in recorder.asked}
        parts.append((head.values["first_token"], defines["two_pass_head"]["OP_ROWS"]))
        assert defines["two_pass_head"]["OP_TOKENS"] == weights.head.rows
        assert head.values["weights"] == weights.head.data.data_ptr() + parts[-1][0] * row_bytes
        assert defines["advance"]["OP_RANKS"] == 2
        assert advance.values["counts"] == counts.data_ptr()
        # Rows that want logits get all of them on each rank, which chooses by itself.
        recorder.asked.clear()
        state = sampling.allocate(2, weights.head.rows, torch.device("cpu"))
        prepare_step(recorder, own, buffers, replace(plan, within_top=True), state)
        defines = {name: found for name, _, found, _ in recorder.asked}
        assert defines["two_pass_top"]["OP_ROWS"] == weights.head.rows
        assert "OP_RANKS" not in defines["advance"]
    (first, size), (second, rest) = parts
    assert (first, second, size + rest) == (0, size, weights.head.rows)


def test_without_overlap(recorder: Any, model: Models) -> None:
    weights = model("bf16")
    buffers = buffers_of(weights, 1)
    chain = prepare_step(recorder, weights, buffers, ChainPlan(132, dependent=False))
    assert not any(launch.dependent for launch in chain)
    assert not prepare_start(recorder, weights, buffers).dependent


def test_each_stage_writes_what_the_next_reads(recorder: Any, model: Models) -> None:
    weights = model("bf16")
    buffers = buffers_of(weights, 2)
    qkv, attention, output, wide, down, second, *_, head, advance = (
        launch.values for launch in prepare_step(recorder, weights, buffers, ChainPlan(132))
    )
    assert qkv["out"] == attention["qkv"] == buffers.qkv.data_ptr()
    assert attention["out"] == output["x"]
    assert output["normed"] == wide["x"] == second["x"] == head["x"] == advance["normed"]
    assert output["squares"] == wide["squares"]
    assert wide["out"] == down["x"]
    assert head["best"] == advance["best"]
    # Each update applies the gain of the norm that comes after it.
    first, last = weights.layers
    assert output["gain"] == first.mlp_gain.data_ptr()
    assert down["gain"] == last.input_gain.data_ptr()
    assert advance["gain"] == first.input_gain.data_ptr()


def test_the_batch_changes_nothing_but_itself(recorder: Any, model: Models) -> None:
    """What decides the order of sums is the same for every number of rows."""
    weights = model("int4")
    for batch in (1, 4, 8):
        prepare_step(recorder, weights, buffers_of(weights, batch), ChainPlan(132))
    count = len(recorder.asked) // 3
    changing = ("OP_BATCH", "OP_POLL", "OP_SLOTS")  # rows; how splits meet; where attention holds pages
    without = [
        (name, {key: value for key, value in defines.items() if key not in changing}, name != "attention" and shared)
        for name, _, defines, shared in recorder.asked
    ]
    assert without[:count] == without[count : 2 * count] == without[2 * count :]


def test_splits_wait_for_each_other_only_where_all_run_at_once(recorder: Any, model: Models) -> None:
    weights = model("bf16")
    for batch, longest, expected in ((1, 4096, 1), (8, 128, 1), (8, 4096, 0)):
        recorder.asked.clear()
        plan = ChainPlan(132, longest=longest)
        chain = prepare_step(recorder, weights, buffers_of(weights, batch), plan)
        polls = {defines["OP_POLL"] for name, _, defines, _ in recorder.asked if name == "attention"}
        assert polls == {expected}
        assert chain[1].shape.grid == (most_splits(longest), weights.heads.keys, batch)


@pytest.mark.parametrize(
    ("batch", "longest", "dependent", "slots"),
    [(1, 8192, True, 2), (1, 2048, True, 0), (1, 8192, False, 0), (8, 8192, True, 0), (1, None, True, 2)],
)
def test_pages_lie_in_shared_memory_where_a_warp_has_several_and_a_block_the_room(
    recorder: Any, model: Models, batch: int, longest: int | None, dependent: bool, slots: int
) -> None:
    weights = model("bf16")
    plan = ChainPlan(132, longest=longest, dependent=dependent)
    chain = prepare_step(recorder, weights, buffers_of(weights, batch), plan)
    (asked,) = {(defines["OP_SLOTS"], shared) for name, _, defines, shared in recorder.asked if name == "attention"}
    assert asked == (slots, chain[1].shape.shared) == (slots, slots * 8 * 2 * (16 * weights.heads.dim * 2 + 128))


def kernel_splits(tokens: int, defines: dict[str, int]) -> int:
    """As `attention.cu` computes it."""
    pages = -(-tokens // 16)
    even = -(-pages // defines["OP_SPLITS"])
    if pages <= defines["OP_SINGLE_PAGES"]:
        return 1
    warps, least = defines["OP_WARPS"], defines["OP_MIN_PAGES"]
    return -(-pages // (-(-even // warps) * warps if even > least else least))


@pytest.mark.parametrize("heads", [Heads(16, 8, 128, True), Heads(8, 1, 256, False)], ids=str)
def test_no_context_splits_into_more_than_was_launched(heads: Heads) -> None:
    defines, most = attention_defines(heads), 0
    for tokens in range(0, 20000):
        most = max(most, kernel_splits(tokens, defines))
        assert most <= most_splits(tokens) <= SPLITS


@pytest.mark.parametrize(
    ("heads", "subgroups"),
    [(Heads(32, 8, 128, False), 1), (Heads(24, 2, 96, False), 2), (Heads(128, 8, 128, False), 2)],
)
def test_heads_beyond_eight_share_a_key_in_turns(heads: Heads, subgroups: int) -> None:
    assert heads.subgroups == subgroups
    assert heads.why_not() is None


def test_heads_that_the_kernel_cannot_serve() -> None:
    for dim in (80, 112, 288):
        assert str(dim) in (Heads(8, 8, dim, False).why_not() or "")


def test_a_misspelt_argument_is_told(recorder: Any, model: Models) -> None:
    weights = model("bf16")
    launch = prepare_start(recorder, weights, buffers_of(weights, 1))
    with pytest.raises(BuildError, match="tokem"):
        prepare(launch.kernel, launch.shape, {"tokem": 0})


def test_a_plan_may_divide_a_stage_itself(recorder: Any, model: Models) -> None:
    weights = model("bf16")
    own = ChainPlan(132, longest=512).tiling("down", weights.layers[0].down.matrix)
    long = ChainPlan(132, longest=4096).tiling("down", weights.layers[0].down.matrix)
    other = ChainPlan(132).tiling("output", weights.layers[0].output.matrix)
    assert (own.window, long.window, other.window) == (
        1,
        2,
        2,
    )  # down is not to hold up gate and up, beside which it starts
    plan = ChainPlan(132, tilings={"down": replace(own, window=3)})
    prepare_step(recorder, weights, buffers_of(weights, 1), plan)
    windows = [defines["OP_WINDOW"] for name, _, defines, _ in recorder.asked if name == "linear_residual"]
    assert windows == [other.window, 3, other.window, 3]
    assert isinstance(own, Tiling)


@pytest.mark.parametrize("dependent", [True, False])
@pytest.mark.parametrize("drawn", [True, False])
def test_what_follows_a_chunk(recorder: Any, model: Models, drawn: bool, dependent: bool) -> None:
    weights = model("bf16")
    buffers = buffers_of(weights, 1)
    fed = Fed(torch.zeros(5, 896), torch.zeros(2, dtype=torch.int32))
    state = sampling.allocate(1, weights.head.rows, torch.device("cpu")) if drawn else None
    chain = prepare_first(recorder, weights, buffers, fed, ChainPlan(132, dependent=dependent), state)
    stages = ["adjust", "bins", "sift", "draw"] if drawn else []
    assert [launch.kernel.name for launch in chain] == ["take", "head", *stages, "advance"]
    assert [launch.dependent for launch in chain] == [False] + [dependent] * (len(chain) - 1)
    take, head, advance = chain[0], chain[1], chain[-1]
    assert take.values["chunk"] == fed.residual.data_ptr()
    assert take.values["place"] == fed.place.data_ptr()
    assert take.values["gain"] == weights.final_gain.data_ptr()
    assert take.values["normed"] == head.values["x"]
    assert take.values["squares"] == head.values["squares"]
    assert head.values["best"] == advance.values["best"]
    # and as the end of a step does it
    step = prepare_step(recorder, weights, buffers, ChainPlan(132, dependent=dependent), state)
    assert [launch.values for launch in step[-len(chain) + 1 :]] == [launch.values for launch in chain[1:]]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shared", sorted(set(SHARED.values())))
def test_attention_takes_no_more_than_a_block_may_have(recorder: Any, dim: int, shared: int) -> None:
    """Places in shared memory are given up where they do not fit beside the results of a block's warps."""
    heads, rows = Heads(12, 4, dim, False), torch.zeros(1, 1)
    pool = torch.zeros(2, 4, heads.keys, 16, dim, dtype=torch.bfloat16)
    places = RowPages(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32))
    held = scratch(heads, 1, torch.device("cpu"))
    op = AttentionOp(recorder, heads, places, Embedding(rows, 1e-6), held, 132, 8192, True, most_shared=shared)
    launch = op.prepare(LayerAttention(pool[0], pool[1], None, None), torch.zeros(1, heads.rows), rows)
    assert launch.shape.shared + (48 << 10) <= shared
    _, _, defines, asked = recorder.asked[-1]
    assert asked == launch.shape.shared
    assert (defines["OP_SLOTS"] > 0) == (asked > 0)
    if shared == LARGEST_SHARED:
        assert (asked > 0) == (dim <= 128)
