"""Who calls, and what they may do."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from service.core.errors import Unauthenticated

DEFAULT_TENANT = "default"
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
    name: str = ""  # which of the tenant's tokens it is; empty: all callers look alike


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

    def reload(self) -> None:
        _log.info("there is no tokens file to be read again")


def bearer(metadata: Metadata) -> bytes:
    """The token of a call. Raises Unauthenticated."""
    for key, value in metadata:
        if key == "authorization":
            raw = value.encode() if isinstance(value, str) else value
            scheme, _, token = raw.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
            raise Unauthenticated("authorization is not `Bearer TOKEN`")
    raise Unauthenticated("a token is needed: metadata authorization, `Bearer TOKEN`")
