"""The walk in C beside torch's walk and float64, for shapes, formats, contexts and threads of many kinds."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.linear import Placement
from engine.linear.products import CpuProducts, open_products
from engine.model.attention import RowSpan
from engine.model.layers.cpu_walk import (
    FAR_POSITIONS,
    MOST_ROWS,
    MOST_TOKENS,
    NEAR_POSITIONS,
    SPLIT,
    CpuWalk,
    open_cpu_walk,
)
from engine.worker.hardware import cpu_features
from tests.engine.model.layers.walked import CPU, Made, Shape, in_float64, run
from tests.properties import example_count

pytestmark = [pytest.mark.product, pytest.mark.isa]

NEAR = 5e-5  # of the largest: float32's rounding, grown by a few layers


@pytest.fixture(scope="session")
def products() -> CpuProducts:
    return open_products(cpu_features().flags, walkers=2)


def walk_of(made: Made) -> CpuWalk:
    found = open_cpu_walk(made.config, made.model.weights, made.model.rope, made.placement)
    assert isinstance(found, CpuWalk)
    return found


def near(found: torch.Tensor, expected: torch.Tensor, by: float = NEAR) -> bool:
    assert found.shape == expected.shape
    return float((found - expected).abs().max()) < by * float(expected.abs().max())


def rows_at(*positions: int, apart: int = 8) -> list[RowSpan]:
    """Rows of one token, each with pages of its own, not all of them neighbours."""
    return [
        RowSpan(row, 1, at, [row * apart + page * (3 if page % 2 else 1) % apart for page in range(at // 16 + 1)])
        for row, at in enumerate(positions)
    ]


def compare(made: Made, spans: list[RowSpan]) -> None:
    hidden, logits = run(made, spans, fused=True)
    plain, plain_logits = run(made, spans, fused=False)
    exact = in_float64(made, spans)
    assert near(hidden, exact)
    assert near(hidden, plain, 1e-4)
    assert near(logits, plain_logits, 1e-4)


FORMS = ("bfloat16", "float16", "int8", "int4", "minima", "mixed")
SHAPES = {
    "small": Shape(),
    "odd sizes": Shape(hidden=72, inner=104, heads=3, kv_heads=1, dim=24, vocabulary=101),
    "no group": Shape(heads=4, kv_heads=4, dim=32),
    "eight to a head": Shape(heads=8, kv_heads=1, dim=16),
    "wide heads": Shape(heads=2, kv_heads=1, dim=144),
    "Qwen3": Shape(qk_norm=True, hidden=80, heads=5, kv_heads=5, dim=16),
    "biases": Shape(bias=True),
    "untied": Shape(tied=False, vocabulary=200),
    "window": Shape(window=20),
    "scales": Shape(scaled=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_steps_are_those_of_torch_and_of_float64(shape: Shape, form: str, products: CpuProducts) -> None:
    made = Made(replace(shape, form=form), products)
    for positions in ((0,), (15,), (16,), (40,), (3, 90, 17), (5, 31, 32, 47, 0, 64, 100, 1), tuple(range(16))):
        spans = rows_at(*positions) if len(positions) <= 8 else rows_at(*positions, apart=4)
        compare(made, spans)


@pytest.mark.parametrize("positions", [(SPLIT - 1,), (SPLIT,), (SPLIT + 1, 3), (4000, SPLIT * 2, 10)])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("form", ["bfloat16", "int4"])
def test_long_contexts(positions: tuple[int, ...], window: int | None, form: str, products: CpuProducts) -> None:
    made = Made(Shape(window=window, form=form), products, pages=3 * 256)
    compare(made, rows_at(*positions, apart=256))


@pytest.mark.parametrize("positions", [(0,), (70, 5), (SPLIT + 40, 20)])
def test_keys_and_values_of_eight_bits(positions: tuple[int, ...], products: CpuProducts) -> None:
    """A rounding to e4m3 may fall to the other side of a tie: compared are steps whose own keys do not decide."""
    made = Made(Shape(kv=torch.float8_e4m3fn, heads=4, dim=24), products, pages=128)
    spans = rows_at(*positions, apart=64)
    hidden, _ = run(made, spans, fused=True)
    exact = in_float64(made, spans)
    assert float((hidden - exact).abs().max()) < 0.02 * float(exact.abs().max())


def test_what_is_written_as_eight_bits_is_what_torch_writes(products: CpuProducts) -> None:
    made = Made(Shape(kv=torch.float8_e4m3fn, layers=1), products)
    written = []
    for fused in (False, True):
        made.model.fused = fused
        made.pool.storage.zero_()
        with torch.inference_mode():
            made.model.forward(made.step(rows_at(0, 17, 33)), made.pool)
        written.append(made.pool.storage.clone())
    differ = (written[0] != written[1]).float().mean()
    assert float(differ) < 1e-3  # a tie that rounding in float32 decides otherwise


def test_several_tokens_of_one_sequence_see_each_other(products: CpuProducts) -> None:
    made = Made(Shape(), products)
    pages = [5, 2, 9]
    drafts = [RowSpan(at, 1, 30 + at, pages) for at in range(5)]
    compare(made, [*drafts, RowSpan(5, 1, 7, [11])])
    compare(made, [RowSpan(0, 1, 7, [11]), RowSpan(1, 6, 12, pages)])  # a piece of a prompt


@given(st.data())
@settings(max_examples=example_count(25), deadline=None)
def test_any_shape(products: CpuProducts, data: st.DataObject) -> None:
    draw = data.draw
    kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        hidden=draw(st.integers(1, 9)) * 8,
        inner=draw(st.integers(1, 9)) * 8,
        heads=kv_heads * draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        dim=draw(st.integers(1, 5)) * 8,
        layers=1,
        vocabulary=draw(st.integers(2, 90)),
        window=draw(st.sampled_from([None, 1, 5, 33])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        form=draw(st.sampled_from(FORMS)),
    )
    positions = draw(st.lists(st.integers(0, 120), min_size=1, max_size=8))
    compare(Made(shape, products, draw(st.integers(0, 1 << 30))), rows_at(*positions))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads(form: str, products: CpuProducts) -> None:
    made = Made(Shape(form=form, hidden=96, inner=160, vocabulary=300), products, pages=16 * 48)
    together = rows_at(600, *range(3, 18), apart=48)[:MOST_ROWS]
    walkers = products.walkers
    try:
        expected: tuple[torch.Tensor, torch.Tensor] | None = None
        for threads in (1, 2, 5):
            products.walkers = threads
            one = Made(made.shape, products, pages=16 * 48)
            hidden, logits = run(one, together, fused=True)
            expected = expected or (hidden, logits)
            assert torch.equal(hidden, expected[0])
            assert torch.equal(logits, expected[1])
        with torch.inference_mode():
            one.pool.storage.copy_(made.pool.storage)
            step = one.step(together)
            for row in (0, 7, 15):
                span = together[row]
                alone = one.step([RowSpan(0, 1, span.start, span.pages)])
                alone.token_ids.copy_(step.token_ids[row : row + 1])
                found = one.model.forward(alone, one.pool)
                assert torch.equal(found[0], expected[0][row])
    finally:
        products.walkers = walkers


def test_two_callers_at_once(products: CpuProducts) -> None:
    """The second goes by itself, without the threads of the first."""
    made = [Made(Shape(), products, seed) for seed in range(2)]
    spans = rows_at(20, 40)
    expected = [run(one, spans, fused=True)[0] for one in made]
    wrong: list[int] = []

    def repeat(which: int) -> None:
        for _ in range(50):
            if not torch.equal(run(made[which], spans, fused=True)[0], expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=repeat, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_it_does_not_take(products: CpuProducts) -> None:
    made = Made(Shape(), products)
    walk = walk_of(made)
    assert walk.takes(rows_at(*range(16), apart=1), made.pool)
    assert walk.takes(rows_at(*([3] * MOST_TOKENS), apart=1), made.pool)
    assert not walk.takes(rows_at(*([3] * (MOST_TOKENS + 1)), apart=1), made.pool)
    assert walk.takes(rows_at(*([9000] * MOST_ROWS)), made.pool)
    assert not walk.takes(rows_at(*([9000] * (MOST_ROWS + 1))), made.pool)
    reasons = [
        open_cpu_walk(made.config, made.model.weights, made.model.rope, placement)
        for placement in (Placement(torch.float32, CPU), Placement(torch.bfloat16, CPU))
    ]
    assert reasons == ["weights of 32 bits are multiplied by torch", "there is no C compiler for the walk"]


def test_how_far_it_takes_prompts_follows_the_threads_of_torch(products: CpuProducts) -> None:
    before, walkers = torch.get_num_threads(), products.walkers
    try:
        for threads, own, reach in (
            (1, 2, FAR_POSITIONS),
            (1, 1, NEAR_POSITIONS),
            (2, 3, NEAR_POSITIONS),
            (2, 4, FAR_POSITIONS),
        ):
            torch.set_num_threads(threads)
            products.walkers = own
            made = Made(Shape(), products)
            walk = walk_of(made)
            for last, taken in ((reach - 1, True), (reach, False)):
                assert walk.takes([RowSpan(0, 20, last - 19, [0])], made.pool) is taken
    finally:
        torch.set_num_threads(before)
        products.walkers = walkers


@pytest.mark.parametrize("form", FORMS)
def test_prompts_beside_rows(form: str, products: CpuProducts) -> None:
    made = Made(Shape(form=form), products, pages=64)
    pages = [list(range(at, at + 16)) for at in (0, 16, 32)]
    spans = [RowSpan(0, 1, 77, pages[2]), RowSpan(1, 200, 0, pages[0]), RowSpan(201, 40, 31, pages[1])]
    assert walk_of(made).takes(spans, made.pool)
    compare(made, spans)
