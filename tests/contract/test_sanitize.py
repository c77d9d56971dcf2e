"""The sanitizers' run: what it keeps of the tests, what it reads from the tool, and that nothing outlives it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts import sanitize

TESTS = """\
tests/a.py::test_x[a b-1] PASSED     [ 50%]
tests/a.py::test_y FAILED            [100%]
"""
TOLD = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at head+0x10
========= ERROR SUMMARY: 1 error
"""


def test_cases_are_spread_over_all() -> None:
    assert sanitize.spread(10, 3) == [0, 4, 9]
    assert sanitize.spread(10, 1) == [0]
    assert sanitize.spread(2, 4) == [0, 1]


def test_what_was_found_is_told_and_is_not_clean() -> None:
    found = sanitize.outcome(TESTS, TOLD)
    assert found.passed == ["tests/a.py::test_x[a b-1]"]
    assert found.failed == ["tests/a.py::test_y"]
    assert dict(found.findings) == {"Invalid __global__ read of size 4 bytes": 1}
    assert not found.clean


def test_without_the_tools_summary_nothing_is_clean() -> None:
    passed = TESTS.splitlines()[0]
    assert sanitize.outcome(passed, TOLD.splitlines()[0] + "\n========= ERROR SUMMARY: 0 errors\n").clean
    assert not sanitize.outcome(passed, TOLD.splitlines()[0]).clean
    assert not sanitize.outcome("", "========= ERROR SUMMARY: 0 errors\n").clean  # no test ran


@pytest.mark.proof
def test_what_a_tool_left_running_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    # Holds the pipe open for as long as it lives.
    tool.write_text(f"#!/bin/sh\nsleep 1000 3<>{tmp_path}/alive &\n")
    tool.chmod(0o755)
    os.mkfifo(tmp_path / "alive")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert sanitize.main(["--files", "test_none.py", "--tools", "memcheck", "--logs", str(tmp_path)]) == 1
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""  # returns once nobody holds the other end
    finally:
        os.close(reader)
