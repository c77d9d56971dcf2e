"""The last errors."""

from __future__ import annotations

from service.observability.recent import RecentErrors
from service.observability.record import Observers


def test_the_newest_errors_are_kept_and_nothing_else() -> None:
    recent = RecentErrors()
    observers = Observers([recent])
    for number in range(100):
        for code in ("OK", "CANCELLED", "INVALID_ARGUMENT"):
            record = observers.begin(f"method {number}", ())
            observers.end(record, code)
    assert [record.method for record in recent] == [f"method {number}" for number in range(99, 59, -1)]
    assert {record.code for record in recent} == {"INVALID_ARGUMENT"}
