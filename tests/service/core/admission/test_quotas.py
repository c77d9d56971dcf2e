"""Tokens of tenants: a bucket alone, and one that several servers draw on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cache.api import BreakerState, BucketSize, Grant, StoreFault
from service.core.admission.quotas import FREE, Bill, Quotas
from service.core.admission.tenants import NoPolicies, TenantPolicies, TenantPolicy
from service.core.errors import Overloaded

MINUTE = 6000  # tokens; 100 a second


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Policies(NoPolicies):
    """Changed at will."""

    def __init__(self, **of: TenantPolicy) -> None:
        self.now = TenantPolicies(of)

    def policies(self) -> TenantPolicies:
        return self.now


class MemoryBuckets:
    """What Redis is, without Redis."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.budget = 1.0
        self.down = False
        self.asked = 0
        self.levels: dict[str, tuple[float, float]] = {}
        self.states: dict[str, BreakerState] = {}

    async def settle(self, tenant: str, size: BucketSize, owed: float, wanted: float) -> Grant:
        self.asked += 1
        await asyncio.sleep(0)
        if self.down:
            raise StoreFault("down")
        level, since = self.levels.get(tenant, (size.most, self.clock.now))
        level = min(size.most, level + size.per_second * (self.clock.now - since)) - owed
        granted = min(wanted, max(0.0, float(int(level))))
        self.levels[tenant] = min(size.most, level - granted), self.clock.now
        return Grant(granted, level - granted)

    async def aclose(self) -> None: ...


def quota(clock: Clock, buckets: MemoryBuckets | None = None, **policy: int) -> Quotas:
    policies = Policies(a=TenantPolicy(**({"tokens_per_minute": MINUTE} | policy)))  # type: ignore[arg-type]
    return Quotas(policies, buckets, clock)


async def refusal(quotas: Quotas, tenant: str = "a") -> float:
    """When to come back."""
    with pytest.raises(Overloaded) as caught:
        await quotas.open(tenant)
    assert caught.value.reason == "TENANT_TOKENS"
    return caught.value.retry_after


async def spend(quotas: Quotas, tokens: int) -> None:
    with await quotas.open("a") as bill:
        bill.charge(tokens)


async def test_who_has_no_quota_is_charged_nothing() -> None:
    quotas = Quotas()
    assert await quotas.open("a") is FREE
    assert quotas.left("a") is None
    assert await quota(Clock()).open("b") is FREE


async def test_nothing_begins_below_zero_until_it_is_paid_back() -> None:
    clock = Clock()
    quotas = quota(clock)
    with await quotas.open("a") as bill:
        bill.charge(MINUTE + 1000)
        assert quotas.left("a") == -1000
        for _ in range(50):
            assert 10.0 <= await refusal(quotas) <= 13.0
        bill.charge(500)  # what runs is not stopped
    clock.now += 14.9
    await refusal(quotas)
    clock.now += 0.2
    await quotas.open("a")


async def test_no_more_is_saved_up_than_the_burst() -> None:
    clock = Clock()
    quotas = quota(clock, burst=200)
    await spend(quotas, 0)
    clock.now += 3600
    assert quotas.left("a") == 200


async def test_a_quota_that_changes_counts_at_once() -> None:
    clock, policies = Clock(), Policies(a=TenantPolicy(tokens_per_minute=MINUTE))
    quotas = Quotas(policies, None, clock)
    await spend(quotas, MINUTE)
    await refusal(quotas)
    policies.now = TenantPolicies({"a": TenantPolicy(tokens_per_minute=60 * MINUTE)})
    clock.now += 0.01
    await quotas.open("a")
    policies.now = TenantPolicies()
    assert await quotas.open("a") is FREE


async def test_of_many_who_come_at_once_no_more_begin_than_the_bucket_is_expected_to_hold() -> None:
    """Before it is known what they take, a hundredth of the quota each."""
    quotas = quota(Clock())
    bills = [await quotas.open("a") for _ in range(100)]
    await refusal(quotas)
    for bill in bills:
        with bill:
            bill.charge(20)
    bills = []
    while len(bills) < 1000:
        try:
            bills.append(await quotas.open("a"))
        except Overloaded:
            break
    assert len(bills) == pytest.approx(MINUTE * 0.01 * 100 / 20 - 100, abs=2)


