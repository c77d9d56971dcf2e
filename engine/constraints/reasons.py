"""Reasons why a sequence cannot go on within its constraint."""

from __future__ import annotations

import enum


class ConstraintReason(enum.StrEnum):
    """UNMET comes from the answer or the model, the others from what the constraint costs."""

    UNMET = "unmet"  # no token is left, or the grammar cannot be used with this model
    TIME = "time"  # a compile or a mask took more processor time than it may
    MEMORY = "memory"  # the grammar grew beyond a bound
    DIED = "died"  # the process that followed the grammar crashed
    REFUSED = "refused"  # the grammar was too costly twice before
