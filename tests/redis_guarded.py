"""Redis as careful operators run it: TLS with certificates on both sides, users with few rights, and sentinels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.redis_server import RedisServer, free_port
from cache.api import Address, Login, RedisSettings
from cache.kv_blocks.resp import RespConnection, RespError
from cache.store.redis_hello import GREETING
from cache.store.redis_tls import TlsFiles
from tests.service.certificates import HERE, Authority, write_pair

NAME = "Answers"  # of the master that sentinels watch; names have two cases
PASSWORD, ROOT = "of whippet", "of-the-operator"
RULE = re.compile(r"^user whippet .*?PASSWORD (.*)$", re.MULTILINE)
OPERATIONS = Path(__file__).resolve().parents[1] / "docs" / "operations" / "caches.md"
PATIENCE = 60.0  # seconds


def rules() -> str:
    """What the documentation lets our user do."""
    found = RULE.search(OPERATIONS.read_text().replace("\\\n", " "))
    assert found is not None
    return " ".join(found[1].split())


def certify(folder: Path) -> None:
    """An authority, and what it has signed: the servers' certificate, and ours."""
    authority = Authority("ca")
    (folder / "ca.pem").write_bytes(authority.pem)
    for who in ("redis", "client"):
        write_pair(folder, who, authority.sign(*HERE))


def tls_flags(folder: Path, port: int, clients: str = "yes") -> tuple[str, ...]:
    """Of a server that speaks TLS alone."""
    files = {"cert": "redis.pem", "key": "redis.key", "ca-cert": "ca.pem"}
    named = [word for kind, file in files.items() for word in (f"--tls-{kind}-file", str(folder / file))]
    return ("--port", "0", "--tls-port", str(port), "--tls-replication", "yes", "--tls-auth-clients", clients, *named)


def users(folder: Path, *lines: str) -> Path:
    """An ACL file: nobody without a name, an operator who may do everything, and the users given."""
    path = folder / "users.acl"
    path.write_text("\n".join(["user default off", f"user root on >{ROOT} ~* &* +@all", *lines, ""]))
    return path


def ours(rules: str) -> str:
    """A line of an ACL file."""
    return f"user whippet on >{PASSWORD.replace(' ', '_')} {rules}"


def flat(reply: object) -> list[object]:
    """A list with the elements of lists within it; one element where it is none."""
    return [inner for each in reply for inner in flat(each)] if isinstance(reply, list) else [reply]


class GuardedRedis:
    """A master, a replica and three sentinels. Every port wants a certificate, a name and a password."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        certify(folder)
        (folder / "password").write_text(PASSWORD.replace(" ", "_") + "\n")
        (folder / "watching").write_text("of-watcher\n")
        acl = users(folder, ours(rules()))
        self.servers: list[RedisServer] = []
        for _ in range(2):
            port = free_port()
            follow = ("--replicaof", "127.0.0.1", str(self.servers[0].port)) if self.servers else ()
            known = (
                "--aclfile",
                str(acl),
                "--masteruser",
                "root",
                "--masterauth",
                ROOT,
                "--repl-diskless-sync-delay",
                "0",
            )
            self.servers.append(RedisServer(folder, port, (*tls_flags(folder, port), *known, *follow)))
        self.sentinels = [RedisServer(folder, port, self._sentinel(port)) for port in (free_port() for _ in range(3))]

    def start(self) -> None:
        """Returns once a failover would be possible."""
        for server in self.servers:
            server.start()
        waited(self._followed)  # sentinels look for replicas when they begin, and again ten seconds later
        for sentinel in self.sentinels:
            sentinel.start()
        self.whole()

    def stop(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.stop()

    def settings(self, **changes: Any) -> RedisSettings:
        """Ours."""
        asked = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        files = {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key", "password_file": "password"}
        given: dict[str, Any] = {name: self.folder / file for name, file in files.items()}
        given |= {"url": f"rediss://whippet@{NAME}", "sentinels": f"watcher@{asked}"}
        return RedisSettings(**{**given, "sentinel_password_file": self.folder / "watching", **changes})

    def root(self, port: int, *words: str) -> list[object]:
        """The reply to an operator's command, without the nesting of its lists."""
        with closing(self.root_link(port)) as link:
            sent = [word.encode() for word in words]
            return flat(link.command(*sent, deadline=self.soon(), shape=GREETING))

    def root_link(self, port: int) -> RespConnection:
        """An operator's connection."""
        link = RespConnection(Address("127.0.0.1", port), TlsFiles(self.settings()).context(), self.soon())
        link.log_in(Login("root", ROOT), self.soon())
        return link

    @staticmethod
    def soon() -> float:
        """A deadline."""
        return time.monotonic() + PATIENCE

    def master(self) -> RedisServer:
        """The one that says so itself."""
        return self.masters()[0]

    def masters(self) -> list[RedisServer]:
        """Of the servers that run; there may be two for a moment, or none."""
        return [one for one in self.servers if one.process and self.root(one.port, "ROLE")[0] == b"master"]

    def fail_over(self) -> bool:
        """Whether a sentinel begins to, as an operator asks; not while it takes the replica for lost."""
        with closing(self.root_link(self.sentinels[0].port)) as link, suppress(RespError):
            return link.command(b"SENTINEL", b"FAILOVER", NAME.encode(), deadline=self.soon()) == b"OK"
        return False

    def whole(self) -> None:
        """Returns once a failover would be possible (again)."""
        for sentinel in self.sentinels:
            waited(lambda at=sentinel: self._ready(at.port))  # type: ignore[misc]

    def _followed(self) -> bool:
        role = self.root(self.servers[0].port, "ROLE")
        return str(self.servers[1].port).encode() in role

    def _ready(self, port: int) -> bool:
        """Whether a sentinel knows both others and the replica."""
        found = self.root(port, "SENTINEL", "MASTER", NAME)
        says = dict(zip(found[::2], found[1::2], strict=True))
        return (says[b"num-other-sentinels"], says[b"num-slaves"]) == (b"2", b"1") and says[b"flags"] == b"master"

    def _sentinel(self, port: int) -> tuple[str, ...]:
        """The arguments of a sentinel. It writes to its file."""
        tls = tls_flags(self.folder, port)
        lines = [
            *(" ".join(pair).removeprefix("--") for pair in zip(tls[::2], tls[1::2], strict=True)),
            f"sentinel monitor {NAME} 127.0.0.1 {self.servers[0].port} 2",
            f"sentinel auth-user {NAME} root",
            f"sentinel auth-pass {NAME} {ROOT}",
            f"sentinel down-after-milliseconds {NAME} 500",
            f"sentinel failover-timeout {NAME} 3000",
            "sentinel sentinel-user root",
            f"sentinel sentinel-pass {ROOT}",
            f"user root on >{ROOT} ~* &* +@all",
            "user watcher on >of-watcher -@all +sentinel|get-master-addr-by-name",
            "user default off",
        ]
        path = self.folder / f"sentinel-{port}.conf"
        path.write_text("\n".join(lines) + "\n")
        return (str(path), "--sentinel")


def waited(found: Callable[[], object]) -> None:
    """Returns once it has come about."""
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.02)


@contextmanager
def guarded_redis(folder: Path) -> Iterator[GuardedRedis]:
    group = GuardedRedis(folder)
    try:
        group.start()
        yield group
    finally:
        group.stop()
