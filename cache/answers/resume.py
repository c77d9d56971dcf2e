"""How an answer goes on from another source: what was already delivered is checked and left out.

Two generations of one answer agree in ids and text, but not in the borders of their messages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from cache.api import Chunk


class Diverged(Exception):
    """The new source says something else than what was already delivered."""


class Unfinished(Exception):
    """A source ended without an ending."""


class Refused(Exception):
    """Whoever was to generate may not do so now. Its own reader gets this; the next reader's way is tried."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


# Known by its identity: a source may begin with it, to say that it was let in before it has anything to deliver.
BEGUN = Chunk((), "")


class Skipper:
    """Leaves out of a fresh answer what has been delivered of it."""

    def __init__(self, delivered: Sequence[Chunk]) -> None:
        self._ids = [i for chunk in delivered for i in chunk.token_ids]
        self._text = "".join(chunk.text for chunk in delivered)
        self._ids_at = 0
        self._text_at = 0

    def rest(self, chunk: Chunk) -> Chunk | None:
        """What of the chunk is new, None where nothing is. Raises Diverged."""
        ids = self._ids[self._ids_at : self._ids_at + len(chunk.token_ids)]
        text = self._text[self._text_at : self._text_at + len(chunk.text)]
        if chunk.token_ids[: len(ids)] != tuple(ids) or not chunk.text.startswith(text):
            raise Diverged("a second generation of one answer differs")
        self._ids_at += len(ids)
        self._text_at += len(text)
        behind = self._ids_at < len(self._ids) or self._text_at < len(self._text)
        if chunk.ending is not None and behind:
            raise Diverged("a second generation of one answer is shorter")
        rest = Chunk(chunk.token_ids[len(ids) :], chunk.text[len(text) :], chunk.ending)
        return rest if rest.token_ids or rest.text or rest.ending else None


async def resume(delivered: Sequence[Chunk], fresh: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
    """The rest of an answer. Raises Diverged, or Unfinished where the source ends early."""
    skipper = Skipper(delivered)
    async for chunk in fresh:
        if chunk is BEGUN:
            yield chunk
            continue
        rest = skipper.rest(chunk)
        if rest is not None:
            yield rest
        if chunk.ending is not None:
            return
    raise Unfinished("the source ended without an ending")
