"""How a job is cut, what its prompts are, and what counts as an accepted stream that did not end once."""

from __future__ import annotations

import msgspec
import pytest

from bench.serving.jobs import EndedRequest, LoadJob, LoadRequest, bucket, counted_quantile, ids_of, shared_out, summed


def test_a_job_is_shared_out_whole() -> None:
    requests = [LoadRequest(number, 4, 2) for number in range(10)]
    for processes in (1, 3, 4):
        parts = shared_out(LoadJob(0.0, requests, streams=7), processes)
        assert sum(part.streams for part in parts) == 7
        assert sorted(request.number for part in parts for request in part.requests) == list(range(10))
    assert [part.streams for part in shared_out(LoadJob(0.0, requests, streams=2), 4)] == [1, 1]
    assert [len(part.requests) for part in shared_out(LoadJob(0.0, requests), 4)] == [3, 3, 2, 2]


def test_prompts_are_as_long_as_asked_and_differ() -> None:
    prompts = {tuple(ids_of(LoadRequest(number, 40, 1), 300)) for number in range(50)}
    assert len(prompts) == 50
    assert all(len(ids) == 40 and min(ids) >= 3 and max(ids) < 300 for ids in prompts)


def test_equal_blocks_of_a_trace_are_equal_ids() -> None:
    one, two = (ids_of(LoadRequest(number, 700, 1, blocks=(4, last)), 1000) for number, last in enumerate((5, 6)))
    assert len(one) == len(two) == 700
    assert one[:512] == two[:512]
    assert one[512:] != two[512:]


def test_quantiles_of_counts_are_right_to_a_hundredth() -> None:
    values = [0.001 * (1 + at) for at in range(1000)]
    counts = summed({bucket(value): 1} for value in values)
    for share in (0.5, 0.95, 0.99):
        assert counted_quantile(counts, share) == pytest.approx(values[int(1000 * share)], rel=0.011)
    assert counted_quantile({}, 0.5) == 0.0


WELL = EndedRequest(0.0, 0.0, ended=2.0, first=1.0, last=2.0, tokens=3, messages=3, code="OK", wanted=3, finishes=1)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, False),
        ({"finishes": 0}, True),
        ({"finishes": 2}, True),
        ({"late": True}, True),
        ({"tokens": 2}, True),
        ({"code": "UNAVAILABLE", "finishes": 0}, True),
        ({"code": "DEADLINE_EXCEEDED"}, True),
        ({"code": "RESOURCE_EXHAUSTED", "finishes": 0, "messages": 0, "tokens": 0}, False),
        ({"finishes": 0, "messages": 0, "tokens": 0}, True),
    ],
)
def test_an_accepted_stream_ends_once(change: dict[str, object], wrong: bool) -> None:
    assert msgspec.structs.replace(WELL, **change).wrong is wrong
