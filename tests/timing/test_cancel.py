"""How soon a cancelled sequence is gone, against one that ends by itself."""

from __future__ import annotations

import statistics

from engine.fake import plain_request
from tests.engine.client.test_engine_client import prompt, running, until


async def test_cancel_frees_within_a_step_and_a_tenth():
    """What an end takes is the report of the load, which comes every tenth of a second."""
    cancelled, ended, steps = [], [], []
    async with running(step_time=0.03) as client:

        def free() -> bool:
            return client.load.used_pages == 0 and client.load.running == 0

        for _ in range(8):
            stream = client.submit(plain_request(prompt(0), 4000))
            await anext(stream)
            await until(lambda: client.load.used_pages > 0)
            stream.cancel()
            cancelled.append(await until(free))
            stream = client.submit(plain_request(prompt(0), 6))
            *_, last = [events async for events in stream]
            assert last.finish is not None
            steps.append(last.finish.decode / 5)
            ended.append(await until(free))
        assert client.live == 0
    assert statistics.median(cancelled) < 2 * statistics.median(ended) + 2 * statistics.median(steps)
