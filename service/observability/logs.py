"""Writes the log on stderr. Nothing that a caller sent reaches it.

gRPC logs metadata that is no UTF-8 as it came, the token included. So of libraries that see callers' bytes only the
kind of event is logged, once in a while, with its count.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable

from engine.log_lines import JsonLines, use_json
from engine.settings import LogFormat

_EVERY = 10.0  # seconds between two lines of one library
_LIBRARIES = ("grpc", "asyncio", "python")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up(level: str, form: LogFormat, process: str = "front") -> None:
    """Configures logging of the whole process; lines of JSON name it."""
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format=_FORMAT)
    for handler in logging.getLogger().handlers:
        handler.addFilter(Reticence())
    if form == "json":
        use_json(process)
    sys.unraisablehook = _unraisable


def last_line(text: str) -> None:
    """Prints why the server cannot go on, even before the log's format is known."""
    if any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers):
        logging.getLogger("whippet").critical("%s", text)
    else:
        sys.stderr.write(f"whippet: {text}\n")


class Reticence:
    """Makes one short line out of many that may hold what a caller sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}  # when a library's line was let through
        self._kept_back: dict[str, int] = {}  # since then

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record, changed if it is a library's, is written."""
        library = record.name.partition(".")[0]
        if library not in _LIBRARIES or (library == "asyncio" and record.levelno < logging.WARNING):
            return True
        kind, where = _kind(record)
        if kind == "ExecuteBatchError":  # a caller went away at the very moment that its answer was sent
            return False
        now = self._clock()
        if now - self._last.get(library, -_EVERY) < _EVERY:
            self._kept_back[library] = self._kept_back.get(library, 0) + 1
            return False
        self._last[library] = now
        record.msg = "%s; %d more since the last such line%s"
        record.args = (kind, self._kept_back.pop(library, 0), where if library != "grpc" else "")
        record.exc_info = record.exc_text = record.stack_info = None
        return True


def _kind(record: logging.LogRecord) -> tuple[str, str]:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        known = "ExecuteBatchError" in str(record.msg)
        return "ExecuteBatchError" if known else f"a line of {record.module}, {record.funcName}", ""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return type(error).__name__, f"\n{frames}"


def _unraisable(what: sys.UnraisableHookArgs) -> None:
    info = None if what.exc_value is None else (what.exc_type, what.exc_value, what.exc_traceback)
    logging.getLogger("python").error("unraisable", exc_info=info)
