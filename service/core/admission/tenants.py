"""Describes what each tenant may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.api import Priority

PRIORITIES: Mapping[str, Priority] = {one.name.lower(): one for one in Priority}  # as the file names them


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """The defaults set no limits."""

    tokens_per_minute: int | None = None  # of prompts and answers; None: no quota
    burst: int | None = None  # tokens that can be saved up; None: a minute's
    requests: int | None = None  # live at once; None: as `limits.tenant-requests` says
    priority: Priority = Priority.INTERACTIVE  # the highest; a request that asks for more gets this
    metrics: bool = False  # named in metrics

    @property
    def most(self) -> int:
        """Tokens that can be saved up, where there is a quota."""
        return self.burst or self.tokens_per_minute or 0


@dataclass(frozen=True, slots=True)
class TenantPolicies:
    named: Mapping[str, TenantPolicy] = field(default_factory=dict)
    others: TenantPolicy = TenantPolicy()  # of tenants that are not named

    @property
    def in_metrics(self) -> tuple[str, ...]:
        return tuple(tenant for tenant, policy in self.named.items() if policy.metrics)

    def of(self, tenant: str) -> TenantPolicy:
        return self.named.get(tenant, self.others)


class PolicySource(Protocol):
    def policies(self) -> TenantPolicies:
        pass

    def reload(self) -> None:
        pass


class NoPolicies:
    def __init__(self) -> None:
        self._none = TenantPolicies()

    def policies(self) -> TenantPolicies:
        return self._none

    def reload(self) -> None:
        pass
