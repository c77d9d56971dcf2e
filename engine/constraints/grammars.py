"""Grammars over a model's vocabulary, and the library's own bounds of what one may take."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from engine.constraints.bounds import check_grammar
from engine.constraints.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MOST_STATES: Final = 20_000  # of a lexer, a kilobyte or two each


def limits() -> LLParserLimits:
    """The library's bounds of work: they end most of what is too complex early. They bound neither the time of a mask
    (0.7 s was seen) nor memory (160 MB). Its errors do not repeat what the caller sent, since they may be logged."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)


class Grammars:
    """Reads the vocabulary when it is first needed. Belongs to one thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def matcher(self, grammar: str) -> LLMatcher:
        """A fresh one, at the grammar's beginning. A grammar that cannot be compiled gives one that is in error. Raises
        OutOfBounds, and what `read_vocabulary` does."""
        from llguidance import LLMatcher

        check_grammar(grammar)
        return LLMatcher(self.vocabulary()[0], grammar, log_level=0, limits=limits())

    def vocabulary(self) -> tuple[LLTokenizer, int]:
        """With the token whose bit in a mask says that the answer may end there. Raises OSError or ValueError."""
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, int]:
        return read_vocabulary(self._folder)
