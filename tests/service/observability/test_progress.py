"""Progress of loading, on a terminal and in a log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from service.observability.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress()
    for done in (0, 1 << 20, 3 << 20, 4 << 20):
        progress("weights", done, 4 << 20)
    progress("capture", 2, 2)
    last = terminal.getvalue().split("\r")
    assert any("weights: 100%" in line and "4.00M/4.00M" in line for line in last)
    assert any("capture: 100%" in line and "2/2" in line for line in last)


def test_a_log_gets_the_end_of_each_phase(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO)
    progress = Progress()
    for done in range(0, 101):
        progress("weights", done << 20, 100 << 20)
    progress("capture", 3, 3)
    assert "weights: 100.0 MiB of 100.0 MiB" in caplog.messages
    assert "capture: 3 of 3" in caplog.messages
    assert len(caplog.messages) < 10
