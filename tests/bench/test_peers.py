"""Peers: the same prompts for all, and what is not installed is named with how to install it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import peers
from bench.peers import KINDS, PeerKind, Whippet

FOLDER = Path(__file__).resolve().parents[2] / "models" / "demo-draft"


def test_prompts_are_of_one_length_and_differ() -> None:
    found = peers.prompts(4, 32, 7, 300)
    assert {len(one) for one in found} == {32}
    assert len({tuple(one) for one in found}) == 4
    assert all(3 <= token < 300 for one in found for token in one)
    assert found == peers.prompts(4, 32, 7, 300)
    assert found != peers.prompts(4, 32, 8, 300)


def test_a_missing_peer_says_how_it_is_installed(tmp_path: Path) -> None:
    absent = PeerKind("other", "no_such_package_here", "pip install other", Whippet)
    assert absent.missing(str(FOLDER), None) == "pip install other"
    gguf = tmp_path / "a.gguf"
    gguf.touch()
    assert "GGUF" in KINDS["llama.cpp"].missing(str(FOLDER), None)
    assert KINDS["whippet"].missing(str(gguf), str(gguf)) == ""
    assert "folder" in PeerKind("other", "json", "", Whippet).missing(str(gguf), str(gguf))


@pytest.mark.product
def test_whippet_answers_and_the_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    result = peers.command(
        [f"--model={FOLDER}", "--peers", "whippet", "llama.cpp", "--streams", "1", "2", "--rounds=1", "--tokens=4"]
    )
    rows = result.figures["rows"]
    assert [row["peer"] for row in rows] == ["whippet, 1 streams", "whippet, 2 streams"]
    assert all(row["tokens_per_second"] > 0 and row["whippet_times"] == 1.0 for row in rows)
    assert "llama.cpp" in result.figures["missing"]
    assert "missing: needs a GGUF file" in capsys.readouterr().out
