"""Three quarters of a minute of what `make soak` does for twenty."""

from __future__ import annotations

import json

import pytest

from bench.soaking.__main__ import main

SECONDS = 45


@pytest.mark.timeout(300)
def test_a_while_of_callers_and_trouble(capfd: pytest.CaptureFixture[str]) -> None:
    code = main([f"--seconds={SECONDS}", "--callers=12", "--pause=1"])
    out = capfd.readouterr().out
    assert code == 0, out
    found = json.loads(out.splitlines()[-1])
    assert found["restarts"] > 0
    assert len(found["trouble"]) > 5
    assert {end.split()[1] for end in found["ends"]} >= {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "UNAUTHENTICATED"}
