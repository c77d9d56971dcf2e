"""Keeps the last failed calls for the console. Never any text of a prompt or an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from service.observability.record import RequestRecord

_KEPT = 40
_NO_ERRORS = ("OK", "CANCELLED")


class RecentErrors:
    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_KEPT)

    def __call__(self, record: RequestRecord) -> None:
        if record.code not in _NO_ERRORS:
            self._records.append(record)

    def __iter__(self) -> Iterator[RequestRecord]:
        return reversed(self._records)
