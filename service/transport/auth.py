"""Who calls, and what they may do: bearer tokens against a file of hashes.

The file is YAML, a list of entries:

    - tenant: acme                # letters, digits, . _ -
      sha256: "9f86d081884c7d65…" # of the token, hexadecimal: printf %s "$TOKEN" | sha256sum
      rights: [generate]          # generate, admin

It is read again when it changes. If it has become unreadable, the old entries stay in force.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from service.config.settings import BadSettings
from service.core.errors import PermissionDenied, Unauthenticated

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_CHECK_INTERVAL = 1.0  # seconds between checks of the file's modification time
_log = logging.getLogger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]


class Right(enum.StrEnum):
    """What a token permits."""

    GENERATE = "generate"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that a token belongs to, and its rights."""

    tenant: str
    rights: frozenset[Right]


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    caller: Caller


class NoTokens:
    """No tokens are configured: every caller is the default tenant with all rights."""

    def __init__(self) -> None:
        self._everyone = Caller(DEFAULT_TENANT, frozenset(Right))

    def authorize(self, metadata: Metadata, right: Right) -> Caller:
        """Never refuses."""
        return self._everyone

    def tenants(self) -> frozenset[str]:
        """The default one."""
        return frozenset((self._everyone.tenant,))


class TokenFile:
    """The tokens of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._entries = read_tokens(path)
        self._next_check = time.monotonic() + _CHECK_INTERVAL

    def authorize(self, metadata: Metadata, right: Right) -> Caller:
        """The caller, who has `right`. Raises Unauthenticated or PermissionDenied."""
        self._refresh()
        caller = self._find(hashlib.sha256(_bearer(metadata)).digest())
        if caller is None:
            raise Unauthenticated("the token is not known")
        if right not in caller.rights:
            raise PermissionDenied(f"the token lacks the right to {right}")
        return caller

    def tenants(self) -> frozenset[str]:
        """All that have a token."""
        self._refresh()
        return frozenset(entry.caller.tenant for entry in self._entries)

    def _find(self, digest: bytes) -> Caller | None:
        """Compares with every entry, so that timing reveals nothing."""
        found = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._entries = read_tokens(self._path)
            _log.info("tokens read again: %d entries", len(self._entries))
        except BadSettings as error:
            _log.error("the old tokens stay in force: %s", error)


def read_tokens(path: Path) -> tuple[_Entry, ...]:
    """The entries of the file. Raises BadSettings, which names the entry and never contains a hash."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"auth.tokens-file: {path} cannot be read: {type(error).__name__}") from None
    except yaml.YAMLError:
        raise BadSettings(f"auth.tokens-file: {path} is not YAML") from None
    if not isinstance(entries, list):
        raise BadSettings(f"auth.tokens-file: {path} is not a list of entries")
    return tuple(_entry(entry, f"auth.tokens-file: {path}: entry {n}") for n, entry in enumerate(entries, start=1))


def _entry(entry: Any, where: str) -> _Entry:
    if not isinstance(entry, dict) or set(entry) != {"tenant", "sha256", "rights"}:
        raise BadSettings(f"{where} does not have exactly tenant, sha256 and rights")
    tenant, digest, rights = entry["tenant"], entry["sha256"], entry["rights"]
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise BadSettings(f"{where}: tenant is not 1 to 64 letters, digits, dots, hyphens or underscores")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise BadSettings(f"{where}: sha256 is not a string of 64 hexadecimal digits")
    known = [right.value for right in Right]
    if not isinstance(rights, list) or not rights or not all(right in known for right in rights):
        raise BadSettings(f"{where}: rights are not a list of {', '.join(known)}")
    return _Entry(bytes.fromhex(digest), Caller(tenant, frozenset(Right(right) for right in rights)))


def _bearer(metadata: Metadata) -> bytes:
    for key, value in metadata:
        if key == "authorization":
            raw = value.encode() if isinstance(value, str) else value
            scheme, _, token = raw.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
            raise Unauthenticated("authorization is not `Bearer TOKEN`")
    raise Unauthenticated("a token is needed: metadata authorization, `Bearer TOKEN`")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
