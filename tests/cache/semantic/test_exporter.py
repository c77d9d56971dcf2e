"""The export beside a server: in a process of its own, which says why it failed and ends when it is told to."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache.api import CacheSettings, Mode, ModelIdentity, SemanticSettings
from cache.open.caches import open_caches
from cache.open.counters import Counters
from cache.semantic.export import UNDER_WAY, ExportFailed, default_source, found
from cache.semantic.exporter import Exporter

pytestmark = pytest.mark.product

PATIENCE = 60.0  # seconds
MODEL = ModelIdentity(weights="w" * 64, tokenizer="t" * 64)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("WHIPPET_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept" / "embedders"


def wait_for_one(folder: Path, files: str = "") -> None:
    """Until an export is under way there, with `files`."""
    end = time.monotonic() + PATIENCE
    while not any(folder.glob(f"{UNDER_WAY}*{files}")):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_what_is_there_is_found(exported_embedder: Path) -> None:
    exporter = Exporter()
    exporter.stop()  # it has nothing to do that could be stopped
    assert exporter.exported() == exported_embedder


def test_it_can_be_stopped_and_leaves_nothing_behind(kept: Path) -> None:
    exporter, said = Exporter(), list[str]()

    def export() -> None:
        with pytest.raises(ExportFailed) as failed:
            exporter.exported()
        said.append(str(failed.value))

    thread = threading.Thread(target=export)
    thread.start()
    wait_for_one(kept)
    exporter.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert "ended with" in said[0]
    assert list(kept.iterdir()) == []
    with pytest.raises(ExportFailed, match="stopped"):
        exporter.exported()


_STUBBORN = """
import pathlib, signal, subprocess, sys, time
work = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
write = "import pathlib, sys, time\\nwhile True: (pathlib.Path(sys.argv[1]) / str(time.monotonic_ns())).touch()"
work.mkdir(parents=True)
subprocess.run([sys.executable, "-c", write, str(work)])
"""


def test_one_that_ignores_signals_leaves_nothing_behind(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a process that it started, which writes until the end."""
    monkeypatch.setattr("cache.semantic.exporter.command", lambda *given: [sys.executable, "-c", _STUBBORN, given[-1]])
    exporter = Exporter()
    with ThreadPoolExecutor(1) as pool:
        export = pool.submit(exporter.exported)
        wait_for_one(kept, "/*")
        exporter.stop()
        with pytest.raises(ExportFailed, match="ended with -9"):
            export.result(PATIENCE)
    assert list(kept.iterdir()) == []


def test_why_it_failed_is_told(kept: Path) -> None:
    kept.parent.touch()
    with pytest.raises(ExportFailed, match=r"Not a directory: .*/kept/embedders"):
        Exporter().exported()


def test_caches_that_close_do_not_wait_for_it(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def close_while_it_exports() -> list[threading.Thread]:
        caches = open_caches(CacheSettings(semantic=SemanticSettings(mode=Mode.ON)), MODEL, Counters())
        caches.load_semantic()
        await asyncio.to_thread(wait_for_one, kept)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("embedder")]
        await caches.aclose()
        return threads

    (thread,) = asyncio.run(close_while_it_exports())
    thread.join(PATIENCE)
    assert not thread.is_alive(), "an interpreter that ends would wait for it"
    assert list(kept.iterdir()) == []
    assert found(default_source()) is None
    told = [record.message for record in caplog.records if record.levelno >= logging.INFO]
    assert [line for line in told if not line.startswith("cache: ")] == []
