"""Connects ranks of other hosts to the first rank, and lets no stranger in.

The first rank listens until all ranks have come, and no longer. Both sides prove by HMAC-SHA256 over two random numbers
that they know the same secret, which is never sent, and that they run the same code. What follows is not encrypted: the
network between the hosts has to be private.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import time
from pathlib import Path
from typing import Final

_GREETING: Final = b"whippet rank 1\n"
_NONCE: Final = 32  # bytes of a random number, and of a digest
_PATIENCE: Final = 5.0  # seconds that the other side has to prove itself
_LEAST_SECRET: Final = 16  # bytes
_SAME, _OTHER = b"\1", b"\0"  # whether both run the same code
_CODE: Final = ("*.py", "*.c", "*.h", "*.cu", "*.cuh")
_PROBES: Final = 4  # of a silent connection, before it counts as lost


class JoinRefused(Exception):
    """Reports why the two sides cannot be of one group."""


def read_secret(path: Path) -> bytes:
    """Raises JoinRefused where the file has too little, OSError where it cannot be read."""
    secret = path.read_bytes().strip()
    if len(secret) < _LEAST_SECRET:
        raise JoinRefused(f"{path}: a secret of at least {_LEAST_SECRET} bytes is needed")
    return secret


def split_address(address: str) -> tuple[str, int]:
    """Raises ValueError for what is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(address)
    return host.strip("[]"), int(port)


def code_digest() -> bytes:
    """Digests what ranks execute: two that differ could compute or say different things."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in ("engine", "quant"):
        files = (path for pattern in _CODE for path in (root / package).rglob(pattern))
        for path in sorted(files, key=lambda one: one.relative_to(root).as_posix()):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


class Door:
    """Where the first rank awaits the others."""

    def __init__(self, address: str, secret: bytes, code: bytes) -> None:
        """Raises OSError where the address cannot be listened on."""
        self._secret, self._code = secret, code
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=64)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self, timeout: float) -> socket.socket | None:
        """Waits for a connection and checks it. None where none came. Raises JoinRefused for one that is turned
        away."""
        self._socket.settimeout(timeout)
        try:
            sock, _ = self._socket.accept()
        except TimeoutError:
            return None
        try:
            self._check(sock)
        except (OSError, EOFError) as error:
            sock.close()
            raise JoinRefused(f"it did not prove itself: {error or 'it closed the connection'}") from None
        except JoinRefused:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        self._socket.close()

    def _check(self, sock: socket.socket) -> None:
        own = os.urandom(_NONCE)
        end = time.monotonic() + _PATIENCE
        sock.settimeout(_PATIENCE)
        sock.sendall(_GREETING + own)
        answer = _read(sock, 3 * _NONCE, end)
        nonce, code, proof = answer[:_NONCE], answer[_NONCE : 2 * _NONCE], answer[2 * _NONCE :]
        if not hmac.compare_digest(proof, _proof(self._secret, b"rank", own, nonce, code)):
            raise JoinRefused("it has another secret")
        verdict = _SAME if code == self._code else _OTHER
        sock.sendall(verdict + _proof(self._secret, b"first" + verdict, own, nonce, code))
        if verdict == _OTHER:
            raise JoinRefused("it runs another version")
        sock.settimeout(None)


def join(address: str, secret: bytes, code: bytes) -> socket.socket:
    """Connects to the first rank. Raises OSError where it does not listen, and JoinRefused where it is another's, or
    runs another version."""
    end = time.monotonic() + _PATIENCE
    sock = socket.create_connection(split_address(address), _PATIENCE)
    try:
        greeting = _read(sock, len(_GREETING) + _NONCE, end)
        if not greeting.startswith(_GREETING):
            raise JoinRefused(f"{address} is no first rank")
        nonce, own = greeting[len(_GREETING) :], os.urandom(_NONCE)
        sock.sendall(own + code + _proof(secret, b"rank", nonce, own, code))
        try:
            answer = _read(sock, 1 + _NONCE, end)
        except EOFError:
            raise JoinRefused(f"{address} has another secret") from None
        verdict, proof = answer[:1], answer[1:]
        if not hmac.compare_digest(proof, _proof(secret, b"first" + verdict, nonce, own, code)):
            raise JoinRefused(f"{address} does not know the secret")
        if verdict != _SAME:
            raise JoinRefused(f"{address} runs another version")
        sock.settimeout(None)
    except EOFError:
        sock.close()
        raise ConnectionError(f"{address} closed the connection") from None
    except BaseException:
        sock.close()
        raise
    return sock


def keep_alive(sock: socket.socket, seconds: float) -> None:
    """Makes the kernel end the connection where the other host has been silent for about so long."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError):  # not on Linux
        each = max(1, round(seconds / (_PROBES + 1)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, each)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(seconds * 1000)))


def _proof(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((side, *parts)), "sha256")


def _read(sock: socket.socket, size: int, end: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it is too slow")
        sock.settimeout(left)
        data = sock.recv(size - len(found))
        if not data:
            raise EOFError
        found += data
    return bytes(found)
