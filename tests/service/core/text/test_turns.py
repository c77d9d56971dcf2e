"""Senders take turns, and a turn is never lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from service.core.text.turns import FairTurns


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_senders_take_turns() -> None:
    turns, order = FairTurns(1), ""
    await turns.acquire("busy")

    async def job(sender: str) -> None:
        nonlocal order
        await turns.acquire(sender)
        order += sender
        turns.release(sender)

    jobs = [asyncio.create_task(job(sender)) for sender in "aaaaabbc"]
    await settled()
    turns.release("busy")
    await asyncio.gather(*jobs)
    assert order == "abcabaaa"


@pytest.mark.parametrize("seed", range(20))
async def test_no_turn_is_lost_by_those_who_give_up(seed: int) -> None:
    draw, turns, at_once, most = random.Random(seed), FairTurns(2), 0, 0

    async def job(sender: str) -> None:
        nonlocal at_once, most
        await turns.acquire(sender)
        at_once += 1
        most = max(most, at_once)
        try:
            await asyncio.sleep(0)
        finally:
            at_once -= 1
            turns.release(sender)

    jobs = []
    for _ in range(200):
        jobs.append(asyncio.create_task(job(draw.choice("abc"))))
        if draw.random() < 0.5:
            draw.choice(jobs).cancel()
        if draw.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.gather(*jobs, return_exceptions=True)
    assert most == 2
    for _ in range(2):
        await asyncio.wait_for(turns.acquire("d"), 60)
    third = asyncio.create_task(turns.acquire("d"))
    await settled()
    assert not third.done()
    turns.release("d")
    await asyncio.wait_for(third, 60)


async def test_one_sender_has_no_more_than_its_share() -> None:
    turns = FairTurns(3, each=2)
    greedy = [asyncio.create_task(turns.acquire("a")) for _ in range(3)]
    await settled()
    assert [one.done() for one in greedy] == [True, True, False]
    await asyncio.wait_for(turns.acquire("b"), 60)
    other = asyncio.create_task(turns.acquire("b"))
    await settled()
    assert not other.done()
    turns.release("b")
    await settled()
    assert other.done()
    assert not greedy[2].done()
    turns.release("a")
    await settled()
    assert greedy[2].done()
