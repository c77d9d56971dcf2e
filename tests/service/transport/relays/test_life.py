"""When an end of a link takes the other one for hung, on a clock of its own."""

from __future__ import annotations

import asyncio

import pytest

from service.transport.relays.life import LOOKS, SignsOfLife

pytestmark = pytest.mark.virtual_time
TIMEOUT = 16.0  # seconds, so that a look takes one


async def silent_after(answers: int) -> float:
    """When silence was found, where so many questions were answered first."""
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        if asked <= answers:
            asyncio.get_running_loop().call_later(0.5, life.heard)

    life = SignsOfLife(TIMEOUT, ask)
    began = asyncio.get_running_loop().time()
    await life.silence()
    return asyncio.get_running_loop().time() - began


async def test_silence_is_found_within_the_timeout() -> None:
    assert await silent_after(0) == pytest.approx(LOOKS - 1)
    assert await silent_after(100) == pytest.approx(100 + LOOKS - 1)


async def test_who_answers_now_and_then_is_alive() -> None:
    life = SignsOfLife(TIMEOUT, lambda: None)
    watch = asyncio.ensure_future(life.silence())
    for _ in range(20):
        await asyncio.sleep(LOOKS - 2)
        life.heard()
    assert not watch.done()
    watch.cancel()


async def test_a_stop_of_ones_own_is_no_silence_of_the_other() -> None:
    """A process that was stopped for an hour finds one look over, not an hour of silence."""
    loop = asyncio.get_running_loop()
    life = SignsOfLife(TIMEOUT, lambda: loop.call_later(0.1, life.heard))
    watch = asyncio.ensure_future(life.silence())
    await asyncio.sleep(3.0)
    loop._clock.now += 900.0  # type: ignore[attr-defined]
    await asyncio.sleep(20.0)
    assert not watch.done()
    watch.cancel()
