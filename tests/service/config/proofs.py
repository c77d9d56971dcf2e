"""A proof: a setting, changed by its flag alone, and something that is not a setting and is then different."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.redis_server import RedisServer
from service.config.settings import Settings
from service.config.sources import load
from tests.service.conftest import Server

FAKE = ("--engine=fake",)


@dataclass(frozen=True)
class Tools:
    """What effects are looked at with. `{folder}`, `{redis}` and `{keys}` in a flag are replaced by theirs."""

    folder: Path
    redis: RedisServer
    keys: Path
    serve: Callable[..., AbstractContextManager[Server]]
    flags: tuple[str, ...] = ()  # that the settings come from

    def given(self, flags: tuple[str, ...]) -> Tools:
        """The same with these flags."""
        places = {"folder": str(self.folder), "redis": self.redis.url, "keys": str(self.keys)}
        for name, value in places.items():
            flags = tuple(flag.replace(f"{{{name}}}", value) for flag in flags)
        return replace(self, flags=flags)


Effect = Callable[[Settings, Tools], Any | Awaitable[Any]]
Check = Callable[[Any, Any], bool]


def differs(before: Any, after: Any) -> bool:
    return bool(before != after)


def becomes(before: Any, after: Any) -> Check:
    """The effect is exactly this without the flag, and exactly that with it."""
    return lambda found, changed: bool((found, changed) == (before, after))


@dataclass(frozen=True)
class Proof:
    """`effect` of the base flags, and of the same with `--LEAF=value`."""

    value: str
    effect: Effect
    check: Check = differs
    base: tuple[str, ...] = FAKE

    async def holds(self, leaf: str, tools: Tools) -> None:
        """Raises AssertionError."""
        before = await self._seen(self.base, tools)
        after = await self._seen((*self.base, f"--{leaf}={self.value}"), tools)
        assert self.check(before, after), f"--{leaf}={self.value}: {before!r}, then {after!r}"

    async def _seen(self, flags: tuple[str, ...], tools: Tools) -> Any:
        tools.redis.command("FLUSHALL")
        tools = tools.given(flags)
        found = self.effect(load(tools.flags, {}), tools)
        return await found if inspect.isawaitable(found) else found
