"""Names partitions and entries, and keeps the epochs that purge a tenant at once.

partition = HMAC(tenant key, weights ‖ tokenizer and template ‖ cache schema ‖ tenant epoch), where the tenant key is
itself HMAC(names secret, tenant). An epoch is a random number in the store: replacing or losing it makes all of a
tenant's entries unreachable.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256

from cache.api import CacheKey, EntryKind, ModelIdentity, Parameter, Store, StoreFault
from cache.seal.keyring import Keyring

SCHEMA = 1
EPOCH_BYTES = 16
EPOCH_TTL = 90 * 86_400.0  # never renewed: a tenant gets a new epoch after 90 days at the latest
KNOWN_EPOCHS = 4096
RECENT = 1.0  # seconds until an epoch that no lookup has confirmed is read again
ALL, PREFIXES = b"epoch", b"prefix epoch"  # purposes of an epoch: all entries of a tenant, its prefixes alone


def encode(value: Parameter | Sequence[tuple[str, Parameter]]) -> bytes:
    """Encodes injectively: type, length, content. Stored names depend on it."""
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            body = str(value).encode()
            return b"i" + struct.pack("<I", len(body)) + body
        case float():
            return b"d" + struct.pack("<d", value)
        case str():
            body = value.encode("utf-8", "surrogatepass")
            return b"s" + struct.pack("<I", len(body)) + body
        case bytes():
            return b"b" + struct.pack("<I", len(value)) + value
        case _:
            parts = [encode(part) for part in value]
            return b"l" + struct.pack("<I", len(parts)) + b"".join(parts)


def encode_ids(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA-256 over parts with their lengths, so that moving a border changes the digest."""
    return hmac.digest(key, b"".join(struct.pack("<Q", len(part)) + part for part in parts), sha256)


class Partitions:
    def __init__(self, keyring: Keyring, identity: ModelIdentity) -> None:
        self._names = keyring.names
        self._model = (identity.weights.encode(), identity.tokenizer.encode(), identity.adapter.encode())
        # Every request asks for all of them, and most for the same ones as the last.
        self._tenant_key = lru_cache(KNOWN_EPOCHS)(self._derive_tenant_key)
        self.of = lru_cache(KNOWN_EPOCHS)(self._of)
        self.epoch_key = lru_cache(KNOWN_EPOCHS)(self._epoch_key)

    def _epoch_key(self, tenant: str, purpose: bytes = ALL) -> CacheKey:
        """The same for all models, so that one purge covers all."""
        name = mac(self._tenant_key(tenant), purpose).hex()
        return CacheKey(EntryKind.EPOCH, name[:32], name[32:])

    def digest(self, tenant: str, purpose: bytes, *parts: bytes) -> str:
        return mac(self._tenant_key(tenant), purpose, *parts).hex()

    def _of(self, tenant: str, epoch: bytes) -> str:
        return mac(self._tenant_key(tenant), b"partition", *self._model, str(SCHEMA).encode(), epoch).hex()[:32]

    def _derive_tenant_key(self, tenant: str) -> bytes:
        return mac(self._names, b"tenant", tenant.encode())


def epoch_of(value: bytes | None) -> bytes | None:
    return value if value is not None and len(value) == EPOCH_BYTES else None


class Epochs:
    """A lookup reads a tenant's epoch beside its entry, and corrects it here by `learn`."""

    def __init__(
        self,
        store: Store,
        partitions: Partitions,
        purpose: bytes = ALL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._purpose = purpose
        self._clock = clock
        self._known: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # tenant → epoch, when it was read

    def known(self, tenant: str) -> bytes | None:
        """As last read; may be outdated."""
        known = self._known.get(tenant)
        return None if known is None else known[0]

    def fresh(self, tenant: str) -> bytes | None:
        """As last read, if at most a second old."""
        known = self._known.get(tenant)
        return known[0] if known is not None and self._clock() - known[1] < RECENT else None

    def learn(self, tenant: str, epoch: bytes) -> None:
        self._known[tenant] = epoch, self._clock()
        self._known.move_to_end(tenant)
        if len(self._known) > KNOWN_EPOCHS:
            self._known.popitem(last=False)

    async def current(self, tenant: str, within: float | None = None) -> bytes:
        """Begins an epoch where the store has none. Raises StoreFault."""
        fresh = secrets.token_bytes(EPOCH_BYTES)
        key = self._partitions.epoch_key(tenant, self._purpose)
        standing = await self._store.set_if_absent(key, fresh, EPOCH_TTL, within)
        epoch = epoch_of(standing)
        if epoch is None:  # damaged: the first to replace it decides the next
            await self._store.swap(key, standing, fresh, EPOCH_TTL)
            epoch = epoch_of(await self._store.set_if_absent(key, fresh, EPOCH_TTL, within))
        if epoch is None:
            raise StoreFault("not an epoch")
        self.learn(tenant, epoch)
        return epoch

    async def recent(self, tenant: str, within: float | None = None) -> bytes:
        """At most a second old; else, where the store does not answer, as last read. Raises StoreFault where it was
        never read."""
        fresh = self.fresh(tenant)
        if fresh is not None:
            return fresh
        try:
            return await self.current(tenant, within)
        except StoreFault:
            known = self.known(tenant)
            if known is None:
                raise
            self.learn(tenant, known)  # so that the store is left alone for a while
            return known

    async def bump(self, tenant: str) -> None:
        """Purges a tenant on every replica at once, or raises StoreFault."""
        fresh = secrets.token_bytes(EPOCH_BYTES)
        await self._store.set(self._partitions.epoch_key(tenant, self._purpose), fresh, EPOCH_TTL)
        self.learn(tenant, fresh)
