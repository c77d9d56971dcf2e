"""Checks bearer tokens and client certificates against a file."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from service.core.errors import Reason, Unauthenticated
from service.transport.call.auth import Caller, Presented, Rights, allowed, bearer, certified
from service.transport.identity.token_entries import TokenEntry, read_entries
from service.transport.port.files import FileWatch

_SOON = 7 * 86_400.0  # seconds before an entry expires, from which on a line says so
_NO_ENTRY = TokenEntry(
    Caller("", frozenset()), None, secrets.token_bytes(32), 0
)  # whom a token stands for that is not known
_log = logging.getLogger(__name__)


class TokenFile:
    """Replaces its entries as a whole when the file changes; an unreadable file leaves them in force."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._watch = FileWatch("tokens", [path], self._read_again, self._remind)
        self._entries = read_entries(path)
        self._watch.start()

    def authorize(self, call: Presented, permitted: Rights) -> Caller:
        """A token wins over the connection's certificate even where it is unknown: a gateway has one certificate, and
        its callers have tokens."""
        token = bearer(call.invocation_metadata() or ())
        entry = self._of_certificate(call) if token is None else self._of_token(token)
        if entry.expires is not None and entry.expires <= self._clock():
            if token is None:
                raise Unauthenticated("the entry of the certificate has expired", Reason.CERTIFICATE_EXPIRED)
            raise Unauthenticated("the token has expired", Reason.TOKEN_EXPIRED)
        return allowed(entry.caller, permitted)

    def _of_token(self, token: bytes) -> TokenEntry:
        """Compares unknown tokens as well, so that timing reveals nothing of any token."""
        digest = hashlib.sha256(token).digest()
        entry = self._entries.tokens.get(digest, _NO_ENTRY)
        if not hmac.compare_digest(entry.digest, digest):
            raise Unauthenticated("the token is not known", Reason.TOKEN_UNKNOWN)
        return entry

    def _of_certificate(self, call: Presented) -> TokenEntry:
        known = self._entries.names
        if not known:
            raise Unauthenticated("a token is needed: metadata authorization, `Bearer TOKEN`", Reason.TOKEN_MISSING)
        names = certified(call.auth_context())
        found = [known[name] for name in names if name in known]
        if len(found) > 1:
            raise Unauthenticated("the certificate has several names that are known", Reason.CERTIFICATE_AMBIGUOUS)
        if found:
            return found[0]
        if names:
            raise Unauthenticated(
                "no name of the certificate is known, and there is no token", Reason.CERTIFICATE_UNKNOWN
            )
        raise Unauthenticated("a token or a client certificate with a name is needed", Reason.TOKEN_MISSING)

    def tenants(self) -> frozenset[str]:
        return frozenset(entry.caller.tenant for entry in self._entries)

    def reload(self) -> None:
        self._watch.ask()

    @property
    def failures(self) -> int:
        return self._watch.failures

    def _read_again(self) -> None:
        self._entries = read_entries(self._path)
        _log.info("tokens read again: %d entries", len(self._entries))

    def _remind(self) -> None:
        now = self._clock()
        soon = sorted(
            (entry.expires, entry.number)
            for entry in self._entries
            if entry.expires is not None and entry.expires < now + _SOON
        )
        if soon:
            first, number = soon[0]
            _log.warning(
                "auth.tokens-file: %d entries have expired or will within %d days; the first is entry %d, %s",
                len(soon), _SOON // 86_400, number, datetime.fromtimestamp(first, UTC).isoformat(),
            )  # fmt: skip
