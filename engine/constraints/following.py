"""Executes commands on the grammars and sequences of one process, by llguidance."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from engine.constraints.bounds import OutOfBounds
from engine.constraints.budget import KEPT, Budget
from engine.constraints.grammars import Grammars
from engine.constraints.messages import (
    Advance,
    Advanced,
    Answer,
    Begin,
    Command,
    End,
    Failed,
    LookAhead,
    Masked,
    MaskedAhead,
    SequenceEnded,
    TakeBack,
)
from engine.constraints.reasons import ConstraintReason

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_FORCED: Final = 256  # forced tokens that are appended at once


@dataclass(slots=True, eq=False)
class _Grammar:
    """Shares a matcher's memory among the matchers of all its sequences, which are copies. `bytes` counts it once."""

    matcher: LLMatcher
    bytes: int = 0
    keys: set[int] = field(default_factory=set)  # sequences that follow it


@dataclass(slots=True, eq=False)
class _Sequence:
    matcher: LLMatcher
    grammar: str
    stops: tuple[int, ...]
    length: int  # tokens of the answer


class Following:
    """Counts memory after each command. Drops a grammar that exceeds `of_constraint`, with its sequences. Where all
    together exceed `of_caller`, drops those without a sequence, least recently used first, then the largest."""

    def __init__(
        self, grammars: Grammars, budget: Budget, used: Callable[[], int], give_back: Callable[[], None]
    ) -> None:
        self._grammars = grammars
        self._budget = budget
        self._heap = used
        self._give_back = give_back
        self._kept: OrderedDict[str, _Grammar] = OrderedDict()  # least recently used first
        self._live: dict[int, _Sequence] = {}
        self._counted = "", 0  # the grammar counted last, and the heap's bytes then

    @property
    def used(self) -> int:
        return sum(one.bytes for one in self._kept.values())

    def obey(self, command: Command) -> Iterator[Answer]:
        before = self._heap()
        self._correct(before)
        grammar = command.grammar if isinstance(command, Begin) else None
        if (sequence := self._live.get(command.key)) is not None:
            grammar = grammar or sequence.grammar
        last: Answer | None = None
        for answer in self._do(command):
            if isinstance(answer, Advanced):
                yield answer
            else:
                last = answer
        if grammar is not None and grammar in self._kept:
            after = self._heap()
            self._kept[grammar].bytes = max(0, self._kept[grammar].bytes + after - before)
            self._counted = grammar, after
        yield from self._bounded(command.key, last or SequenceEnded(command.key, 0))

    def _correct(self, now: int) -> None:
        """Subtracts what was freed since the last count: the answer itself."""
        grammar, after = self._counted
        if now < after and (found := self._kept.get(grammar)) is not None:
            found.bytes = max(0, found.bytes - (after - now))

    def _do(self, command: Command) -> Iterator[Answer]:
        if isinstance(command, Begin):
            yield self._begin(command)
            return
        sequence = self._live.get(command.key)
        if sequence is None:
            yield SequenceEnded(command.key, 0)
            return
        match command:
            case Advance():
                yield from self._advance(command, sequence)
            case LookAhead(draft=draft):
                masks = tuple(self._mask_behind(sequence, draft[:size]) for size in range(1, 1 + len(draft)))
                yield MaskedAhead(command.key, sequence.length, draft, masks, 0)
            case TakeBack(count=count):
                sequence.matcher.rollback(count)
                sequence.length -= count
                yield self._masked(command.key, sequence)
            case End():
                self._forget(command.key)
                yield SequenceEnded(command.key, 0)

    def _begin(self, command: Begin) -> Answer:
        self._forget(command.key)
        try:
            compiled = self._compiled(command.grammar)
        except OutOfBounds:
            return self._failed(command.key, ConstraintReason.UNMET)
        if compiled.matcher.is_error():
            return self._failed(command.key, ConstraintReason.UNMET)
        matcher = compiled.matcher.deep_copy()
        if command.ids and not matcher.consume_tokens(list(command.ids)):
            return self._failed(command.key, ConstraintReason.UNMET)
        self._live[command.key] = _Sequence(matcher, command.grammar, command.stops, len(command.ids))
        compiled.keys.add(command.key)
        return self._masked(command.key, self._live[command.key])

    def _compiled(self, grammar: str) -> _Grammar:
        found = self._kept.get(grammar)
        if found is None:
            found = self._kept[grammar] = _Grammar(self._grammars.matcher(grammar))
        self._kept.move_to_end(grammar)
        return found

    def _advance(self, command: Advance, sequence: _Sequence) -> Iterator[Answer]:
        matcher = sequence.matcher
        if not matcher.consume_tokens(list(command.ids)):
            yield Advanced(command.key, False, (), False)
            yield self._failed(command.key, ConstraintReason.UNMET)
            return
        forced: tuple[int, ...] = ()
        if command.force and not matcher.is_stopped():
            known = matcher.compute_ff_tokens()[:MOST_FORCED]
            forced = tuple(itertools.takewhile(lambda token: token not in sequence.stops, known))
            if forced:
                matcher.consume_tokens(list(forced))
        sequence.length += len(command.ids) + len(forced)
        yield Advanced(command.key, True, forced, matcher.is_stopped() and not matcher.is_error())
        yield self._masked(command.key, sequence)

    def _masked(self, key: int, sequence: _Sequence) -> Answer:
        mask = self._mask(sequence)
        matcher = sequence.matcher
        whole = not matcher.is_error() and matcher.is_accepting()
        return Masked(key, sequence.length, bytes(mask), whole, 0)

    def _mask(self, sequence: _Sequence) -> bytearray:
        """Allows stop tokens only where the grammar may end."""
        matcher = sequence.matcher
        bits = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            return bytearray(len(bits))
        end = self._grammars.vocabulary()[1]
        ends = bits[end // 8] >> end % 8 & 1
        bits[end // 8] &= ~(1 << end % 8)
        for token in sequence.stops:
            if token // 8 < len(bits):
                bits[token // 8] = bits[token // 8] & ~(1 << token % 8) | ends << token % 8
        return bits

    def _mask_behind(self, sequence: _Sequence, draft: tuple[int, ...]) -> bytes:
        """The mask after a draft; empty where the grammar forbids the draft or ends with it. Covers forced tokens too,
        because the library's mask allows only the forced one."""
        matcher, consumed = sequence.matcher, 0
        try:
            for token in draft:
                if token in sequence.stops or not matcher.try_consume_tokens([token]):
                    return b""
                consumed += 1
                if matcher.is_stopped():
                    return b""
            return bytes(self._mask(sequence))
        finally:
            if consumed:
                matcher.rollback(consumed)

    def _bounded(self, key: int, answer: Answer) -> Iterator[Answer]:
        """Yields a failure for each other sequence that a bound ends, then the answer, or a failure in its place."""
        ended = self._over()
        used = self.used
        for other in ended - {key}:
            yield Failed(other, ConstraintReason.MEMORY, used, False)
        if key in ended:
            yield Failed(key, ConstraintReason.MEMORY, used, True)
            return
        match answer:
            case Masked(length=length, mask=mask, whole=whole):
                yield Masked(key, length, mask, whole, used)
            case MaskedAhead(length=length, draft=draft, masks=masks):
                yield MaskedAhead(key, length, draft, masks, used)
            case Failed(reason=reason):
                yield Failed(key, reason, used, True)
            case _:
                yield SequenceEnded(key, used)

    def _over(self) -> set[int]:
        ended: set[int] = set()
        dropped = False
        for text, one in [*self._kept.items()]:
            if one.bytes > self._budget.of_constraint:
                ended |= self._drop(text)
                dropped = True
        idle = [text for text, one in self._kept.items() if not one.keys]
        while self._kept and (self.used > self._budget.of_caller or len(idle) > KEPT):
            largest = max(self._kept, key=lambda text: self._kept[text].bytes)
            ended |= self._drop(idle.pop(0) if idle else largest)
            dropped = True
        if dropped:
            self._give_back()
        return ended

    def _drop(self, grammar: str) -> set[int]:
        keys = self._kept.pop(grammar).keys
        for key in keys:
            self._live.pop(key, None)
        return keys

    def _forget(self, key: int) -> None:
        sequence = self._live.pop(key, None)
        if sequence is not None and (grammar := self._kept.get(sequence.grammar)) is not None:
            grammar.keys.discard(key)

    def _failed(self, key: int, reason: ConstraintReason) -> Answer:
        self._forget(key)
        return Failed(key, reason, 0, True)
