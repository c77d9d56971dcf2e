"""An answer that is generated letter by letter, and who reads it whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from cache.answers.single_flight import Flights
from cache.api import AnswerEnding, AnswerPart, CacheKey, Generate, Kind

KEY = CacheKey(Kind.RESPONSE, "ab" * 16, "0" * 64)
TEXT = "the whole answer, word by word"
END = AnswerEnding(reason="stop", prompt_tokens=3, completion_tokens=len(TEXT))


class Model:
    """Generates TEXT, a token a letter, `step` letters a message; may die on the way."""

    def __init__(self, step: int = 3, pause: float = 0.005, dies_after: int | None = None, text: str = TEXT) -> None:
        self.step, self.pause, self.dies_after, self.text = step, pause, dies_after, text
        self.started = self.finished = self.closed = 0

    async def generate(self) -> AsyncGenerator[AnswerPart, None]:
        self.started += 1
        try:
            for at in range(0, len(self.text), self.step):
                if self.dies_after is not None and at >= self.dies_after:
                    raise RuntimeError("the engine died")
                await asyncio.sleep(self.pause)
                piece = self.text[at : at + self.step]
                yield AnswerPart(tuple(map(ord, piece)), piece)
            self.finished += 1
            yield AnswerPart((), "", END)
        finally:
            self.closed += 1


async def read(parts: AsyncIterator[AnswerPart]) -> str:
    found = [part async for part in parts]
    assert found[-1].ending == END
    assert all(part.ending is None for part in found[:-1])
    text = "".join(part.text for part in found)
    assert [i for part in found for i in part.token_ids] == [ord(letter) for letter in text]
    return text


async def ask(flights: Flights, generate: Generate, key: CacheKey = KEY) -> str:
    async with flights.join(key, generate) as parts:
        return await read(parts)
