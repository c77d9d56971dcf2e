"""Continues an answer from another source: delivered parts are checked and left out. Two generations of one answer
agree in ids and text, but not in the borders of their messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from cache.api import BEGUN, AnswerPart, Diverged, Unfinished


class Skipper:
    def __init__(self, delivered: Sequence[AnswerPart]) -> None:
        self._ids = [i for part in delivered for i in part.token_ids]
        self._text = "".join(part.text for part in delivered)
        self._ids_at = 0
        self._text_at = 0

    def rest(self, part: AnswerPart) -> AnswerPart | None:
        """Raises Diverged where the part contradicts what was delivered."""
        ids = self._ids[self._ids_at : self._ids_at + len(part.token_ids)]
        text = self._text[self._text_at : self._text_at + len(part.text)]
        if part.token_ids[: len(ids)] != tuple(ids) or not part.text.startswith(text):
            raise Diverged("a second generation of one answer differs")
        self._ids_at += len(ids)
        self._text_at += len(text)
        behind = self._ids_at < len(self._ids) or self._text_at < len(self._text)
        if part.ending is not None and behind:
            raise Diverged("a second generation of one answer is shorter")
        cuts = tuple([max(0, cut - len(text)) for cut in part.cuts[len(ids) :]])
        rest = AnswerPart(part.token_ids[len(ids) :], part.text[len(text) :], part.ending, cuts)
        return rest if rest.token_ids or rest.text or rest.ending else None


async def resume(delivered: Sequence[AnswerPart], fresh: AsyncIterator[AnswerPart]) -> AsyncGenerator[AnswerPart, None]:
    """Raises Diverged, or Unfinished where the source ends early."""
    skipper = Skipper(delivered)
    async for part in fresh:
        if part is BEGUN:
            yield part
            continue
        rest = skipper.rest(part)
        if rest is not None:
            yield rest
        if part.ending is not None:
            return
    raise Unfinished("the source ended without an ending")
