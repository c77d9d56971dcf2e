"""Which connections give way."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from service.transport.port.surplus import Host, surplus


@dataclass(frozen=True)
class Connection:
    host: Host
    idle_since: float | None
    name: str = ""


def some(address: str, since: range, busy: int = 0) -> list[Connection]:
    """Idle ones, and some that are busy."""
    host = Host.of(address)
    return [*(Connection(host, float(at), address) for at in since), *[Connection(host, None, address)] * busy]


def test_up_to_the_bound_nobody_goes() -> None:
    held = some("192.0.2.1", range(20)) + some("192.0.2.2", range(20)) + some("127.0.0.1", range(20))
    assert surplus(held, 80) == []


def test_the_longest_idle_of_the_most_crowded_address_goes_first() -> None:
    crowd, quiet = some("192.0.2.1", range(10, 50)), some("192.0.2.2", range(15))
    local = some("127.0.0.1", range(15))
    held = [*crowd, *quiet, *local]
    random.Random(7).shuffle(held)
    assert surplus(held, 64) == crowd[:6]


def test_who_is_busy_never_goes() -> None:
    held = some("192.0.2.1", range(4), busy=60) + some("192.0.2.2", range(1), busy=20)
    gone = surplus(held, 64)
    assert len(gone) == 5
    assert all(one.idle_since is not None for one in gone)


def test_an_address_has_three_quarters_at_most() -> None:
    assert len(surplus(some("127.0.0.1", range(64)), 64)) == 16
    assert len(surplus(some("127.0.0.1", range(8), busy=48), 64)) == 8, "its newcomers go where it is busy"


def test_an_eighth_is_kept_for_the_loopback() -> None:
    """For probes of this machine, whatever others hold."""
    others = [one for number in range(64) for one in some(f"192.0.2.{number}", range(number, number + 1))]
    assert surplus(others, 64) == others[:8]
    local = some("127.0.0.1", range(8))
    assert surplus([*others[8:], *local], 64) == []


def test_where_every_address_has_one_the_longest_idle_goes() -> None:
    others = [one for number in range(200) for one in some(f"192.0.2.{number}", range(number, number + 1))]
    random.Random(7).shuffle(others)
    gone = surplus(others, 64)
    assert {one.idle_since for one in gone} == set(range(144))


@pytest.mark.parametrize(
    ("address", "name", "local"),
    [
        ("192.0.2.7", "192.0.2.7", False),
        ("::ffff:192.0.2.7", "192.0.2.7", False),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("127.3.2.1", "127.3.2.1", True),
        ("::1", "::", True),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::", False),  # who has one address of a network has all of it
        ("fe80::1%eth0", "fe80::", False),
    ],
)
def test_who_counts_as_one(address: str, name: str, local: bool) -> None:
    assert Host.of(address) == Host(name, local)


def test_addresses_of_one_name_are_told_apart_by_loopback() -> None:
    """`::1` and other addresses of its network differ in nothing else."""
    held = some("::1", range(20)) + some("::2", range(20))
    assert len(surplus(held, 30)) == 10
