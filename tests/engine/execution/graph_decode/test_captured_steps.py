"""What of captured steps can be told without a GPU."""

from __future__ import annotations

from engine.execution.graph_decode.captured_steps import Steps, distinct
from engine.kernels.build import Kernel
from engine.kernels.launch import Launch, Shape


def steps(longest: int, attention: Kernel, blocks: int) -> Steps:
    product = Launch(PRODUCT, Shape((132, 1, 1), 288), {}, ())
    return Steps(longest, (product, Launch(attention, Shape((blocks, 1, 1), 256), {}, ())), {})


PRODUCT, NARROW, WIDE = (Kernel(name, (), None) for name in ("product", "narrow", "wide"))


def test_of_steps_that_launch_the_same_only_the_longest_stays() -> None:
    kept = [steps(512, NARROW, 4), steps(2048, NARROW, 16), steps(9000, WIDE, 16)]
    assert distinct(kept) == tuple(kept)
    same = [steps(512, NARROW, 4), steps(2048, NARROW, 16), steps(9000, NARROW, 16)]
    assert [one.longest for one in distinct(same)] == [512, 9000]
    assert [one.longest for one in distinct(same[:1])] == [512]
