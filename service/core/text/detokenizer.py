"""Converts token ids to text that may be sent at once.

Text is never taken back: half a character and a possible stop string wait. All pieces together are what the tokenizer
makes of all ids at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from service.core.text.assemble import assembler
from service.core.text.stops import StopMatcher
from service.core.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    text: str
    stop: str | None  # the stop string that matched; the text ends there
    ids: int  # how many of the pushed ids belong to the answer
    cuts: tuple[int, ...] = ()  # where in the text the share of each of those ids but the last ends


class Detokenizer:
    """`continues`: the answer goes on from a text, so that a leading space is part of it. Stop strings that end before
    token number `min_tokens` are ordinary text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        continues: bool = False,
        skip_special: bool = True,
    ) -> None:
        self.include_stop = include_stop
        self._assembler = assembler(tokenizer.pieces if skip_special else tokenizer.all_pieces, continues)
        self._matcher = StopMatcher(stop_strings, include_stop) if stop_strings else None
        # Where there are no stop strings: the texts that one id settles and makes, in place of `push`.
        self.feed = None if stop_strings else self._assembler.feed
        self._min_tokens = min_tokens
        self._count = 0  # ids pushed
        self._stop: str | None = None

    def push(self, ids: Sequence[int]) -> Piece:
        """Ids after a stop are not part of the answer: Piece("", stop, 0, ())."""
        if self._matcher is None:
            plain = self._assembler.feed_ascii(ids) if len(ids) > 1 else None
            if plain is not None:
                text, lengths = plain
                return Piece(text, None, len(ids), tuple(accumulate(lengths[:-1])))
            feed = self._assembler.feed
            texts = [settled + made if settled else made for settled, made in map(feed, ids)]
            return Piece("".join(texts), None, len(ids), _cuts(texts))
        if self._stop is not None:
            return Piece("", self._stop, 0, ())
        return self._push_matching(ids, self._matcher)

    def _push_matching(self, ids: Sequence[int], matcher: StopMatcher) -> Piece:
        texts: list[str] = []  # one an id
        for number, token_id in enumerate(ids):
            settled, made = self._assembler.feed(token_id)
            before = ""
            if settled:  # made by the id before, or earlier ones
                before, stop = matcher.feed(settled, self._count >= self._min_tokens)
                if stop is not None:
                    return self._stopped([*texts, before], stop, number)
            self._count += 1
            text, stop = matcher.feed(made, self._count >= self._min_tokens)
            texts.append(before + text if before else text)
            if stop is not None:
                return self._stopped(texts, stop, number + 1)
        return Piece("".join(texts), None, len(ids), _cuts(texts))

    def flush(self) -> Piece:
        """Returns what was withheld. It may complete a stop string."""
        if self._stop is not None:
            return Piece("", self._stop, 0, ())
        rest = self._assembler.flush()
        if self._matcher is None:
            return Piece(rest, None, 0, ())
        text, stop = self._matcher.feed(rest, self._count >= self._min_tokens)
        if stop is not None:
            return self._stopped([text], stop, 0)
        return Piece(text + self._matcher.flush(), None, 0, ())

    def _stopped(self, texts: list[str], stop: str, ids: int) -> Piece:
        self._stop = stop
        return Piece("".join(texts), stop, ids, _cuts(texts[:ids]))


def _cuts(texts: list[str]) -> tuple[int, ...]:
    return tuple(accumulate(map(len, texts[:-1])))
