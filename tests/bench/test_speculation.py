"""What speculation brings, measured on a few tokens: what is written down, and that answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import speculation
from bench.speculation import Beside, SpeculationRun
from engine.execution.speculation.costs import Costs

pytestmark = pytest.mark.proof


def test_a_record_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    asked = "--device cpu --threads 1 --parts texts --proposers both --sets quote --prompts 1 --tokens 24 --seconds 0"
    for _ in range(2):
        assert speculation.main([*asked.split(), "--append", str(kept), "--revision", "it"]) == 0
    (one,) = json.loads(kept.read_text())
    assert (one["model"], one["proposer"], one["prompts"], one["k"]) == ("demo", "both", "quote", None)
    assert one["same"]
    assert 0 < one["acceptance"] <= 1, "a quotation is guessed"
    assert min(one["tokens_per_second"], one["baseline_tokens_per_second"]) > 0
    assert "quote" in capsys.readouterr().out


def test_what_a_table_foretells() -> None:
    """Steps of one second, a fifth more for a token drafted; ten tokens, by five rounds or by ten steps."""

    def run(steps: tuple[tuple[int, int], ...], seconds: float) -> SpeculationRun:
        return SpeculationRun(tokens=10, seconds=seconds, steps=steps, proposed=5, accepted=5, ids=())

    found = Beside(on=(run(((5, 3),), 7.0),), off=(run(((10, 0),), 20.0),), turns=1)
    with_drafts = speculation.needed(found, 1, 3.0, lambda drafted: 1 + drafted / 5)
    assert with_drafts == pytest.approx(5 * 1.2 + 3.0 - 1.2)  # a draft of one, in a round with room for three
    assert speculation.plain(found, None, lambda drafted: 1.0) == 10.0
    assert speculation.plain(found, Costs({1: 1.0}), lambda drafted: 1.0) == 20.0  # a GPU's plain steps, as they were
