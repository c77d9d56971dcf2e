"""Identical requests at the same time through a real channel: one generation, whoever comes late or leaves."""

from __future__ import annotations

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import as_stream, generated, greedy, said
from tests.service.conftest import Server, refused

pytestmark = pytest.mark.product


def test_a_hundred_at_once_are_one_generation(cached: Server) -> None:
    before = generated(cached)
    request = greedy("all at once", 60)
    calls = [cached.generation.Generate.future(request, timeout=60) for _ in range(60)]
    streams = [cached.generation.GenerateStream(as_stream(request), timeout=60) for _ in range(40)]
    texts = {"".join(message.text for message in stream) for stream in streams} | {c.result().text for c in calls}
    assert len(texts) == 1
    assert generated(cached) == before + 60
    sources = [call.result().finish.cache_source for call in calls]
    assert sources.count(pb.CACHE_SOURCE_NONE) <= 1


def test_a_follower_reads_along_from_the_middle(cached: Server) -> None:
    before = generated(cached)
    request = as_stream(greedy("read along", 400))
    leader = cached.generation.GenerateStream(request, timeout=60)
    head = [next(leader) for _ in range(20)]
    follower = cached.generation.GenerateStream(request, timeout=60)
    first = next(follower)
    assert cached.load().generated_tokens < before + 400  # long before the leader is done
    text = "".join(message.text for message in (*head, *leader))
    rest = list(follower)
    assert first.text + "".join(message.text for message in rest) == text
    assert rest[-1].finish.cache_source == pb.CACHE_SOURCE_RESPONSE


def test_a_leader_whose_client_leaves_goes_on_while_followers_remain(cached: Server) -> None:
    before = generated(cached)
    request = as_stream(greedy("the leader leaves", 150))
    leader = cached.generation.GenerateStream(request, timeout=60)
    for _ in range(5):
        next(leader)
    followers = [cached.generation.GenerateStream(request, timeout=60) for _ in range(2)]
    for follower in followers:
        next(follower)
    leader.cancel()
    rests = [list(follower) for follower in followers]
    assert all(rest[-1].finish.usage.completion_tokens == 150 for rest in rests)
    assert generated(cached) == before + 150


def test_when_all_have_left_the_engine_stops(cached: Server) -> None:
    before = generated(cached)
    request = as_stream(greedy("all leave", 4000))
    calls = [cached.generation.GenerateStream(request, timeout=60) for _ in range(3)]
    for call in calls:
        next(call)
    for call in calls:
        call.cancel()
    load = cached.idle()
    assert load.generated_tokens < before + 4000
    request.cache.response = pb.CACHE_MODE_READ
    request.stopping.max_tokens = 10
    assert said(cached, pb.GenerateRequest.FromString(request.SerializeToString())) == "miss"  # nothing was kept


def test_the_end_of_one_reader_is_not_the_end_of_others(cached: Server) -> None:
    request = as_stream(greedy("ends differ", 1500))
    names = ("first", "second", "third")
    calls = []
    for name in names:
        request.request_id = name
        calls.append(cached.generation.GenerateStream(request, timeout=2.0 if name == "third" else 60))
        next(calls[-1])
    cached.admin.AbortGeneration(admin_pb2.AbortGenerationRequest(request_id="first"), timeout=60)
    assert refused(lambda timeout: list(calls[0])).code is grpc.StatusCode.ABORTED
    assert refused(lambda timeout: list(calls[2])).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert list(calls[1])[-1].finish.usage.completion_tokens == 1500


def test_a_leaders_deadline_is_its_own(cached: Server) -> None:
    before = generated(cached)
    request = as_stream(greedy("one is in a hurry", 1500))
    leader = cached.generation.GenerateStream(request, timeout=2.0)
    next(leader)
    follower = cached.generation.GenerateStream(request, timeout=60)
    next(follower)
    assert refused(lambda timeout: list(leader)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert list(follower)[-1].finish.usage.completion_tokens == 1500
    assert generated(cached) == before + 1500


FRESH = pb.CacheOptions()
FRESH.max_age.FromMilliseconds(500)  # what is on its way may be older than that when it is over


@pytest.mark.parametrize("options", [FRESH, pb.CacheOptions(bypass_prefix=True)], ids=["fresh", "computed anew"])
def test_who_wants_it_for_itself_reads_along_with_nobody(cached: Server, options: pb.CacheOptions) -> None:
    before = generated(cached)
    request = greedy("for itself", 100)
    leader = cached.generation.GenerateStream(as_stream(request), timeout=60)
    head = next(leader)
    request.cache.CopyFrom(options)
    other = cached.generation.GenerateStream(as_stream(request), timeout=60)
    texts = {"".join(message.text for message in call) for call in (other, [head, *leader])}
    assert len(texts) == 1
    assert generated(cached) == before + 200
    cached.admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=60)
