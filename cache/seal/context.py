"""Holds what all caches of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from cache.api import Counter, Store
from cache.seal.envelope import Envelope
from cache.seal.partition import Epochs, Partitions


@dataclass(frozen=True, slots=True)
class CacheContext:
    store: Store
    partitions: Partitions
    epochs: Epochs
    envelope: Envelope
    counter: Counter
