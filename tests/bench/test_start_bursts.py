"""Bursts of calls over bare sockets, against a server that runs."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from bench import own_server
from bench.start import BurstCallers
from bench.start import bursts_main as main

pytestmark = pytest.mark.proof

FAKE = ("--engine=fake", "--optimizations.response-cache=false", "--cache.semantic.mode=off")


def test_each_burst_has_a_first_token_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--together", "1", "3", "--bursts", "2", "--turns", "1", "--gap", "0.01", "--tokens", "2", *FAKE
    assert main(given) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split(" together")[0].split() for line in table] == [["this", "tree", "1"], ["this", "tree", "3"]]
    found = json.loads(last)
    assert found["gap_s"] == 0.01
    assert found["flags"] == list(FAKE)
    sizes = {one["together"]: [len(burst) for burst in one["first_tokens_ms"]] for one in found["bursts"]}
    assert sizes == {1: [1, 1], 3: [3, 3]}
    times = [time for one in found["bursts"] for burst in one["first_tokens_ms"] for time in burst]
    assert all(0 < time < 60_000 for time in times)


def test_a_call_that_is_refused_is_no_first_token() -> None:
    with own_server.server(FAKE) as server:
        refused = pytest.raises(RuntimeError, match=r"calls ended with \[3, 3\]")
        with closing(BurstCallers(server.address, 2)) as callers, refused:
            callers.burst(2, prompt=4, tokens=1_000_000, gap=0.0)
