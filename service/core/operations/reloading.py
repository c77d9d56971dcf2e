"""Reads the files of `--config` again when they change or on request; a faulty file changes nothing.

A setting changes when its value differs from what was read before, not from what an operator has set since: an
unchanged file reverts nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import reduce
from pathlib import Path

from cache.api import CacheOptions
from engine.api import Engine
from engine.errors import EngineError, EngineUnavailable
from service.config.leaves import Leaf, leaves
from service.config.settings import BadSettings, Settings
from service.config.sources import config_files
from service.core.answers.caches import AnswerCaches, checked
from service.core.switches import OptimizationSwitches

LIVE_CACHE = frozenset(
    {
        "cache.response.ttl",
        "cache.semantic.mode",
        "cache.semantic.threshold",
        "cache.semantic.error-bound",
        "cache.semantic.audit",
        "cache.semantic.ttl",
    }
)
_SWITCHES, _LOG_LEVEL = "optimizations.", "log-level"
_INTERVAL = 1.0  # seconds between looks at the file; it is read once two of them find the same change
_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[str, int, int, int], ...]


class Reloader:
    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],  # as they are now; raises BadSettings
        engine: Engine,
        switches: OptimizationSwitches,
        caches: AnswerCaches,
        counts: Counter[str],  # `reloads`, `failures`
        interval: float = _INTERVAL,
    ) -> None:
        self._counts = counts
        self._path = settings.config
        self._first = self._last = settings
        self._read = read
        self._engine = engine
        self._switches = switches
        self._caches = caches
        self._interval = interval
        self._asked = asyncio.Event()
        self._stamp = self._seen = None if self._path is None else _stamp(self._path)
        self._pending: dict[str, bool] = {}  # switches that wait for the engine

    def now(self) -> None:
        self._asked.set()

    async def run(self) -> None:
        if self._path is None:
            await asyncio.Event().wait()
            return
        with ThreadPoolExecutor(1, "settings") as thread:
            while True:
                try:
                    async with asyncio.timeout(self._interval):
                        await self._asked.wait()
                except TimeoutError:
                    pass
                if await self._due(thread, self._path):
                    await self._again(thread)
                await self._switch()

    async def _due(self, thread: Executor, path: Path) -> bool:
        asked = self._asked.is_set()
        self._asked.clear()
        before, self._seen = self._seen, await asyncio.get_running_loop().run_in_executor(thread, _stamp, path)
        due = asked or (self._seen != self._stamp and self._seen == before)
        if due:
            self._stamp = self._seen
        return due

    async def _again(self, thread: Executor) -> None:
        try:
            settings, cache = await asyncio.get_running_loop().run_in_executor(thread, self._readable)
        except Exception as error:
            self._counts["failures"] += 1
            what = str(error) if isinstance(error, BadSettings) else type(error).__name__
            _log.error("the settings stay as they are: %s", what)
            return
        last, self._last = self._last, settings
        changed = [leaf for leaf in leaves(Settings) if _value(settings, leaf) != _value(last, leaf)]
        names = [leaf.name for leaf in changed]
        if LIVE_CACHE.intersection(names):
            self._caches.change(cache, settings.cache.semantic.mode)
        if _LOG_LEVEL in names:
            logging.getLogger().setLevel(settings.log_level.upper())
            self._engine.set_log_level(settings.log_level)
        self._pending |= {
            leaf.path[-1]: bool(_value(settings, leaf)) for leaf in changed if leaf.name.startswith(_SWITCHES)
        }
        for leaf in changed:
            if not _is_live(leaf) and _value(settings, leaf) != _value(self._first, leaf):
                _log.warning("%s was changed in the settings: it needs a restart", leaf.name)
        self._counts["reloads"] += 1
        _log.info("settings read again; changed: %s", ", ".join(filter(None, names)) or "nothing")

    def _readable(self) -> tuple[Settings, CacheOptions]:
        settings = self._read()
        return settings, checked(settings.cache)

    async def _switch(self) -> None:
        for name, enabled in tuple(self._pending.items()):
            try:
                await self._switches.set(name, enabled)
            except EngineUnavailable:
                return  # at the next look
            except EngineError as error:
                _log.error("%s cannot be switched: %s", name, error)
            del self._pending[name]


def _is_live(leaf: Leaf) -> bool:
    return leaf.name == _LOG_LEVEL or leaf.name.startswith(_SWITCHES) or leaf.name in LIVE_CACHE


def _value(settings: Settings, leaf: Leaf) -> object:
    return reduce(getattr, leaf.path, settings)


def _stamp(path: Path) -> _Stamp | None:
    """Stamps the files themselves, so that a retargeted symbolic link is a change."""
    try:
        found = [(file.name, file.stat()) for file in config_files(path)]
    except (BadSettings, OSError):
        return None
    return tuple((name, one.st_mtime_ns, one.st_size, one.st_ino) for name, one in found)
