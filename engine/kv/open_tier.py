"""Opens the shared tier's store: the one place where the engine needs more of the cache package than its protocols."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cache.api import BlockLayout, BlockStore
from engine.api import TierReport
from engine.errors import Unsupported
from engine.settings import PrefixSettings


def open_store(settings: PrefixSettings, layout: BlockLayout) -> BlockStore:
    """Raises Unsupported, one line."""
    return open_told(settings, layout)[0]


def open_told(settings: PrefixSettings, layout: BlockLayout) -> tuple[BlockStore, Callable[[], TierReport]]:
    """The store, and what says what it has done so far. Raises Unsupported, one line."""
    try:
        from cache.api import BlockSettings, RedisSettings
        from cache.open.blocks import open_blocks
        from cache.open.counters import Counters
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"a shared tier of keys and values needs {error.name}: install whippet-serve[redis]"
        ) from None
    try:
        redis = RedisSettings(
            url=settings.redis_url or "",
            password_file=_path(settings.redis_password_file),
            ca_file=_path(settings.redis_ca_file),
        )
        blocks = BlockSettings(
            redis=redis,
            key_file=_path(settings.key_file),
            ttl=settings.ttl,
            chunk_bytes=settings.chunk_bytes,
            min_tokens=settings.min_tokens,
        )
        counters = Counters()
        store = open_blocks(blocks, layout, counters)
    except ValueError as error:  # InvalidKeyFile is one
        raise Unsupported(str(error)) from None

    def report() -> TierReport:
        return TierReport(
            counts=tuple((*event, count) for event, count in counters.counts().items()),
            times=tuple((event, times.buckets, times.total) for event, times in counters.times().items()),
            breakers=tuple((name, state.value) for name, state in store.states.items()),
        )

    return store, report


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
