"""An engine that only says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType

from engine.api import (
    EngineLoad,
    EngineState,
    GenerationRequest,
    ModelInfo,
    Reverted,
    TokenEvents,
)
from engine.errors import EngineUnavailable
from engine.settings import LogLevel

INFO = ModelInfo(
    architecture="x",
    weight_format="x",
    dtype="x",
    kv_dtype="x",
    device="x",
    decoder="x",
    objections=(),
    vocab_size=256,
    max_context=4096,
    max_sequences=8,
    max_batch_tokens=512,
    page_size=16,
    total_pages=256,
    weights_bytes=0,
    weights_digest="",
)


Script = Sequence[tuple[float, TokenEvents | Exception]]


class ScriptedStream:
    """Gives each event after its pause. Batching is the real stream's business, so it gives them one by one."""

    def __init__(self, script: Script) -> None:
        self._events = self._run(script)
        self.cancelled = False
        self.batched: list[tuple[int, float]] = []

    @staticmethod
    async def _run(script: Script) -> AsyncIterator[TokenEvents]:
        for pause, event in script:
            await asyncio.sleep(pause)
            if isinstance(event, Exception):
                raise event
            yield event

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> TokenEvents:
        return await anext(self._events)

    def batch(self, tokens: int, delay: float) -> None:
        self.batched.append((tokens, delay))

    def cancel(self) -> None:
        self.cancelled = True

    def abort(self, reason: str) -> None: ...


class ScriptedEngine:
    """One stream after a script."""

    def __init__(self, script: Script) -> None:
        self.stream = ScriptedStream(script)
        self.requests: list[GenerationRequest] = []

    state = EngineState.READY
    info = INFO
    load = EngineLoad()
    restarts = 0
    deaths: Mapping[str, int] = MappingProxyType({"hung": 0})
    quarantines = 0
    reverted: Mapping[str, Reverted] = MappingProxyType({})
    reverts: Mapping[str, int] = MappingProxyType({})

    async def start(self) -> None: ...

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        self.requests.append(request)
        return self.stream

    def unavailable(self) -> EngineUnavailable:
        return EngineUnavailable("the engine is scripted", 1.0)

    async def set_optimization(self, name: str, enabled: bool) -> None: ...

    async def profile(self, seconds: float) -> str:
        return ""

    def set_log_level(self, level: LogLevel) -> None: ...

    async def close(self) -> None: ...
