"""What a changed file changes while requests are served, what it does not, and what is wrong with it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from cache.api import Mode
from engine.errors import EngineUnavailable
from service.config.leaves import leaves
from service.config.settings import BadSettings, Settings
from service.config.sources import load
from service.core.answers.caches import AnswerCaches
from service.core.operations.reloading import LIVE_CACHE, Reloader
from service.core.switches import OptimizationSwitches
from tests.service.scripted import ScriptedEngine

PATIENCE = 60.0  # seconds after which a test that waits has failed
START = "engine: fake\nlimits: {queued-requests: 9}\ncache: {semantic: {mode: 'off'}}\n"


class Engine(ScriptedEngine):
    """Remembers what it was told; is not there for a while where it is said to be."""

    def __init__(self) -> None:
        super().__init__([])
        self.level = ""
        self.away = 0
        self.switched: list[tuple[str, bool]] = []

    async def set_optimization(self, name: str, enabled: bool) -> None:
        if self.away:
            self.away -= 1
            raise EngineUnavailable("the engine is restarting", 1.0)
        self.switched.append((name, enabled))

    def set_log_level(self, level: str) -> None:
        self.level = level


@dataclass
class Followed:
    """A file that is followed."""

    file: Path
    engine: Engine
    switches: OptimizationSwitches
    caches: AnswerCaches
    reloader: Reloader
    counts: Counter[str]

    def write(self, more: str, start: str = START) -> None:
        """Whole, as editors do, and never twice with one time and size."""
        part = self.file.with_suffix(".part")
        part.write_text(start + more)
        os.replace(part, self.file)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.005)

    async def read(self, reloads: int = 0, failures: int = 0) -> None:
        await self.until(lambda: self.counts == Counter(reloads=reloads, failures=failures))


@asynccontextmanager
async def following(file: Path, *flags: str) -> AsyncIterator[Followed]:
    file.write_text(START)  # noqa: ASYNC240 - nobody waits
    line = [f"--config={file}", *flags]
    settings, engine = load(line, {}), Engine()
    switches = OptimizationSwitches(settings.optimizations, engine)
    caches = AnswerCaches(settings.cache, engine, "")
    caches.now()
    counts = Counter[str]()
    reloader = Reloader(settings, lambda: load(line, {}), engine, switches, caches, counts, interval=0.01)
    task = asyncio.create_task(reloader.run())
    try:
        yield Followed(file, engine, switches, caches, reloader, counts)
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await caches.aclose()


@pytest.fixture
async def followed(tmp_path: Path) -> AsyncIterator[Followed]:
    level = logging.getLogger().level
    async with following(tmp_path / "config.yaml") as one:
        yield one
    logging.getLogger().setLevel(level)


async def test_switches_log_level_and_caches_follow_the_file(followed: Followed) -> None:
    cache = "cache: {response: {ttl: 7}, semantic: {mode: 'off', error-bound: 0.2}}\n"
    followed.write(f"log-level: debug\noptimizations: {{batching: false, response-cache: false}}\n{cache}")
    await followed.read(reloads=1)
    await followed.until(lambda: followed.engine.switched == [("batching", False)])
    assert followed.engine.level == "debug"
    assert logging.getLogger().level == logging.DEBUG
    assert not followed.switches.on("response_cache")
    caches = followed.caches.now()
    assert caches is not None
    assert (caches.responses._settings.ttl, caches._settings.semantic.error_bound) == (7, 0.2)


async def test_the_semantic_cache_is_turned_on_and_off(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.core.answers.caches.missing_for_semantic", lambda model: ())
    monkeypatch.setattr("cache.open.caches.Exporter.exported", Mock(side_effect=OSError("no room")))
    assert followed.caches.unused() == {"semantic_cache": "cache.semantic.mode is off"}
    followed.write("", START.replace("'off'", "shadow"))
    await followed.until(lambda: followed.caches.semantic_mode is Mode.SHADOW)
    await followed.until(lambda: "cannot be loaded" in followed.caches.unused()["semantic_cache"])
    followed.write("")
    await followed.until(lambda: followed.caches.semantic_mode is Mode.OFF)


async def test_only_a_value_that_changed_takes_back_what_an_operator_set(followed: Followed) -> None:
    await followed.switches.set("graphs", False)
    followed.write("log-level: error\n")
    await followed.read(reloads=1)
    assert not followed.switches.on("graphs")
    followed.write("optimizations: {graphs: false}\n")
    await followed.read(reloads=2)
    followed.write("optimizations: {graphs: true}\n")
    await followed.until(lambda: followed.switches.on("graphs"))


@pytest.mark.parametrize("wrong", ["limits: {queued-requests: -1}", "nonsense: 1", ": : :", "{", "x" * (2 << 20)])
async def test_what_is_wrong_changes_nothing(followed: Followed, wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    followed.write(f"{wrong}\noptimizations: {{batching: false}}\n", "engine: fake\n")
    await followed.read(failures=1)
    assert [r.message for r in caplog.records if r.message.startswith("the settings stay as they are: ")]
    followed.write("log-level: error\n")
    await followed.read(reloads=1, failures=1)
    assert followed.engine.switched == []


async def test_a_file_that_goes_and_comes_and_one_that_is_none(followed: Followed) -> None:
    followed.file.unlink()
    await followed.read(failures=1)
    os.mkfifo(followed.file)
    await followed.read(failures=2)
    followed.write("log-level: error\n")
    await followed.read(reloads=1, failures=2)


async def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces a ConfigMap: `config.yaml` → `..data/config.yaml`, `..data` → a new folder."""
    for number, text in enumerate((START, f"{START}optimizations: {{batching: false}}\n")):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "config.yaml").write_text(text)
        os.utime(tmp_path / f"..{number}" / "config.yaml", ns=(0, 0))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "config.yaml").symlink_to("..data/config.yaml")
    async with following(tmp_path / "config.yaml") as followed:
        (tmp_path / "..new").symlink_to("..1")
        os.replace(tmp_path / "..new", tmp_path / "..data")
        await followed.until(lambda: followed.engine.switched == [("batching", False)])


