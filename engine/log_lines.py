"""Formats log lines of front and engine process: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """Keys: time (RFC 3339), level, process, logger, message; `trace` where there is an exception; and
    `extra={"fields": …}`. All ASCII, so that no text can break a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def use_json(process: str) -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines(process))
    logging.captureWarnings(True)
