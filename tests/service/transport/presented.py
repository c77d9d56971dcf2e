"""A call, as far as it says who makes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Presented:
    """As a context of gRPC has it."""

    metadata: tuple[tuple[str, str | bytes], ...] | None = ()
    names: Mapping[str, Iterable[bytes]] = field(default_factory=dict)  # of the certificate

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None:
        return self.metadata

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return self.names


def bearer(token: str, **names: Iterable[bytes]) -> Presented:
    return Presented((("user-agent", "test"), ("authorization", f"Bearer {token}")), names)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def entry(tenant: str = "acme", token: str = "secret", rights: str = "[generate]", rest: str = "") -> str:
    return f'- {{tenant: {tenant}, sha256: "{digest(token)}", rights: {rights}{rest}}}\n'


def named(san: str, tenant: str = "acme", rights: str = "[generate]", rest: str = "") -> str:
    return f'- {{tenant: {tenant}, san: "{san}", rights: {rights}{rest}}}\n'
