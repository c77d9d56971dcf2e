"""Compiled grammars, the last few of them, and the bounds of what each may take."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

from engine.constraints.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")
KEPT: Final = 64  # compiled grammars, which live sequences copy
_MOST_STATES: Final = 20_000  # of a lexer, a kilobyte or two each


def limits() -> LLParserLimits:
    """What one grammar may take: time by the library's own bounds of work, some tens of milliseconds a mask; memory by
    the states of its lexer. Its errors do not repeat what the caller sent, since they may be logged."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)


class Grammars:
    """Grammars over one vocabulary. Safe to be used by several threads; who asks for one waits for no other."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._vocabulary: Future[tuple[LLTokenizer, int]] | None = None

    def compile(self, grammar: str) -> None:
        """So that `matcher` need not. A tenth of a second for large ones, and a second for the first of all. Raises
        what `read_vocabulary` does."""
        self._compiled(grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A fresh one, at the grammar's beginning. A grammar that cannot be compiled gives one that is in error."""
        return self._compiled(grammar).deep_copy()

    def vocabulary(self) -> tuple[LLTokenizer, int]:
        """With the token whose bit in a mask says that the answer may end there."""
        with self._lock:
            found, mine = self._vocabulary, self._vocabulary is None
            if found is None:
                found = self._vocabulary = Future()
        if mine:
            _fulfil(found, lambda: read_vocabulary(self._folder))
        return found.result()

    def _compiled(self, grammar: str) -> LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
            mine = found is None
            if found is None:
                found = self._kept[grammar] = Future()
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(grammar)
        if mine:
            _fulfil(found, lambda: self._compile(grammar))
        return found.result()

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self.vocabulary()[0], grammar, log_level=0, limits=limits())


def _fulfil(promise: Future[T], work: Callable[[], T]) -> None:
    try:
        promise.set_result(work())
    except BaseException as error:  # a panic in Rust is no Exception
        promise.set_exception(error)
