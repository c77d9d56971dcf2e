"""Who asks what and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving.jobs import LoadRequest
from bench.workloads import Source, counts, of_trace, of_workload, poisson, rates, read_prompts


def test_arrivals_are_as_many_as_the_rate_says_and_the_same_for_a_seed() -> None:
    source = Source(8, 4)
    requests = poisson(50.0, 40.0, source, 3)
    assert requests == poisson(50.0, 40.0, source, 3)
    assert requests != poisson(50.0, 40.0, source, 4)
    assert 1700 < len(requests) < 2300
    times = [request.at or 0.0 for request in requests]
    assert times == sorted(times)
    assert len({request.number for request in requests}) == len(requests)


def test_prompts_are_texts_or_objects(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('plain words\n\n{"text": "said", "max_tokens": 3}\n')
    read = read_prompts(file, 7)
    assert [(request.text, request.tokens) for request in read] == [("plain words", 7), ("said", 3)]
    assert [request.text for request in Source(1, 1, read).take(3)] == ["plain words", "said", "plain words"]
    for bad in ("\n", '{"words": "none"}\n'):
        file.write_text(bad)
        with pytest.raises(ValueError, match="prompts"):
            read_prompts(file, 7)


def test_a_trace_keeps_its_times_and_leaves_out_what_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [(0, 600, 10, [1, 2]), (500, 90_000, 10, [3]), (2000, 20, 5, [1])]
    lines = [dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), row, strict=True)) for row in rows]
    file.write_text("\n".join(map(json.dumps, lines)))
    requests, long = of_trace(file, 2.0, None, 4096)
    assert requests == [LoadRequest(0, 600, 10, 0.0, blocks=(1, 2)), LoadRequest(1, 20, 5, 1.0, blocks=(1,))]
    assert long == 1
    with pytest.raises(ValueError, match="no request fits"):
        of_trace(file, 1.0, None, 8)


def test_workloads_and_lists() -> None:
    assert of_workload("n2", 5, 6) == [LoadRequest(0, 5, 6), LoadRequest(1, 5, 6)]
    assert (list(counts("1,16")), list(rates("0.5,2"))) == ([1, 16], [0.5, 2.0])
    for bad in ("0", "1,-1", "x"):
        with pytest.raises(ValueError, match=r"^$|invalid literal"):
            counts(bad)
    with pytest.raises(ValueError, match=r"^$"):
        rates("1,0")