async def test_what_is_charged_is_held_no_longer() -> None:
    quotas = quota(Clock())
    await spend(quotas, 1000)
    with await quotas.open("a") as bill:
        for _ in range(1000):
            bill.charge(1)
        assert quotas.left("a") == MINUTE - 2000
        bills = [await quotas.open("a") for _ in range(4)]
        await refusal(quotas)
    for one in bills:
        one.__exit__(None, None, None)
        one.__exit__(None, None, None)
    assert len([await quotas.open("a") for _ in range(4)]) == 4


async def test_what_runs_on_for_others_is_charged() -> None:
    quotas = quota(Clock())
    with await quotas.open("a") as bill:
        bill.charge(1)
    bill.charge(99)
    assert quotas.left("a") == MINUTE - 100


async def test_refusals_are_counted() -> None:
    counts = Counter[str]()
    quotas = Quotas(Policies(a=TenantPolicy(tokens_per_minute=MINUTE)), None, Clock(), counts)
    await spend(quotas, 2 * MINUTE)
    await refusal(quotas)
    assert counts == {"TENANT_TOKENS": 1}


# Several servers


async def simulate(servers: list[Quotas], clock: Clock, seconds: float, seed: int) -> int:
    """Tokens that were used where far more is asked for than the quota allows."""
    draw = random.Random(seed)
    live: list[tuple[Bill, int]] = []
    used = 0
    end = clock.now + seconds
    while clock.now < end:
        for server in servers:
            for _ in range(3):
                try:
                    live.append((await server.open("a"), draw.randint(5, 40)))
                except Overloaded:
                    break
        going, live = live, []
        for bill, left in going:
            bill.charge(1)
            used += 1
            if left > 1:
                live.append((bill, left - 1))
            else:
                bill.__exit__(None, None, None)
        clock.now += 0.01
        await asyncio.sleep(0)
    return used


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [1, 2, 5])
async def test_servers_together_keep_to_one_quota(count: int, seed: int) -> None:
    clock = Clock()
    buckets = MemoryBuckets(clock)
    servers = [quota(clock, buckets) for _ in range(count)]
    used = await simulate(servers, clock, 60.0, seed)
    allowed = MINUTE + MINUTE  # what was saved up, and a minute
    assert 0.9 * allowed <= used <= 1.05 * allowed
    for server in servers:
        await server.aclose()


async def test_a_round_trip_is_rare() -> None:
    clock = Clock()
    buckets = MemoryBuckets(clock)
    quotas = quota(clock, buckets)
    await spend(quotas, 1)
    for _ in range(50):
        await spend(quotas, 1)
    assert buckets.asked <= 2
    await quotas.aclose()


async def test_an_empty_bucket_is_not_asked_for_each_refusal() -> None:
    clock = Clock()
    buckets = MemoryBuckets(clock)
    one, other = quota(clock, buckets), quota(clock, buckets)
    await spend(one, 2 * MINUTE)
    await asyncio.sleep(0.1)  # the debt is told beside requests
    asked = buckets.asked
    for _ in range(100):
        assert 55 <= await refusal(other) <= 80
    assert buckets.asked <= asked + 1
    for server in (one, other):
        await server.aclose()


async def test_while_the_store_is_down_each_server_keeps_to_the_whole_quota() -> None:
    clock = Clock()
    buckets = MemoryBuckets(clock)
    servers = [quota(clock, buckets) for _ in range(2)]
    for server in servers:
        await spend(server, 500)
    buckets.down = True
    clock.now += 2.0
    used = await simulate(servers, clock, 30.0, 1)
    assert used <= 1.05 * 2 * (MINUTE + MINUTE / 2)
    assert used >= 0.9 * 2 * (MINUTE + MINUTE / 2 - 300)
    buckets.down = False
    for _ in range(3):
        clock.now += 1.5
        used = await simulate(servers, clock, 0.01, 2)
    before = clock.now
    used = await simulate(servers, clock, 60.0, 3)
    assert clock.now - before > 59
    assert used <= 1.05 * 2 * MINUTE, "back within the one quota"
    for server in servers:
        await server.aclose()


async def test_tokens_that_were_borrowed_lapse() -> None:
    clock = Clock()
    buckets = MemoryBuckets(clock)
    quotas = quota(clock, buckets)
    await spend(quotas, 1)
    asked = buckets.asked
    clock.now += 61
    await spend(quotas, 1)
    assert buckets.asked > asked
    await quotas.aclose()


async def test_an_answer_of_the_store_that_is_late_lets_the_request_begin() -> None:
    clock = Clock()
    buckets = MemoryBuckets(clock)
    buckets.budget = 0.0
    quotas = quota(clock, buckets)
    assert await quotas.open("a") is not FREE
    await quotas.aclose()
