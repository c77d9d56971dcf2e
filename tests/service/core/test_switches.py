"""What is said of a switch: as it was asked for, as it is, and why the two differ."""

from __future__ import annotations

from dataclasses import replace

from engine.api import Reverted, Unused
from service.config.settings import OptimizationOptions
from service.core.switches import OptimizationSwitches
from tests.service.scripted import INFO, ScriptedEngine


def engine_with(*unused: str) -> ScriptedEngine:
    engine = ScriptedEngine([])
    engine.info = replace(INFO, unused=tuple(Unused(name=name, reason=f"no {name} here") for name in unused))
    return engine


def told(switches: OptimizationSwitches, name: str) -> tuple[bool, bool, str]:
    one = next(one for one in switches.all() if one.name == name)
    return one.requested, one.effective, one.why_not


async def test_why_it_does_nothing_here_is_told_whether_it_is_on_or_off() -> None:
    switches = OptimizationSwitches(OptimizationOptions(), engine_with("two_pass_head"))
    assert {one.name: one.why_not for one in switches.all() if one.why_not} == {
        "two_pass_head": "no two_pass_head here"
    }
    assert {one.name for one in switches.all() if not one.effective} == {"two_pass_head"}
    turned = await switches.set("two_pass_head", False)
    assert (turned.requested, turned.effective, turned.why_not) == (False, False, "no two_pass_head here")


async def test_one_that_needs_another_does_nothing_without_it() -> None:
    switches = OptimizationSwitches(OptimizationOptions(), engine_with())
    await switches.set("fused_kernels", False)
    await switches.set("prefix_cache", False)
    assert told(switches, "graphs") == told(switches, "two_pass_head") == (True, False, "fused_kernels is off")
    assert told(switches, "prefix_redis") == (True, False, "prefix_cache is off")
    assert told(switches, "batching") == (True, True, "")


async def test_nothing_is_in_force_before_the_engine_was_ready() -> None:
    engine = ScriptedEngine([])
    engine.info = None  # type: ignore[assignment]
    assert not any(one.effective for one in OptimizationSwitches(OptimizationOptions(), engine).all())


async def test_one_that_was_turned_back_says_so_until_it_is_set_again() -> None:
    engine = engine_with()
    engine.reverted = {"graphs": Reverted(name="graphs", enabled=False, reason="2 steps failed")}
    switches = OptimizationSwitches(OptimizationOptions(), engine)
    assert told(switches, "graphs") == (True, False, "2 steps failed")
    engine.reverted = {}
    assert told(switches, "graphs") == (True, True, "")


async def test_a_cache_of_the_front_says_why_it_does_nothing() -> None:
    switches = OptimizationSwitches(OptimizationOptions(), engine_with(), lambda: {"semantic_cache": "no embedder"})
    assert told(switches, "semantic_cache") == (True, False, "no embedder")
    assert told(switches, "response_cache") == (True, True, "")
