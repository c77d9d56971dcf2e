"""Splits off reasoning between two markers at an answer's beginning. Line breaks beside the markers belong to them: one
after the first, one before the second, two after it."""

from __future__ import annotations

from service.core.parsing.answer import held_back

_BLANKS = 64  # characters before the first marker; with more it is no beginning


class ReasoningSplitter:
    """`inside`: the prompt ends within reasoning, without a first marker."""

    def __init__(self, begin: str, end: str, inside: bool) -> None:
        self._begin = begin
        self._end = end
        self._ends = (f"\n{end}", end)
        self._read = self._inside if inside else self._before
        self._held = ""
        self._skip = 1  # line breaks that may still belong to the marker before

    def feed(self, text: str) -> tuple[str, str]:
        if self._read == self._after:
            return self._after(text)
        held, self._held = self._held, ""
        return self._read(held + text)

    def end(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held, "") if self._read == self._inside else ("", held)

    def _before(self, text: str) -> tuple[str, str]:
        stripped = text.lstrip()
        if stripped.startswith(self._begin):
            self._read = self._inside
            return self._inside(stripped[len(self._begin) :])
        if self._begin.startswith(stripped) and len(text) - len(stripped) <= _BLANKS:
            self._held = text
            return "", ""
        self._read, self._skip = self._after, 0
        return "", text

    def _inside(self, text: str) -> tuple[str, str]:
        text = self._skipped(text)
        at = text.find(self._end)
        if at < 0:
            kept = len(text) - held_back(text, self._ends)
            self._held = text[kept:]
            return text[:kept], ""
        rest = text[at + len(self._end) :]
        self._read, self._skip = self._after, 2
        return text[:at].removesuffix("\n"), self._after(rest)[1]

    def _after(self, text: str) -> tuple[str, str]:
        return "", self._skipped(text) if self._skip else text

    def _skipped(self, text: str) -> str:
        while self._skip and text:
            if text[0] != "\n":
                self._skip = 0
                break
            text = text[1:]
            self._skip -= 1
        return text
