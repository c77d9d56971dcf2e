"""Progress of loading, on a terminal and in a log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from service.observability.progress import ProgressReporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = ProgressReporter()
    for done in (0, 1 << 20, 3 << 20, 4 << 20):
        progress("weights", done, 4 << 20)
    progress("capture", 2, 2)
    last = terminal.getvalue().split("\r")
    assert any("weights: 100%" in line and "4.00M/4.00M" in line for line in last)
    assert any("capture: 100%" in line and "2/2" in line for line in last)


def test_a_log_gets_a_line_a_second_and_the_end_of_a_long_phase(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO)
    now = 0.0
    progress = ProgressReporter(lambda: now)
    for done in range(0, 101, 4):
        now += 0.25
        progress("weights", done << 20, 100 << 20)
    assert caplog.messages[0] == "weights: 16.0 MiB of 100.0 MiB"
    assert caplog.messages[-1] == "weights: 100.0 MiB of 100.0 MiB"
    assert len(caplog.messages) == 7


def test_a_log_gets_nothing_of_short_phases_and_of_imports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO)
    now = 0.0
    progress = ProgressReporter(lambda: now)
    for phase in ("imports", "weights", "capture"):
        progress(phase, 0, 3)
        now += 0.5 if phase != "imports" else 9
        progress(phase, 3, 3)
    assert caplog.messages == []
    assert progress.phases == {"imports": 1.0, "weights": 1.0, "capture": 1.0}
