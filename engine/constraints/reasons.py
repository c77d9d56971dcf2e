"""Why a sequence cannot go on within its constraint."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """The first is the answer's fault, the others are the constraint's."""

    UNMET = "unmet"  # no token is left, or the grammar cannot be used with this model
    TIME = "time"  # a compile or a mask took more processor time than it may
    MEMORY = "memory"  # it grew beyond a bound
    DIED = "died"  # the process that followed it did not survive it
    REFUSED = "refused"  # it ended two processes before
