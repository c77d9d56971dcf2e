"""`whippet cache replay` on excerpts of public traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import replay as command
from bench.replay import LruBlocks, interval, main, replay_prefix
from bench.workloads import read_blocks
from service.cli import main as whippet

DATA = Path(__file__).parent / "data"
MOONCAKE, CLINC = DATA / "mooncake_600.jsonl.gz", DATA / "clinc_500.json"


def test_a_block_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", f"--blocks={MOONCAKE}", "--capacity=500", "--capacity=2000"]) == 0
    out = capsys.readouterr().out
    assert "whole prompts: 600 lookups" in out
    for capacity in (500, 2000, None):
        rate = 100 * replay_prefix(read_blocks(MOONCAKE), LruBlocks(capacity)).rate
        size = "all blocks" if capacity is None else f"{capacity} blocks"
        assert f"room for {size}: {rate:.2f} % of blocks hit" in out


@pytest.mark.product
def test_questions_with_their_false_hits_and_the_anchor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", f"--questions={CLINC}", "--limit=150", "--cosine", "--threshold=0.85"]) == 0
    out = capsys.readouterr().out
    assert "semantic, on: 150 lookups" in out
    assert "cosine 0.85 alone: 150 lookups" in out
    assert out.count("false hits:") == 2
    assert "tokens:" in out
    assert "95 % interval" in out


def test_the_limit_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", f"--blocks={MOONCAKE}", "--limit=7"]) == 0
    assert "whole prompts: 7 lookups" in capsys.readouterr().out
    low, high = interval(0, 0)
    assert (low, high) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--blocks FILE"),
        (["--blocks=/none"], "/none"),
        ([f"--blocks={CLINC}"], "not a block trace"),
        ([f"--questions={CLINC}", "--part=none"], "not a set"),
    ],
)
def test_what_is_no_trace(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("words", [["--limit=0"], ["--capacity=x"], ["--mode=off"], []])
def test_flags_that_are_wrong(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", *words] if words else [])


def test_without_the_embedder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "missing", lambda model: ("onnxruntime",))
    assert main(["replay", f"--questions={CLINC}"]) == 1
    assert "onnxruntime is not installed" in capsys.readouterr().err


@pytest.mark.product
def test_the_command_runs_it_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["replay", f"--blocks={MOONCAKE}", "--limit=7"]
    assert main(words) == 0
    here = capfd.readouterr().out
    assert whippet(["cache", *words]) == 0
    assert capfd.readouterr().out == here
    assert whippet(["cache", "replay", "--blocks=/none"]) == 2
    assert "/none" in capfd.readouterr().err
    assert whippet(["cache", "replay", "--limit=0"]) == 2
    assert "--limit" in capfd.readouterr().err
