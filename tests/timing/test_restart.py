"""How soon a model is there again after its engine process was killed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from engine.api import EngineState
from engine.client import EngineClient
from engine.settings import EngineSettings

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


async def test_the_demo_model_is_ready_again_within_five_seconds() -> None:
    """And not much later than the first time, on whatever machine."""
    client = EngineClient(EngineSettings(model=str(DEMO), device="cpu"))
    began = time.monotonic()
    await client.start()
    first = time.monotonic() - began
    began = time.monotonic()
    client.kill()
    while client.restarts == 0 or client.state is not EngineState.READY:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    took = time.monotonic() - began
    await client.close()
    assert took < max(5.0, 1.5 * first + 1)  # 2.5 s of processor time
