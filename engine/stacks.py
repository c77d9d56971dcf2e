"""Samples the Python stacks of a process's threads a hundred times a second, by wall-clock time.

Text with one stack a line, outermost frame first, and its count, as flame graph tools and speedscope read it:
`thread;outer (path:7);inner (path:12) 41`. It names functions and lines, never values. A thread that holds the GIL in C
is sampled at the line that it called from, and less often than it should be.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import PurePath
from types import CodeType, FrameType

HERTZ = 100
MOST_BYTES = 4 * 1024 * 1024  # of the text; the rarest stacks are left out, and their number is given
_MOST_STACKS = 20_000  # kept apart; others are counted as one
_DEEPEST = 128  # frames of a stack, innermost ones first
_CUT = "(outer frames left out)"
_LEFT_OUT = "(stacks left out)"

_Stack = tuple[str | tuple[CodeType, int], ...]  # outermost first; code and line, after the thread's name


class StackSampler:
    """Samples for `seconds` at most, even if `finish` is never called."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._over = threading.Event()
        self._seen: Counter[_Stack] = Counter()
        self._text = ""
        self._thread = threading.Thread(target=self._run, name="stack sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def finish(self) -> str:
        self.stop()
        self._thread.join()
        return self._text

    def _run(self) -> None:
        end = time.monotonic() + self._seconds
        own = threading.get_ident()
        while not self._over.wait(1 / HERTZ) and time.monotonic() < end:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    self._add(names.get(ident, "unnamed thread"), frame)
        self._text = _text(self._seen)
        self._seen.clear()

    def _add(self, thread: str, frame: FrameType | None) -> None:
        frames: list[str | tuple[CodeType, int]] = []
        while frame is not None and len(frames) < _DEEPEST:
            frames.append((frame.f_code, frame.f_lineno or 0))  # none between two lines
            frame = frame.f_back
        if frame is not None:
            frames.append(_CUT)
        stack = (*reversed([*frames, thread]),)
        if stack not in self._seen and len(self._seen) >= _MOST_STACKS:
            stack = (_LEFT_OUT,)
        self._seen[stack] += 1


def _text(seen: Counter[_Stack]) -> str:
    names: dict[CodeType, tuple[str, str]] = {}
    lines: list[str] = []
    size, left_out = 0, 0
    for stack, count in seen.most_common():
        line = f"{';'.join(_frame(one, names) for one in stack)} {count}"
        size += len(line) + 1
        if size <= MOST_BYTES:
            lines.append(line)
        else:
            left_out += count
    if left_out:
        lines.append(f"{_LEFT_OUT} {left_out}")
    return "".join(f"{line}\n" for line in lines)


def _frame(one: str | tuple[CodeType, int], names: dict[CodeType, tuple[str, str]]) -> str:
    if isinstance(one, str):
        return _plain(one)
    code, line = one
    found = names.get(code)
    if found is None:
        found = names[code] = _plain(code.co_qualname), _plain(_short(code.co_filename))
    function, path = found
    return f"{function} ({path}:{line})"


def _short(path: str) -> str:
    """Cuts off the folders of this machine."""
    parents = [one for one in sys.path if one and path.startswith(one.rstrip("/") + "/")]
    if parents:
        return path[len(max(parents, key=len).rstrip("/")) + 1 :]
    return "/".join(PurePath(path).parts[-2:])


def _plain(text: str) -> str:
    """Replaces non-ASCII and the signs that separate frames, stacks and counts."""
    return "".join(sign if " " <= sign <= "~" and sign != ";" else "_" for sign in text)
