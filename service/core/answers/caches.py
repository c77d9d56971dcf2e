"""Opens the caches of the engine's model, asks them in order, and learns, stores and audits beside requests."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from cache.api import CacheOptions, InvalidKeyFile, Mode, ModelIdentity, SharedBuckets, Times
from cache.open.caches import Caches, open_caches
from cache.open.checks import check_key_file, check_redis, missing_for_semantic
from cache.open.counters import Counters
from cache.open.quotas import open_buckets
from engine.api import Engine, ModelInfo, TierReport
from service.config.settings import BadSettings

_log = logging.getLogger(__name__)
_MOST_BESIDE = 256  # tasks beside requests; what comes on top is dropped, and counted
_EXTRA = "in a checkout pip install -e '.[embed]', for a wheel pip install 'FILE.whl[embed]'"


def checked(options: CacheOptions) -> CacheOptions:
    """Drops a semantic cache that is neither installed nor required. Raises BadSettings for options that can never
    work."""
    if options.key_file is not None:
        try:
            check_key_file(options.key_file)
        except InvalidKeyFile as error:
            raise BadSettings(f"cache.key-file: {error}") from None
    _check_redis(options)
    absent = missing_for_semantic(options.semantic.model) if options.semantic.mode is not Mode.OFF else ()
    if not absent:
        return options
    if options.semantic.mode is Mode.ON:
        raise BadSettings(f"cache.semantic.mode: `on` needs {', '.join(absent)}: {_EXTRA}")
    _log.info("cache: no semantic cache, since %s is not installed: %s", absent[0], _EXTRA)
    return replace(options, semantic=replace(options.semantic, mode=Mode.OFF))


def _check_redis(options: CacheOptions) -> None:
    """Does not connect: a server starts without its Redis."""
    named = {name: getattr(options, f"redis_{name}_file") for name in ("password", "ca", "cert", "key")}
    for name, path in (named | {"sentinel-password": options.redis_sentinel_password_file}).items():
        if path is not None and not path.is_file():
            raise BadSettings(f"cache.redis-{name}-file: {path} is no file")
    redis = options.front().redis
    if redis is None:
        return
    try:
        check_redis(redis)
    except ssl.SSLError as error:
        raise BadSettings(
            f"cache.redis-ca-file, -cert-file and -key-file: {error.reason or 'no certificates'}"
        ) from None
    except OSError as error:
        raise BadSettings(f"cache.redis-…-file: {error}") from None


class AnswerCaches:
    def __init__(
        self,
        options: CacheOptions,
        engine: Engine,
        tokenizer_digest: str,
        wanted_mode: Mode | None = None,  # of the semantic cache, if `options` have another, for want of packages
    ) -> None:
        self.counters = Counters()
        self.semantic_mode = options.semantic.mode
        self._lacking = wanted_mode not in (None, options.semantic.mode)
        self._settings = options.front()
        self._engine = engine
        self._tokenizer = tokenizer_digest
        self._open: tuple[ModelInfo, ModelIdentity, Caches] | None = None
        self._beside: set[asyncio.Task[None]] = set()

    def now(self) -> Caches | None:
        """None until the engine was ready once."""
        info = self._engine.info
        if info is None:
            return None
        if self._open is None or self._open[0] is not info:
            self._open = self._opened(info)
        return self._open[2]

    def change(self, options: CacheOptions, wanted_mode: Mode | None = None) -> None:
        """Takes over what can change live: ages, and the semantic cache's mode and bounds."""
        semantic, now = options.front().semantic, self._settings
        self._lacking = wanted_mode not in (None, semantic.mode)
        self.semantic_mode = semantic.mode
        self._settings = replace(
            now,
            response=replace(now.response, ttl=options.response.ttl),
            semantic=replace(semantic, model=now.semantic.model, max_entries=now.semantic.max_entries),
        )
        if self._open is not None:
            self._open[2].change(self._settings)

    def unused(self) -> dict[str, str]:
        """Why a cache that is on does nothing now, by its switch."""
        reason = "" if self._open is None else self._open[2].why_no_semantic
        if self.semantic_mode is Mode.OFF:
            reason = f"it lacks packages: {_EXTRA}" if self._lacking else "cache.semantic.mode is off"
        return {"semantic_cache": reason} if reason else {}

    def buckets(self) -> SharedBuckets | None:
        """Quotas' buckets in the same Redis; None without Redis."""
        return open_buckets(self._settings, self.counters)

    def counts(self) -> dict[tuple[str, str], int]:
        """Counts since the start; the shared tier's, since the engine's start."""
        return {**self.counters.counts(), **{(event, label): count for event, label, count in self._tier.counts}}

    def times(self) -> dict[str, Times]:
        tier = {event: Times(buckets, total) for event, buckets, total in self._tier.times}
        return {**self.counters.times(), **tier}

    def named_counts(self) -> dict[str, int]:
        counts = self.counts()
        return {f"{event}.{label}" if label else event: count for (event, label), count in sorted(counts.items())}

    def breakers(self) -> dict[str, str]:
        ours = {} if self._open is None else {name: state.value for name, state in self._open[2].states.items()}
        return ours | dict(self._tier.breakers)

    def held(self) -> dict[str, int]:
        """Bytes in this process, by holder."""
        return {} if self._open is None else self._open[2].held

    def beside(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Runs work off every request's path; drops it where too much runs already."""
        if len(self._beside) >= _MOST_BESIDE:
            self.counters.count("cache_dropped", name)
            return
        task = asyncio.get_running_loop().create_task(work(), name=f"cache {name}")
        self._beside.add(task)
        task.add_done_callback(self._ended)

    async def aclose(self) -> None:
        for task in self._beside:
            task.cancel()
        if self._beside:
            await asyncio.wait(self._beside)
        if self._open is not None:
            await self._open[2].aclose()
            self._summarize()

    @property
    def _tier(self) -> TierReport:
        return self._engine.load.tier or TierReport()

    def _opened(self, info: ModelInfo) -> tuple[ModelInfo, ModelIdentity, Caches]:
        weights = f"{info.weights_digest} {info.architecture} {info.weight_format} {info.dtype}"
        if info.kv_dtype.startswith("float8"):  # else arithmetic's own, in which replicas on other CPUs may differ
            weights += f" {info.kv_dtype}"
        identity = ModelIdentity(
            weights=weights,
            tokenizer=self._tokenizer,
        )
        if self._open is not None:
            _, known, caches = self._open
            if known == identity:
                return info, identity, caches
            self.beside(caches.aclose, "close")
        caches = open_caches(self._settings, identity, self.counters)
        caches.load_semantic()
        return info, identity, caches

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counters.count("cache_beside", "failed")
            _log.error("cache: %s failed: %s", task.get_name(), type(error).__name__)

    def _summarize(self) -> None:
        counts = self.named_counts()
        if counts:
            _log.info("cache: %s", ", ".join(f"{name} {count}" for name, count in counts.items()))
