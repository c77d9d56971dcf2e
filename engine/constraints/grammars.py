"""Compiles grammars over a model's vocabulary, within the library's own bounds."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from engine.constraints.bounds import check_grammar
from engine.constraints.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MOST_STATES: Final = 20_000  # of a lexer, a kilobyte or two each


def limits() -> LLParserLimits:
    """Bounds that end most of what is too complex early, but neither the time of a mask (0.7 s was measured) nor memory
    (160 MB). Errors omit what the caller sent, since they may be logged."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)


class Grammars:
    """Reads its vocabulary at the first use. Belongs to one thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def matcher(self, grammar: str) -> LLMatcher:
        """In error where the grammar does not compile. Raises OutOfBounds, and what `read_vocabulary` raises."""
        from llguidance import LLMatcher

        check_grammar(grammar)
        return LLMatcher(self.vocabulary()[0], grammar, log_level=0, limits=limits())

    def vocabulary(self) -> tuple[LLTokenizer, int]:
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, int]:
        return read_vocabulary(self._folder)
