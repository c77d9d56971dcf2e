"""The optimisations that can be turned on and off while requests are served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields, replace

from engine.api import Engine
from service.config.settings import OptimizationOptions
from service.core.errors import Unimplemented

RESPONSE_CACHE = "response_cache"
SEMANTIC_CACHE = "semantic_cache"
_OURS = (RESPONSE_CACHE, SEMANTIC_CACHE)  # read through `on` by their users; all others belong to the engine


@dataclass(frozen=True, slots=True)
class Switch:
    """One optimisation."""

    name: str
    enabled: bool
    description: str
    why_not: str = ""  # why it does nothing here, be it on or off


class Switches:
    """Every switch of this build."""

    def __init__(self, options: OptimizationOptions, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._switches = {
            one.name: Switch(one.name, getattr(options, one.name), one.metadata["description"])
            for one in sorted(fields(options), key=lambda one: one.name)
        }

    def all(self) -> tuple[Switch, ...]:
        """Sorted by name."""
        return tuple(self._told(switch) for switch in self._switches.values())

    def on(self, name: str) -> bool:
        """Its present state."""
        return self._switches[name].enabled

    async def set(self, name: str, enabled: bool) -> Switch:
        """Returns once it has taken effect. Raises Unimplemented for an unknown name."""
        async with self._lock:
            switch = self._switches.get(name)
            if switch is None:
                raise Unimplemented("name", "this build has no optimisation of that name")
            if name not in _OURS:
                await self._engine.set_optimization(name, enabled)
            self._switches[name] = replace(switch, enabled=enabled)
            return self._told(self._switches[name])

    def _told(self, switch: Switch) -> Switch:
        """With what the engine says of it, once it is ready."""
        info = self._engine.info
        reasons = {} if info is None else {one.name: one.reason for one in info.unused}
        return replace(switch, why_not=reasons.get(switch.name, ""))
