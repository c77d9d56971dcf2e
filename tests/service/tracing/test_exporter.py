"""The exporter beside a collector that is slow, gone or in a bad mood."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.observability.record import RecordBuilder, RequestRecord
from service.tracing import exporter as module
from service.tracing.exporter import TraceExporter
from service.tracing.spans import sampled, spans_of
from tests.properties import example_count
from tests.service.certificates import HERE, Authority
from tests.service.tracing.collector import PATIENCE, Collector

NOBODY = "http://127.0.0.1:1"


def record(method: str = "whippet.v1.ModelService/ListModels", trace_id: str = "") -> RequestRecord:
    builder = RecordBuilder(method, arrived_at=5.0)
    builder.code, builder.ended_at, builder.trace_id, builder.traced = "OK", 6.0, trace_id, True
    builder.span()
    return builder.build()


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


@asynccontextmanager
async def exporting(endpoint: str, roots: bytes | None = None) -> AsyncIterator[TraceExporter]:
    one = TraceExporter(endpoint, 1.0, "m", {"service.name": "test"}, roots)
    try:
        yield one
    finally:
        await one.close()


async def until(one: TraceExporter, **counts: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while any(one.counts[name] < count for name, count in counts.items()):  # noqa: ASYNC110 - a test may look
            await asyncio.sleep(0.01)


@pytest.mark.product
async def test_what_waits_is_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 100)
    async with exporting(NOBODY) as one:
        for number in range(1000):
            one(record(trace_id=f"{number + 1:032x}"))
        assert len(one._waiting) == 100
        assert one._waiting[-1].trace_id.endswith(f"{1000:x}")
        assert one.counts["queue"] == 900
    assert sum(one.counts.values()) == 1000
    assert one.counts["shutdown"] == 100


async def test_a_batch_is_tried_again_and_given_up(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    async with exporting(collector.endpoint) as one:
        collector.fails = grpc.StatusCode.UNAVAILABLE
        one(record())
        await until(one, failed=1)
        assert collector.asked == module._ATTEMPTS
        collector.fails = None
        one(record())
        await until(one, exported=1)


async def test_what_is_refused_is_not_sent_twice(collector: Collector) -> None:
    async with exporting(collector.endpoint) as one:
        collector.fails = grpc.StatusCode.INVALID_ARGUMENT
        one(record())
        await until(one, refused=1)
        assert collector.asked == 1
        collector.fails, collector.rejects = None, 1
        one(record())
        await until(one, refused=2)


async def test_health_and_what_no_service_has_are_not_traced() -> None:
    async with exporting(NOBODY) as one:
        methods = ("grpc.health.v1.Health/Check", "unknown", "whippet.v1.ModelService/ListModels")
        assert [one.sample(RecordBuilder(method)) for method in methods] == [False, False, True]


async def test_a_collector_that_comes_late_gets_what_waited(collector: Collector) -> None:
    collector.fails = grpc.StatusCode.UNAVAILABLE
    async with exporting(collector.endpoint) as one:
        for _ in range(10):
            one(record())
        await asyncio.to_thread(collector.until, lambda: collector.asked > 0)
        collector.fails = None
        await until(one, exported=10)


async def test_a_collector_with_a_certificate_is_trusted_by_its_authority_alone() -> None:
    authority = Authority("of the collector")
    collector = Collector(grpc.ssl_server_credentials([authority.sign(*HERE)]))
    try:
        async with exporting(collector.endpoint, Authority("another").pem) as one:
            one(record())
        assert one.counts["exported"] == 0
        async with exporting(collector.endpoint, authority.pem) as one:
            one(record())
            await until(one, exported=1)
    finally:
        collector.close()


STAMPS = st.none() | st.floats(0, 10)


@settings(max_examples=example_count(200), deadline=None)
@given(
    st.tuples(*[STAMPS] * 4),
    st.floats(0, 5),
    st.tuples(*[st.none() | st.floats(0, 10)] * 3),
    st.sampled_from(["", "follower"]),
)
def test_spans_fit_into_each_other_whatever_the_stamps(
    stamps: tuple[float | None, ...], lookup: float, took: tuple[float | None, ...], role: str
) -> None:
    builder = RecordBuilder("whippet.v1.GenerationService/Generate", arrived_at=2.0)
    builder.ended_at, builder.lookup, builder.role, builder.traced = 9.0, lookup, role, True
    builder.read_at, builder.admitted_at, builder.looked_up_at, builder.submitted_at = stamps
    builder.queue, builder.prefill, builder.decode = took
    builder.span()
    call, *below = spans_of(builder.build(), "m")
    assert below[0].start_time_unix_nano == call.start_time_unix_nano
    assert below[-1].end_time_unix_nano == call.end_time_unix_nano
    for span in below:
        assert span.parent_span_id == call.span_id
        assert call.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    for one, following in pairwise(below):
        assert one.end_time_unix_nano == following.start_time_unix_nano


def test_servers_decide_alike_of_one_trace() -> None:
    ids = [f"{number:032x}" for number in range(0, 2**64, 2**64 // 1000)]
    assert sum(sampled("", one, 0.25) for one in ids) in range(249, 253)
    assert not any(sampled("", one, 0.0) for one in ids)
    assert all(sampled("", one, 1.0) for one in ids)
