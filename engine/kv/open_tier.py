"""Opens the shared tier's store: the one place where the engine needs more of the cache package than its protocols."""

from __future__ import annotations

from collections.abc import Callable

from cache.api import BlockLayout, BlockSettings, BlockStore
from engine.api import TierReport
from engine.errors import Unsupported


def open_tier(settings: BlockSettings, layout: BlockLayout) -> tuple[BlockStore, Callable[[], TierReport]]:
    """The store, which connects later, and its counts. Raises Unsupported."""
    try:
        from cache.open.blocks import open_blocks
        from cache.open.counters import Counters
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"a shared tier of keys and values needs {error.name}: install Whippet with its dependencies"
        ) from None
    counters = Counters()
    try:
        store = open_blocks(settings, layout, counters)
    except ValueError as error:  # InvalidKeyFile is one
        raise Unsupported(str(error)) from None

    def report() -> TierReport:
        return TierReport(
            counts=tuple((*event, count) for event, count in counters.counts().items()),
            times=tuple((event, times.buckets, times.total) for event, times in counters.times().items()),
            breakers=tuple((name, state.value) for name, state in store.states.items()),
        )

    return store, report