async def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    """As a projected volume of two ConfigMaps; what is no YAML by its name is passed over."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "20-switches.yaml").write_text("optimizations: {graphs: false}\nlog-level: error\n")
    (folder / "notes.txt").write_text("[")
    async with following(folder / "10-config.yaml", f"--config={folder}") as followed:
        followed.write("log-level: debug\noptimizations: {batching: false}\n")
        await followed.until(lambda: followed.engine.switched == [("batching", False)])
        assert followed.engine.level == ""  # the later file still says `error`
        (folder / "30-more.yaml").write_text("optimizations: {graphs: true}\n")
        await followed.until(lambda: followed.engine.switched[1:] == [("graphs", True)])


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=r"holds no \*\.yaml"):
        load([f"--config={tmp_path}"], {})


async def test_flags_beat_the_changed_file_too(tmp_path: Path) -> None:
    async with following(tmp_path / "config.yaml", "--optimizations.batching=true") as followed:
        followed.write("optimizations: {batching: false, graphs: false}\n")
        await followed.read(reloads=1)
        await followed.until(lambda: followed.engine.switched == [("graphs", False)])


async def test_on_request_it_is_read_though_it_looks_unchanged(followed: Followed) -> None:
    followed.reloader.now()
    await followed.read(reloads=1)


async def test_a_switch_waits_for_an_engine_that_is_away(followed: Followed) -> None:
    followed.engine.away = 3
    followed.write("optimizations: {batching: false, graphs: false}\n")
    await followed.until(lambda: len(followed.engine.switched) == 2)


async def test_what_needs_a_restart_is_named(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    def named() -> list[str]:
        return [r.message.partition(" ")[0] for r in caplog.records if r.message.endswith("it needs a restart")]

    followed.write("", START.replace("9", "10") + "listen: 127.0.0.1:1\n")
    await followed.read(reloads=1)
    assert set(named()) == {"listen", "limits.queued-requests"}
    caplog.clear()
    followed.write("")  # as it was at the start
    await followed.read(reloads=2)
    assert named() == []


def test_what_changes_live_exists() -> None:
    assert {leaf.name for leaf in leaves(Settings)} >= LIVE_CACHE
