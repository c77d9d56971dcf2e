"""Turns optimisations on and off while requests are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from engine.api import Engine
from service.config.settings import OptimizationOptions
from service.core.errors import Unimplemented

RESPONSE_CACHE = "response_cache"
SEMANTIC_CACHE = "semantic_cache"
_OURS = (RESPONSE_CACHE, SEMANTIC_CACHE)  # read through `on` by their users; all others belong to the engine


@dataclass(frozen=True, slots=True)
class OptimizationSwitch:
    name: str
    requested: bool
    effective: bool
    description: str
    why_not: str = ""  # why it does nothing here, be it on or off; or why it is not as requested


class OptimizationSwitches:
    def __init__(
        self,
        options: OptimizationOptions,
        engine: Engine,
        unused: Callable[[], Mapping[str, str]] = dict,  # of ours, those that do nothing now, and why
    ) -> None:
        self._engine = engine
        self._unused = unused
        self._lock = asyncio.Lock()
        self._options = {one.name: one.metadata for one in sorted(fields(options), key=lambda one: one.name)}
        self._requested: dict[str, bool] = {name: getattr(options, name) for name in self._options}

    def all(self) -> tuple[OptimizationSwitch, ...]:
        unused = self._reasons()
        return tuple(self._switch(name, unused) for name in self._options)

    def on(self, name: str) -> bool:
        return self._requested[name]

    @property
    def reverts(self) -> Mapping[str, int]:
        """How often each was reverted because steps failed with it."""
        return {name: self._engine.reverts.get(name, 0) for name in self._options if name not in _OURS}

    async def set(self, name: str, enabled: bool) -> OptimizationSwitch:
        """Returns once it has taken effect. Raises Unimplemented."""
        async with self._lock:
            if name not in self._options:
                raise Unimplemented("name", "this build has no optimisation of that name")
            if name not in _OURS:
                await self._engine.set_optimization(name, enabled)
            self._requested[name] = enabled
            return self._switch(name, self._reasons())

    def _switch(self, name: str, unused: Mapping[str, str]) -> OptimizationSwitch:
        switch = OptimizationSwitch(
            name, self._requested[name], self._requested[name], self._options[name]["description"]
        )
        if (back := self._engine.reverted.get(name)) is not None:
            return replace(switch, effective=back.enabled, why_not=back.reason)
        reason, needed = unused.get(name, ""), self._options[name].get("needs")
        if not reason and needed is not None and not self._switch(needed, unused).effective:
            reason = f"{needed} is off"
        return replace(switch, effective=switch.requested and not reason, why_not=reason)

    def _reasons(self) -> Mapping[str, str]:
        info = self._engine.info
        if info is None:
            return dict.fromkeys(self._options, "the engine has not been ready yet")
        return {**self._unused(), **{one.name: one.reason for one in info.unused}}
