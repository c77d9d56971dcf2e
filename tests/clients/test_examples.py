"""The examples, run as their README says, against a whole server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.conftest import ROOT, Server

EXAMPLES = ROOT / "examples"
NODE = shutil.which("node") or "node"
# Command → what it needs in its environment.
COMMANDS = {
    "python": (
        [sys.executable, str(EXAMPLES / "python" / "stream.py")],
        {"PYTHONPATH": str(ROOT / "clients" / "python")},
    ),
    "node": ([NODE, str(EXAMPLES / "node" / "stream.js")], {"NODE_PATH": str(ROOT / ".tools" / "node_modules")}),
}


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, needs = COMMANDS[name]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **needs, **environment}
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_it_streams_an_answer(server: Server, name: str) -> None:
    said = run(name, "hello", server.data)
    assert said.returncode == 0, said.stderr
    assert "64 tokens" in said.stderr
    assert len(said.stdout) > 16


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_is_wrong(server: Server, name: str, tmp_path: Path) -> None:
    said = run(name, "hello", server.data, WHIPPET_TOKEN="t")
    assert said.returncode == 0, said.stderr
    said = run(name, "", server.data)
    assert said.returncode != 0
    assert "Traceback" not in said.stderr
    assert "text" in said.stderr
