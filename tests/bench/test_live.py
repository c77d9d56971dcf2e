"""Benches of a server that runs: drafts, caches, and a switch that is turned off and on again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import decode, live, own_server
from bench.__main__ import NONSENSE, main

pytestmark = pytest.mark.product
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-draft"


@pytest.fixture(scope="module")
def running() -> Iterator[own_server.RunningServer]:
    with own_server.server([f"--model={DEMO}", "--device=cpu", "--scheduler.threads=1"]) as server:
        yield server


def test_rollback_turns_a_switch_off_and_shows_how_it_is_turned_on_again(
    running: own_server.RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["response_cache", f"--target={running.address}", f"--admin={running.admin}", "--answers=2", "--tokens=8"]
    assert live.rollback([*words, f"--output={tmp_path / 'off'}"]) == 0
    out = capsys.readouterr().out
    assert "response_cache: off after" in out
    assert "whippet rollback response_cache --undo" in out
    found = json.loads((tmp_path / "off.json").read_text())
    assert found["figures"]["enabled"] is False
    asked = live.Live(running.address, admin=running.admin)
    assert not {one.name: one.enabled for one in asked.switches()}["response_cache"]
    assert live.rollback([*words, "--undo"]) == 0
    assert {one.name: one.enabled for one in asked.switches()}["response_cache"]
    asked.close()


def test_a_switch_that_there_is_not(running: own_server.RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    where = [f"--target={running.address}", f"--admin={running.admin}"]
    assert live.rollback(["list", *where]) == 0
    assert "prefix_cache" in capsys.readouterr().out
    assert live.rollback(["warp", *where]) == 2


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert live.rollback(["batching", "--target=127.0.0.1:1", "--admin=127.0.0.1:1"]) == 64 + 14
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_drafts_with_and_without(running: own_server.RunningServer) -> None:
    result = live.speculation([f"--target={running.address}", "--rounds=2", "--tokens=12"])
    for one in result.figures["sets"].values():
        assert one["same"]
        assert one["tokens_per_second"] > 0
    assert result.settings["model"] == "demo-draft"


def test_caches(running: own_server.RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "semantic", lambda: {"missing": "not asked here"})
    result = live.cache([f"--target={running.address}", "--rounds=2", "--tokens=8"])
    assert result.figures["same"]
    assert result.figures["cached_tokens"] > 0
    assert result.figures["stored_hits"][1] == 2


def test_the_streams_of_a_server_that_runs(running: own_server.RunningServer) -> None:
    words = [f"--target={running.address}", "--context=16", "--tokens=6", "--rounds=2", "--first=2"]
    result = decode.command(words)
    assert result.figures["served"]["contexts"][16]["tokens_per_second"] > 0
    assert len(result.samples["served, 16 tokens before"].values) == 2
    assert "token" not in result.settings


def test_without_a_model_there_is_nothing_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="name a model"), live.opened(argparse.Namespace(target=None, model=None)):
        pass
    assert main(["offline", "--target=127.0.0.1:1"]) == NONSENSE
    assert "not a server that runs" in capsys.readouterr().err
