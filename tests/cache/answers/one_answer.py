"""An answer that is generated letter by letter, and who reads it whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cache.answers.single_flight import SingleFlight
from cache.api import AnswerEnding, AnswerPart, CacheKey, EntryKind, Generate

KEY = CacheKey(EntryKind.RESPONSE, "ab" * 16, "0" * 64)
TEXT = "the whole answer, word by word"
END = AnswerEnding(reason="stop", prompt_tokens=3, completion_tokens=len(TEXT))


def spelled(text: str, ending: AnswerEnding | None = None) -> AnswerPart:
    """A token a letter."""
    return AnswerPart(tuple(map(ord, text)), text, ending, tuple(range(1, len(text))))


class Model:
    """Generates TEXT, a token a letter, `step` letters a message; may die on the way."""

    def __init__(self, step: int = 3, pause: float = 0.005, dies_after: int | None = None, text: str = TEXT) -> None:
        self.step, self.pause, self.dies_after, self.text = step, pause, dies_after, text
        self.started = self.finished = self.closed = 0

    def generate(self) -> Letters:
        return Letters(self)


class Letters:
    """One generation of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._at = 0
        self._closed = asyncio.Event()
        self._begun = False

    async def next(self) -> AnswerPart:
        model, at = self._model, self._at
        if not self._begun:
            self._begun = True
            model.started += 1
        if at >= len(model.text):
            model.finished += 1
            return AnswerPart((), "", END)
        if model.pause:
            try:
                async with asyncio.timeout(model.pause):
                    await self._closed.wait()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        if self._closed.is_set():
            raise StopAsyncIteration
        if model.dies_after is not None and at >= model.dies_after:
            raise RuntimeError("the engine died")
        self._at += model.step
        return spelled(model.text[at : at + model.step])

    def close(self) -> None:
        if self._begun and not self._closed.is_set():
            self._model.closed += 1
        self._closed.set()


async def read(parts: AsyncIterator[AnswerPart]) -> str:
    found = [part async for part in parts]
    assert found[-1].ending == END
    assert all(part.ending is None for part in found[:-1])
    text = "".join(part.text for part in found)
    assert [i for part in found for i in part.token_ids] == [ord(letter) for letter in text]
    return text


async def ask(flights: SingleFlight, generate: Generate, key: CacheKey = KEY) -> str:
    async with flights.join(key, generate) as parts:
        return await read(parts)
