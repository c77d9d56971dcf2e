"""How the engine process is launched."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient, child
from engine.settings import EngineSettings


def test_the_engine_process_finds_the_packages_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are not installed: the folder that holds `engine` leads the path that it is given."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: launched.append(options))
    child._launch(0, 1, "fake")
    first = Path(launched[0]["env"]["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "engine" / "worker" / "process.py").is_file()


def test_a_process_that_was_begun_ends_unless_somebody_has_taken_it() -> None:
    one, other = child.Begun("fake"), child.Begun("fake")
    one.end()
    assert one.take()[1].poll() == -signal.SIGKILL
    ours, process, _ = other.take()
    other.end()
    assert process.poll() is None
    ours.close()
    assert process.wait(60) == 0  # nobody tells it what to load


async def test_what_was_begun_is_the_first_process() -> None:
    begun = child.Begun("fake")
    client = EngineClient(EngineSettings(model="", kind="fake"), begun=begun)
    await client.start()
    assert client.pid == begun.take()[1].pid
    await client.close()
    begun.end()
