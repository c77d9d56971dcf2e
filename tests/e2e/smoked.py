"""The smoke script, called as a user calls it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "scripts" / "smoke.sh"
Done = subprocess.CompletedProcess[str]
_OURS = ("ADMIN", "HEALTH", "VERSION", "DRAIN", "TIMEOUT", "TOKEN_FILE", "ADDRESS", "ARGS", "MAKEFLAGS")


def script(*command: str | Path, **environ: str | Path) -> Done:
    """`environ` alone says what is asked, whatever the environment of the tests."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    environment = {**inherited, **{name: str(value) for name, value in environ.items()}}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


def failures(done: Done) -> list[str]:
    """Its lines of checks that failed, which the exit code counts."""
    failed = [line.removeprefix("FAIL ") for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert done.returncode == len(failed), done.stdout + done.stderr
    return failed


def passed(done: Done) -> list[str]:
    return [line.removeprefix("ok   ") for line in done.stdout.splitlines() if line.startswith("ok   ")]
