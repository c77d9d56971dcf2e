"""What of captured steps can be told without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.execution.graphs import chains
from engine.execution.graphs.chains import Chain, distinct
from engine.execution.graphs.decode import CapturedSteps
from engine.execution.pipeline import BUCKETS
from engine.execution.router import FEW
from engine.kernels import two_pass
from engine.kernels.build import Kernel, WantedKernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Launch, Shape, Unlaunched
from engine.model.layers.few_rows import MOST_ROWS
from tests.engine.kernels.conftest import small_model


def steps(longest: int, attention: Kernel, blocks: int) -> Chain:
    product = Launch(PRODUCT, Shape((132, 1, 1), 288), {}, ())
    return Chain(longest, (product, Launch(attention, Shape((blocks, 1, 1), 256), {}, ())))


PRODUCT, NARROW, WIDE = (Kernel(name, (), None) for name in ("product", "narrow", "wide"))


def test_of_steps_that_launch_the_same_only_the_longest_stays() -> None:
    kept = [steps(512, NARROW, 4), steps(2048, NARROW, 16), steps(9000, WIDE, 16)]
    assert distinct(kept) == tuple(kept)
    same = [steps(512, NARROW, 4), steps(2048, NARROW, 16), steps(9000, NARROW, 16)]
    assert [one.longest for one in distinct(same)] == [512, 9000]
    assert [one.longest for one in distinct(same[:1])] == [512]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "launcher_of", lambda device: Unlaunched())


@pytest.mark.usefixtures("no_gpu")
def test_steps_of_every_bucket_and_reach() -> None:
    wanted = WantedKernels(GpuShape(132, 227 << 10, warpgroups=True, overlap=True))
    weights = small_model("int4")
    weights = replace(weights, coarse=two_pass.coarse_copy(weights.head, 8))
    steps = CapturedSteps(wanted, weights, 4096, 8)
    steps.build((1,))
    steps.build((1, 2, 4, 8))
    assert {name for name, _ in wanted.sources} >= {"two_pass_head", "head", "sampling", "attention", "advance"}
    # From 2,048 tokens on pages lie in shared memory, where all blocks run at once, and down has more under way.
    few, many = steps._buckets[4].steps, steps._buckets[8].steps
    for one in (few[False, True][0], few[True, False][0]):  # launches of layers are made once for all ways to choose
        assert all(a is b for a, b in zip(one.launches[:10], few[False, False][0].launches[:10], strict=True))
    assert [one.longest for one in few[False, True]] == [512, 1024, 2048, 4096]
    assert [one.longest for one in many[False, True]] == [512, 1024, 2048, 4096]


def test_few_rows_are_as_many_for_the_router_the_pipeline_and_the_walk() -> None:
    assert FEW == BUCKETS[-1] == MOST_ROWS
