"""Identifies callers and their rights."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from service.core.errors import PermissionDenied, Reason, Unauthenticated
from service.transport.call.context import Metadata

DEFAULT_TENANT = "default"


class Right(enum.StrEnum):
    VIEW = "view"
    GENERATE = "generate"
    ADMIN = "admin"


Rights = frozenset[Right]
ALL_RIGHTS: Rights = frozenset(Right)
CALLER_RIGHTS: Rights = frozenset((Right.VIEW, Right.GENERATE))  # of a certificate without an entry


class Presented(Protocol):
    def invocation_metadata(self) -> Metadata | None: ...

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        pass


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    rights: Rights
    name: str = ""  # which of the tenant's tokens it is; empty: all callers look alike


class NoTokens:
    """Every caller is the default tenant with the same rights."""

    def __init__(self, rights: Rights = ALL_RIGHTS) -> None:
        self._everyone = Caller(DEFAULT_TENANT, rights)

    def authorize(self, call: Presented, permitted: Rights) -> Caller:
        return allowed(self._everyone, permitted)

    def tenants(self) -> frozenset[str]:
        return frozenset((self._everyone.tenant,))


def allowed(caller: Caller, permitted: Rights) -> Caller:
    """Raises PermissionDenied for a caller without any of the rights."""
    if permitted.isdisjoint(caller.rights):
        raise PermissionDenied(tuple(right.value for right in Right if right in permitted))
    return caller


def bearer(metadata: Metadata) -> bytes | None:
    """Raises Unauthenticated for a malformed token."""
    for key, value in metadata:
        if key == "authorization":
            raw = value.encode() if isinstance(value, str) else value
            scheme, _, token = raw.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
            raise Unauthenticated("authorization is not `Bearer TOKEN`", Reason.TOKEN_MALFORMED)
    return None


def certified(connection: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Returns a certificate's alternative names as a tokens file has them, kind first: permission to certify a host
    name does not include URIs."""
    return tuple(
        alternative_name(kind, raw.decode("ascii", "replace"))
        for kind, key in (("URI", "peer_uri"), ("DNS", "peer_dns"), ("email", "peer_email"))
        for raw in connection.get(key, ())
    )


def alternative_name(kind: str, name: str) -> str:
    """Formats a name as openssl prints it, `URI:spiffe://…`; host names in small letters."""
    return f"{kind}:{name.lower() if kind == 'DNS' else name}"
