"""Checks on a new connection whether a Redis can keep entries.

`HELLO 2` needs no right of an ACL user, and gives name and value in turns: mode (standalone, sentinel, cluster), role.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

from cache.api import Address
from cache.store.redis_replies import ReplyBounds

log = logging.getLogger(__name__)

GREETING = ReplyBounds(elements=1024, size=1 << 16)  # of the replies to HELLO, which lists modules, and of a sentinel
AGAIN = 3600.0  # seconds until the same is logged again
CLUSTER = (
    "redis-url names a Redis Cluster, which is not supported: nothing is cached there. "
    "Name a single Redis, or use sentinels"
)
SENTINEL = (
    "redis-url names a sentinel: nothing is cached there. "
    "Name sentinels in redis-sentinels, and their master in redis-url"
)
OLD = "redis-url names what does not know HELLO: nothing is cached there. Redis 7 is needed"
STRANGER = "Redis does not take our user name and password: nothing is cached there"
FORBIDDEN = "Redis forbids our user a command or a key that is needed: see the rules in the documentation, under caches"


class UnfitError(Exception):
    """The server answers but can keep no entries."""


class NotMasterError(Exception):
    pass


def check_hello(reply: object, sentinels: bool) -> None:
    """Raises UnfitError and NotMasterError. `sentinels`: whether they named the server."""
    words = [word for word in reply if isinstance(word, bytes)] if isinstance(reply, list) else []
    says = dict(list(itertools.pairwise(words))[::-1])  # the first of a name counts: modules come last
    if says.get(b"mode") == b"cluster":
        raise UnfitError(CLUSTER)
    if says.get(b"mode") == b"sentinel":
        raise UnfitError(SENTINEL)
    if sentinels and says.get(b"role") != b"master":
        raise NotMasterError


def master_address(reply: object) -> Address | None:
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit() and int(port) < 65_536:
            return Address(host.decode("ascii", "replace"), int(port))
    return None


class Complaints:
    """Logs each permanent fault once an hour. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at: dict[str, float] = {}

    def about(self, sentence: str) -> None:
        now = self._clock()
        with self._lock:
            if now - self._logged_at.get(sentence, -AGAIN) < AGAIN:
                return
            self._logged_at[sentence] = now
        log.error("cache: %s", sentence)
