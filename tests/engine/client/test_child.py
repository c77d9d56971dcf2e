"""How the engine process is launched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.client import child


def test_the_engine_process_finds_the_packages_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are not installed: the folder that holds `engine` leads the path that it is given."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: launched.append(options))
    child._launch(0, 1)
    first = Path(launched[0]["env"]["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "engine" / "worker" / "process.py").is_file()
