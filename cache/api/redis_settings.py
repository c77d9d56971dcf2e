"""Configures access to Redis: address, login, and how long a request waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import SplitResult, unquote, urlsplit

LOOKUP_BUDGET = 0.020  # seconds
LARGEST = (1 << 20) + 1024  # bytes of a stored value, with the overhead of its seal
REDIS_PORT, SENTINEL_PORT = 6379, 26379


def positive(**values: float) -> None:
    """Raises ValueError with the name of the first that is not."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be greater than 0, not {value}")


class Address(NamedTuple):
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Login:
    """AUTH is not sent where both are empty."""

    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    failures: int = 3  # within `window`, to open
    window: float = 1.0  # seconds
    cooldown: float = 1.0  # seconds open, then one probe

    def __post_init__(self) -> None:
        positive(failures=self.failures, window=self.window, cooldown=self.cooldown)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Keeps the case of the host, which may be a master's name."""

    tls: bool
    address: Address
    login: Login
    database: int

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses `redis://[user[:password]@]host[:port][/database]`. A ValueError repeats nothing of it, which may hold
        a password."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss"):
            raise ValueError("redis-url must begin with redis:// or rediss://")
        if parts.query or parts.fragment:
            raise ValueError("redis-url takes nothing behind the database's number")
        database = parts.path.strip("/")
        if database and not (database.isascii() and database.isdigit()):
            raise ValueError("redis-url must end in the number of a database, if in anything")
        login = Login(unquote(parts.username or ""), unquote(parts.password or ""))
        address = Address(_host(parts) or "localhost", _port(parts) or REDIS_PORT)
        return cls(parts.scheme == "rediss", address, login, int(database or 0))


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        raise ValueError("redis-url or redis-sentinels: what stands behind a host is no port") from None


def _host(parts: SplitResult) -> str:
    authority = parts.netloc.rpartition("@")[2]
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Sentinels are given as `[user@]host[:port],host[:port],…`."""

    addresses: tuple[Address, ...]
    user: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        user, _, listed = text.rpartition("@")
        found = []
        for one in listed.split(","):
            parts = urlsplit(f"//{one.strip()}")
            if not _host(parts) or parts.path or parts.query:
                raise ValueError("redis-sentinels are host:port, with commas between them")
            found.append(Address(_host(parts), _port(parts) or SENTINEL_PORT))
        return cls(tuple(found), user)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Files are read for each new connection, so that they can be replaced."""

    url: str  # as `RedisUrl` has it; with sentinels, its host is the name of the master that they watch
    password_file: Path | None = None  # replaces a password in the URL
    ca_file: Path | None = None  # for rediss://; None: the system's
    cert_file: Path | None = None  # for rediss://: who we are, with `key_file`
    key_file: Path | None = None
    sentinels: str | None = None  # as `Sentinels` has them; by TLS where the URL is rediss://
    sentinel_password_file: Path | None = None
    budget: float = LOOKUP_BUDGET  # seconds that a request waits for all its lookups, a prefix fetch for its first byte
    write_budget: float = 0.250  # seconds; writes are off the request's path
    admin_budget: float = 5.0  # seconds; scans and flushes
    connections: int = 16  # small values; as many again for bulk
    largest: int = LARGEST  # bytes of a sealed value, as it is sent
    queue_items: int = 1024
    queue_bytes: int = 64 * 2**20
    jitter: float = 0.1  # share of a TTL, both ways, so that entries do not expire together
    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    def __post_init__(self) -> None:
        positive(
            budget=self.budget,
            write_budget=self.write_budget,
            admin_budget=self.admin_budget,
            connections=self.connections,
            largest=self.largest,
            queue_items=self.queue_items,
            queue_bytes=self.queue_bytes,
        )
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), not {self.jitter}")
        tls = self.where.tls
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("redis-cert-file and redis-key-file go together")
        if self.cert_file is not None and not tls:
            raise ValueError("redis-cert-file needs a redis-url that begins with rediss://")
        if self.sentinel_servers is None and self.sentinel_password_file is not None:
            raise ValueError("redis-sentinel-password-file needs redis-sentinels")

    @property
    def where(self) -> RedisUrl:
        return RedisUrl.parse(self.url)

    @property
    def sentinel_servers(self) -> Sentinels | None:
        return None if self.sentinels is None else Sentinels.parse(self.sentinels)

    def login(self) -> Login:
        given = self.where.login
        return given if self.password_file is None else Login(given.user, _secret(self.password_file))

    def sentinel_login(self) -> Login:
        user = "" if self.sentinel_servers is None else self.sentinel_servers.user
        secret = self.sentinel_password_file
        return Login(user, "" if secret is None else _secret(secret))


def _secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except UnicodeDecodeError:
        raise OSError(f"{path} is no text") from None
