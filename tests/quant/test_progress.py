"""Progress on a terminal and off it."""

from __future__ import annotations

import io

from quant.progress import Bars, Lines, progress_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    bars = progress_display()
    assert isinstance(bars, Bars)
    for done in range(5):
        bars("samples", done, 4)
    bars.close()
    assert "samples: 100%" in screen.getvalue()
    assert screen.getvalue().count("\n") == 1


def test_a_log_has_a_line_now_and_then(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    assert isinstance(progress_display(), Lines)
    now = 0.0
    lines = Lines(lambda: now)
    for done in range(1, 1001):
        lines("samples", done, 1000)
        now += 0.125
    lines("layers", 3, 4)
    lines("layers", 4, 4)
    lines("layers", 4, 4)
    lines.close()
    said = log.getvalue().splitlines()
    assert said[0] == "samples 1 of 1,000"
    assert said[1] == "samples 121 of 1,000, 1:50 left"
    assert len(said) == 1 + 8 + 1 + 2
    assert said[-3:] == ["samples 1,000 of 1,000", "layers 3 of 4", "layers 4 of 4"]
