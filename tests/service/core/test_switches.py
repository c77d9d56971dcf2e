"""What is said of a switch."""

from __future__ import annotations

from dataclasses import replace

from engine.api import Unused
from service.config.settings import OptimizationOptions
from service.core.switches import Switches
from tests.service.scripted import INFO, ScriptedEngine


async def test_why_it_does_nothing_here_is_told_whether_it_is_on_or_off() -> None:
    engine = ScriptedEngine([])
    engine.info = replace(INFO, unused=(Unused(name="two_pass_head", reason="the head is small"),))
    switches = Switches(OptimizationOptions(), engine)
    assert {one.name: one.why_not for one in switches.all() if one.why_not} == {"two_pass_head": "the head is small"}
    turned = await switches.set("two_pass_head", False)
    assert (turned.enabled, turned.why_not) == (False, "the head is small")
