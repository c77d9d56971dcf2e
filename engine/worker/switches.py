"""Applies the optimisation switches in the engine process, and reverts one after which steps fail."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.api import TRIAL_STEPS, Reverted, Unused
from engine.errors import EngineError
from engine.kv.shared_tier import BlockTier
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.settings import EngineSettings, switches_of

MOST_FAILURES = 2  # steps in a row; one fewer than those that end the process
_log = logging.getLogger(__name__)


class WorkerSwitches:
    """A changed switch is on trial for its next steps."""

    def __init__(
        self, settings: EngineSettings, runner: Runner, scheduler: Scheduler, tier: BlockTier | None = None
    ) -> None:
        self._runner = runner
        self._on = switches_of(settings)
        self._ours: dict[str, Callable[[bool], None]] = {
            "batching": scheduler.set_batching,
            "prefix_cache": scheduler.set_prefix_cache,
            "prefix_redis": lambda enabled: None if tier is None else tier.set_enabled(enabled),
        }
        self._trials: dict[str, int] = {}  # steps left, the last one set at the end

    def set(self, name: str, enabled: bool) -> str | None:
        """Why the switch cannot be set."""
        try:
            self._put(name, enabled)
        except EngineError as error:
            return str(error)
        changed = self._on.get(name) is not enabled
        self._on[name] = enabled
        if changed:
            self._trials.pop(name, None)
            self._trials[name] = TRIAL_STEPS
        return None

    def worked(self) -> bool:
        """Records a good step; whether a trial ended with it."""
        if not self._trials:
            return False
        tried = len(self._trials)
        self._trials = {name: left - 1 for name, left in self._trials.items() if left > 1}
        return len(self._trials) < tried

    def failed(self, times: int) -> Reverted | None:
        """Records failed steps in a row. Reverts the switch that was set last of those on trial."""
        if times < MOST_FAILURES or not self._trials:
            return None
        name, _ = self._trials.popitem()
        enabled = not self._on[name]
        reason = f"{MOST_FAILURES} steps in a row failed soon after it was turned {_word(not enabled)}"
        try:
            self._put(name, enabled)
        except EngineError as error:
            _log.error("%s cannot be turned %s again: %s", name, _word(enabled), error)
            return None
        self._on[name] = enabled
        _log.error("%s is turned %s again: %s", name, _word(enabled), reason)
        return Reverted(name=name, enabled=enabled, reason=reason)

    def _put(self, name: str, enabled: bool) -> None:
        ours = self._ours.get(name)
        if ours is None:
            self._runner.set_optimization(name, enabled)
        else:
            ours(enabled)


def unused(settings: EngineSettings, max_sequences: int) -> tuple[Unused, ...]:
    """Switches of scheduler and prefix cache that do nothing here."""
    found = []
    if max_sequences == 1:
        found.append(Unused(name="batching", reason="no more than one sequence runs at once"))
    if settings.shared_tier is None:
        found.append(Unused(name="prefix_redis", reason="cache.redis-url and cache.key-file are not both set"))
    return tuple(found)


def _word(enabled: bool) -> str:
    return "on" if enabled else "off"
