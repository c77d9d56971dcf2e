"""How often Python looks for garbage that refers to itself, while everybody waits.

What a call needs are some hundred objects, and nearly all of them go with it by themselves. By default a process that
has hundreds of live streams looks through all of them a few times a second, 15 to 70 ms each (docs/perf-log.md).
"""

from __future__ import annotations

import gc

WITH_GRPC = 1_000  # objects more than there were: gRPC leaves three or four of each call behind, in a cycle
WITHOUT_GRPC = 10_000  # code of ours leaves none, and there are more objects when more calls are live
_MIDDLE = 10  # looks at the youngest, from one at what survived them to the next
_FULL = 1_000  # of those, from one at everything to the next: minutes


def settle(young: int) -> None:
    """Nothing of what is there now is ever looked at again; of what is made from now on, whenever there are so many
    objects more, and at all of it rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, _MIDDLE, _FULL)
