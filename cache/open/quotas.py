"""Opens the buckets of tenants' quotas that the front shares with other servers."""

from __future__ import annotations

from cache.api import CacheSettings, Counter, SharedBuckets
from cache.seal.keyring import Keyring
from cache.store.redis_buckets import RedisBuckets


def open_buckets(settings: CacheSettings, counter: Counter) -> SharedBuckets | None:
    """None without Redis. Does not wait for it. Raises InvalidKeyFile."""
    if settings.redis is None:
        return None
    names = b"" if settings.key_file is None else Keyring.read(settings.key_file).names
    return RedisBuckets(settings.redis, names, counter)
