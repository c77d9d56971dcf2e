"""Switches that bring failing steps are turned back; those that do not are left alone."""

from __future__ import annotations

import pytest

from engine.api import TRIAL_STEPS, EngineState
from engine.client.engine_client import EngineClient
from engine.errors import EngineFailed, EngineUnavailable
from engine.fake import Fault, plain_request
from tests.engine.client.test_engine_client import ids_of, running, until

pytestmark = pytest.mark.product

WITH_GRAPHS = (0, Fault.GRAPHS)  # a prompt whose steps fail while `graphs` is on


async def fails(client: EngineClient) -> None:
    with pytest.raises(EngineFailed):
        await ids_of(client.submit(plain_request(WITH_GRAPHS, 3)))


async def test_a_switch_with_which_steps_fail_is_turned_back() -> None:
    async with running() as client:
        await client.set_optimization("graphs", False)
        assert len(await ids_of(client.submit(plain_request(WITH_GRAPHS, TRIAL_STEPS)))) == TRIAL_STEPS
        await client.set_optimization("batching", False)  # on trial as well, but not the last one
        await client.set_optimization("graphs", True)
        await fails(client)
        assert client.reverted == {}, "one failure may be the request's"
        await fails(client)
        await until(lambda: bool(client.reverted))
        back = client.reverted["graphs"]
        assert (back.enabled, dict(client.reverts)) == (False, {"graphs": 1})
        assert "2 steps in a row failed soon after it was turned on" in back.reason
        assert len(await ids_of(client.submit(plain_request(WITH_GRAPHS, 3)))) == 3
        assert client.restarts == 0
        await client.set_optimization("graphs", True)
        assert client.reverted == {}
        assert client.reverts["graphs"] == 1


async def test_one_that_has_proved_itself_is_not_blamed() -> None:
    async with running() as client:
        await client.set_optimization("graphs", False)
        await client.set_optimization("graphs", True)
        assert len(await ids_of(client.submit(plain_request((1,), TRIAL_STEPS)))) == TRIAL_STEPS
        for _ in range(3):  # the third in a row ends the process, and fails in the next
            await fails(client)
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        assert client.reverted == {}


async def test_one_that_costs_the_process_is_not_set_in_the_next() -> None:
    async with running() as client:
        await client.set_optimization("graphs", False)
        await ids_of(client.submit(plain_request((1,), TRIAL_STEPS)))
        await client.set_optimization("graphs", False)  # no change, hence no trial
        await client.set_optimization("batching", False)
        with pytest.raises(EngineUnavailable):
            await ids_of(client.submit(plain_request((0, Fault.DEVICE, 2))))
        assert client.reverted.keys() == {"batching"}
        assert client.reverted["batching"].enabled
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        assert len(await ids_of(client.submit(plain_request(WITH_GRAPHS, 3)))) == 3, "graphs are off as before"
        streams = [client.submit(plain_request((1, number), 4000)) for number in range(2)]
        await until(lambda: client.load.running == 2)
        for stream in streams:
            stream.cancel()
