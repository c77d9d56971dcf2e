"""Collects all violations of a request, to be reported at once."""

from __future__ import annotations

from collections.abc import Sequence

from service.core.errors import InvalidRequest, Violation

_MAX_OF_ONE_LIST = 8  # a giant list of wrong ids is not repeated to its sender
_MAX_DURATION = 315_576_000_000  # seconds: ten thousand years, the most that protobuf's Duration takes


def too_long(tokens: int, max_context: int) -> str:
    return f"has at least {tokens} tokens; prompt and answer together have room for {max_context}"


class Violations:
    def __init__(self) -> None:
        self._found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self._found.append(Violation(field, description))

    def raise_any(self) -> None:
        if self._found:
            raise InvalidRequest(tuple(self._found))

    def number(self, field: str, value: float, low: float, high: float | None, *, above: bool = False) -> None:
        """Checks that `value` lies from `low` (or above it, where `above`) to `high`. NaN lies nowhere."""
        if not (value > low if above else value >= low) or (high is not None and not value <= high):
            start = f"above {low:g}" if above else f"at least {low:g}"
            self.add(field, f"must be {start}" + ("" if high is None else f" and at most {high:g}"))

    def token_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> bool:
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return True
        wrong = [index for index, token_id in enumerate(ids) if not 0 <= token_id < vocab_size]
        for index in wrong[:_MAX_OF_ONE_LIST]:
            self.add(f"{field}[{index}]", f"must be at least 0 and below {vocab_size}")
        if len(wrong) > _MAX_OF_ONE_LIST:
            self.add(field, f"{len(wrong)} ids are outside the vocabulary")
        return False

    def duration(self, field: str, whole: int, nanos: int, high: float | None, *, above: bool = False) -> float:
        """Seconds, given as whole ones and billionths of one sign, from 0 (or above it, where `above`) to `high`."""
        if whole * nanos < 0 or abs(whole) > _MAX_DURATION or abs(nanos) > 999_999_999:
            self.add(field, "is no valid duration")
            return 0.0
        seconds = whole + nanos / 1e9
        self.number(field, seconds, 0, high, above=above)
        return seconds
