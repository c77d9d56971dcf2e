"""What speculation brings, measured on a few tokens: what is written down, and that answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import speculation


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
