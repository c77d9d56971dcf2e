"""Starts and ends the process that holds model and device: `python -m engine.worker.process --fd N`.

It reports loading, then readiness or refusal, on the socket N. Exits 0 where the front has gone, 2 where it refused to
load, 1 where something failed, after which the front starts another.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from engine.api import ModelInfo, TierReport
from engine.constraints.constraints import Constraints
from engine.errors import EngineFailed, InvalidModel, Unsupported
from engine.fake import FakeRunner
from engine.ipc.frames import FOLDERS, ConfigureEngine, LoadProgress, LoadRefused, Ready
from engine.ipc.framing import FrameError
from engine.ipc.link import EngineLink
from engine.ipc.step_mark import StepMark
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex, kv_identity
from engine.kv.shared_tier import BlockTier
from engine.log_lines import use_json
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.settings import PAGE_SIZE, EngineSettings
from engine.worker.device_memory import DeviceMemory
from engine.worker.driver import begin_context
from engine.worker.loop import Loop
from engine.worker.marking import Marking
from engine.worker.parent import bound_to_parent
from engine.worker.recording import StepRecorder
from engine.worker.switches import WorkerSwitches, unused
from quant.checkpoint.digest import of_texts
from quant.checkpoint.errors import BadFile

_log = logging.getLogger(__name__)
_PROGRESS_INTERVAL = 0.05  # seconds


def main() -> int:
    arguments = argparse.ArgumentParser(prog="engine.worker.process")
    arguments.add_argument("--fd", type=int, required=True, help="the socket to the front")
    arguments.add_argument("--step-mark", type=int, required=True, help="memory that names the sequences of a step")
    arguments.add_argument("--kind", default="fake", help="what will be loaded, as far as is known")
    arguments.add_argument("--parent", type=int, help="the front's process; this one ends where that has gone by now")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    given = arguments.parse_args()
    if not bound_to_parent(given.parent):
        return 0
    link = EngineLink(socket.socket(fileno=given.fd))
    try:
        configure = ThreadPoolExecutor(1, "told").submit(_receive_configure, link)
        if given.kind == "model":
            _import_model()  # while the front reads its settings
        return _serve(link, Marking(StepMark(given.step_mark)), configure.result())
    except (EOFError, ConnectionError):
        return 0
    except FrameError as error:
        _log.error("the front sent a broken message: %s", error)
    except EngineFailed as error:
        _log.error("%s", error)
    except Exception:
        _log.exception("the engine process broke")
    return 1


def _serve(link: EngineLink, marking: Marking, configure: ConfigureEngine) -> int:
    settings = configure.settings
    for name in FOLDERS:
        os.environ.pop(name, None)
    os.environ.update(configure.folders)
    logging.getLogger().setLevel(settings.log_level.upper())
    if settings.log_format == "json":
        use_json("engine")
    try:
        constraints = Constraints(settings.model)
        runner = _build(settings, _ProgressReports(link), constraints)
        pool, index, tier, tier_report = _prefixes(settings, runner)
        texts = of_texts(Path(settings.model)) if settings.model else ""  # last: so that a change meanwhile shows
    except (InvalidModel, Unsupported, BadFile) as error:
        kind: Literal["invalid_model", "unsupported"]
        kind = "unsupported" if isinstance(error, Unsupported) else "invalid_model"
        link.send(LoadRefused(kind, str(error)))
        return 2
    scheduler = Scheduler(_limits(settings, runner.info), pool, settings.batching, index, tier, constraints)
    switches = WorkerSwitches(settings, runner, scheduler, tier)
    idle = runner.info.unused + unused(settings, runner.info.max_sequences)
    gc.collect()
    gc.freeze()  # what was loaded stays; later collections need not look at it
    link.send(Ready(replace(runner.info, texts_digest=texts, unused=idle)))
    _log.debug("ready: %d sequences, %d pages", runner.info.max_sequences, runner.info.total_pages)
    memory = DeviceMemory() if runner.info.device.startswith("cuda") else None
    Loop(
        link, runner, scheduler, switches, tier, tier_report, _recorder(settings, runner), marking, memory, constraints
    ).run()
    if tier is not None:
        tier.close()
    runner.close()
    return 0


def _receive_configure(link: EngineLink) -> ConfigureEngine:
    """Starts the driver as soon as there is work for it."""
    while not (commands := link.receive(timeout=None)):
        pass
    match commands:
        case [ConfigureEngine() as configure]:
            if configure.settings.kind == "model" and configure.settings.device != "cpu":
                begin_context()
            return configure
    raise FrameError("it did not begin with the settings")


def _build(settings: EngineSettings, progress: _ProgressReports, constraints: Constraints) -> Runner:
    if settings.kind == "fake":
        return FakeRunner(settings, constraints)
    progress("imports", 0, 1)
    _import_model()
    progress("imports", 1, 1)
    from engine.worker.build import build

    return build(settings, progress, constraints)


def _import_model() -> None:
    """Takes seconds that the fake need not pay."""
    gc.disable()  # which looks at all that is imported again and again
    importlib.import_module("engine.worker.build")
    gc.freeze()
    gc.enable()


def _limits(settings: EngineSettings, info: ModelInfo) -> Limits:
    return Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=info.max_batch_tokens,
        max_context=info.max_context,
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
        target_tpot=None if settings.target_tpot is None else settings.target_tpot * 1e-3,
    )


def _recorder(settings: EngineSettings, runner: Runner) -> StepRecorder | None:
    if not settings.record_steps:
        return None
    return StepRecorder(settings, runner.info, runner.pages.layout.token_bytes * PAGE_SIZE)


def _prefixes(
    settings: EngineSettings, runner: Runner
) -> tuple[PagePool, PrefixIndex, BlockTier | None, Callable[[], TierReport] | None]:
    pages = runner.pages
    pool = PagePool(runner.info.total_pages)
    index = PrefixIndex(pool, kv_identity(runner.info, pages.layout), settings.prefix_cache)
    if settings.shared_tier is None:
        return pool, index, None, None
    from engine.kv.open_tier import open_tier  # what it needs beyond the standard library may not be installed

    store, report = open_tier(settings.shared_tier, pages.layout)
    return pool, index, BlockTier(store, pages, index, settings.prefix_redis), report


class _ProgressReports:
    """Passes on no more progress than a reader can follow."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._stage = ""
        self._at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and done < total and now - self._at < _PROGRESS_INTERVAL:
            return
        self._stage, self._at = stage, now
        self._link.send(LoadProgress(stage, done, total))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # at once: what tidies up at exit may wait for a device that is lost
