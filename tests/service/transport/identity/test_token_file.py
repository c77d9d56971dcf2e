"""Tokens and certificates: whom they stand for, what they allow, until when, and files that are wrong."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import yaml

from service.config.settings import BadSettings
from service.core.errors import PermissionDenied, Unauthenticated
from service.transport.call.auth import ALL_RIGHTS, CALLER_RIGHTS, Caller, NoTokens, Right, Rights
from service.transport.identity import token_entries
from service.transport.identity.token_entries import read_entries
from service.transport.identity.token_file import TokenFile
from service.transport.port import files
from tests.service.conftest import PATIENCE
from tests.service.transport.presented import Presented, bearer, digest, entry, named

GENERATE, VIEW, ADMIN = (frozenset((right,)) for right in (Right.GENERATE, Right.VIEW, Right.ADMIN))


def test_a_file_that_is_read_gives_way_after_each_burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which each entry takes longer than a burst: the reader pauses after each of them, and meanwhile
    asked the library, which lets no other thread run, for the events of one entry alone."""
    path = tmp_path / "t"
    path.write_text("".join(entry(f"tenant{number}", str(number)) for number in range(200)))
    parse, clock, events, pauses = yaml.parse, itertools.count(), 0, list[int]()

    def counted(*arguments: Any, **options: Any) -> Iterator[yaml.Event]:
        nonlocal events
        for event in parse(*arguments, **options):
            events += 1
            yield event

    monkeypatch.setattr(yaml, "parse", counted)
    slow = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: pauses.append(events))
    monkeypatch.setattr(token_entries, "time", slow)
    assert len(read_entries(path)) == 200
    assert len(pauses) == 200
    assert {after - before for before, after in itertools.pairwise(pauses)} == {10}


def reason(tokens: TokenFile, call: Presented, permitted: Rights = GENERATE) -> str:
    """Of the refusal."""
    with pytest.raises(Unauthenticated) as caught:
        tokens.authorize(call, permitted)
    return caught.value.reason


@pytest.fixture
def tokens_of(tmp_path: Path) -> Callable[..., TokenFile]:
    def make(text: str, **options: Any) -> TokenFile:
        (tmp_path / "t").write_text(text)
        return TokenFile(tmp_path / "t", **options)

    return make


def test_without_a_file_everyone_may_everything_or_what_was_said() -> None:
    for right in Right:
        assert NoTokens().authorize(Presented(), frozenset((right,))) == Caller("default", ALL_RIGHTS)
    assert NoTokens(CALLER_RIGHTS).authorize(Presented(), GENERATE).tenant == "default"
    with pytest.raises(PermissionDenied):
        NoTokens(CALLER_RIGHTS).authorize(Presented(), ADMIN)


def test_a_token_stands_for_its_tenant_and_rights(tokens_of: Callable[..., TokenFile]) -> None:
    tokens = tokens_of(entry() + entry("ops", "root", "[admin, generate]"))
    assert tokens.authorize(bearer("secret"), GENERATE).tenant == "acme"
    assert tokens.authorize(bearer("root"), ADMIN).tenant == "ops"
    assert tokens.authorize(bearer("root"), ADMIN | VIEW).tenant == "ops"  # any of them will do
    with pytest.raises(PermissionDenied, match="view or admin"):
        tokens.authorize(bearer("secret"), ADMIN | VIEW)
    for call, why in (
        (Presented(), "TOKEN_MISSING"),
        (Presented(None), "TOKEN_MISSING"),
        (bearer("wrong"), "TOKEN_UNKNOWN"),
        (bearer(digest("secret")), "TOKEN_UNKNOWN"),
        (bearer(""), "TOKEN_MALFORMED"),
        (Presented((("authorization", "secret"),)), "TOKEN_MALFORMED"),
        (Presented((("authorization", "Basic secret"),)), "TOKEN_MALFORMED"),
    ):
        assert reason(tokens, call) == why
    assert tokens.authorize(Presented((("authorization", b"bearer secret"),)), GENERATE).tenant == "acme"


def test_two_tokens_of_a_tenant_are_two_callers(tokens_of: Callable[..., TokenFile]) -> None:
    tokens = tokens_of(entry(token="one") + entry(token="two"))
    names = [tokens.authorize(bearer(token), GENERATE).name for token in ("one", "two", "one")]
    assert names[0] == names[2] != names[1]
    assert "" not in names
    assert not any(name in digest(token) for name in names for token in ("one", "two"))


def test_a_certificate_stands_for_its_tenant_by_one_of_its_names(tokens_of: Callable[..., TokenFile]) -> None:
    tokens = tokens_of(
        named("URI:spiffe://acme/batch")
        + named("DNS:Batch.Bravo.example", "bravo")
        + named("email:ops@acme.example", "ops", "[view, admin]")
        + entry("gateway-user", "secret")
    )

    def tenant(**names: list[bytes]) -> str:
        return tokens.authorize(Presented((), names), GENERATE | ADMIN).tenant

    assert tenant(peer_uri=[b"spiffe://acme/batch"]) == "acme"
    assert tenant(peer_uri=[b"spiffe://acme/other", b"spiffe://acme/batch"], peer_dns=[b"unknown"]) == "acme"
    assert tenant(peer_dns=[b"batch.BRAVO.example"]) == "bravo"
    assert tenant(peer_email=[b"ops@acme.example"]) == "ops"
    for names, why in (
        ({}, "TOKEN_MISSING"),
        ({"peer_uri": [b"spiffe://acme/batch2"]}, "CERTIFICATE_UNKNOWN"),
        ({"peer_uri": [b"spiffe://ACME/batch"]}, "CERTIFICATE_UNKNOWN"),
        ({"peer_dns": [b"spiffe://acme/batch", b"URI:spiffe://acme/batch"]}, "CERTIFICATE_UNKNOWN"),  # a host's name
        ({"x509_common_name": [b"batch.bravo.example"]}, "TOKEN_MISSING"),
        ({"peer_uri": [b"spiffe://acme/batch"], "peer_dns": [b"batch.bravo.example"]}, "CERTIFICATE_AMBIGUOUS"),
    ):
        assert reason(tokens, Presented((), names)) == why
    known = {"peer_uri": [b"spiffe://acme/batch"]}
    assert tokens.authorize(bearer("secret", **known), GENERATE).tenant == "gateway-user"  # the token wins
    assert reason(tokens, bearer("wrong", **known)) == "TOKEN_UNKNOWN"


def test_an_entry_is_in_force_until_it_expires(tokens_of: Callable[..., TokenFile]) -> None:
    now = [1_800_000_000.0]  # 2027-01-15T08:00:00Z
    until = ", expires: 2027-01-15T08:00:10Z"
    tokens = tokens_of(entry(rest=until) + named("DNS:a", rest=until) + entry(token="other"), clock=lambda: now[0])
    certificate = Presented((), {"peer_dns": [b"a"]})
    now[0] += 9.9
    assert tokens.authorize(bearer("secret"), GENERATE)
    assert tokens.authorize(certificate, GENERATE)
    now[0] += 0.1
    assert reason(tokens, bearer("secret")) == "TOKEN_EXPIRED"
    assert reason(tokens, bearer("secret"), ADMIN) == "TOKEN_EXPIRED"  # before what it would not have permitted
    assert reason(tokens, certificate) == "CERTIFICATE_EXPIRED"
    assert tokens.authorize(bearer("other"), GENERATE)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("2027-01-15T08:00:00Z", 0.0),
        ("2027-01-15 08:00:00Z", 0.0),
        ("2027-01-15T09:30:00+01:30", 0.0),
        ("2027-01-15T08:00:00.25Z", 0.25),
        ('"2027-01-15T08:00:00Z"', 0.0),
    ],
)
def test_times_that_are_read(tmp_path: Path, written: str, seconds: float) -> None:
    (tmp_path / "t").write_text(entry(rest=f", expires: {written}"))
    (only,) = read_entries(tmp_path / "t")
    assert only.expires == 1_800_000_000 + seconds


def test_a_line_says_what_expires_soon(tokens_of: Callable[..., TokenFile], caplog: pytest.LogCaptureFixture) -> None:
    """Without the names of tenants."""
    text = entry() + entry(token="a", rest=", expires: 2027-01-21T08:00:00Z")
    tokens_of(text + entry(token="b", rest=", expires: 2027-01-23T08:00:00Z"), clock=lambda: 1_800_000_000.0)
    until(lambda: "expire" in caplog.text)
    assert (
        "1 entries have expired or will within 7 days; the first is entry 2, 2027-01-21T08:00:00+00:00" in caplog.text
    )
    assert "acme" not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "{a: b}",
        "- 5",
        "- {tenant: a}",
        "- [",
        entry(tenant="'with space'"),
        entry(tenant="''"),
        entry(tenant="5"),
        entry(tenant="2024-05-06"),
        entry(tenant="2024-13-45"),  # no date that there is
        entry(tenant="!!python/name:os.system"),
        entry(tenant="&a b") + entry(tenant="*a"),
        entry(rights="[generate, [[[]]]]"),
        "[" * 100_000,
        "- " * 100_000,
        entry(rights="[]"),
        entry(rights="[everything]"),
        entry(rights="generate"),
        entry(rights="[[generate]]"),
        f"- {{tenant: a, sha256: {'1' * 64}, rights: [generate]}}",  # a number to YAML
        '- {tenant: a, sha256: "abc", rights: [generate]}',
        entry().replace("rights", "right"),
        entry() + entry().replace("acme", "b/c"),
        entry() + entry("bravo"),  # whose is it?
        entry(rest=", tenant: b"),
        entry() + "---\n" + entry(token="b"),
        entry(rest=', san: "DNS:a"'),
        named("a.example"),
        named("IP:1.2.3.4"),
        named("DNS:"),
        named("DNS:a b"),
        named("DNS:A.example") + named("DNS:a.EXAMPLE", "bravo"),
        *(
            entry(rest=f", expires: {wrong}")
            for wrong in ("2027-01-15", "2027-01-15T08:00:00", "5", "~", "soon", "[]", "2027-13-45T08:00:00Z")
        ),
        entry(rest=', expires: "0001-01-01T00:00:00+14:00"'),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(BadSettings) as caught:
        read_entries(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert digest("secret") not in str(caught.value)


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadSettings):
            read_entries(path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(BadSettings):
        read_entries(tmp_path / "latin")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def knows(tokens: TokenFile, token: str) -> bool:
    try:
        tokens.authorize(bearer(token), GENERATE)
    except Unauthenticated:
        return False
    return True


@pytest.mark.product
def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "t"
    path.write_text(entry())
    tokens = TokenFile(path)
    assert knows(tokens, "secret")
    path.write_text(entry(token="longer secret"))
    until(lambda: knows(tokens, "longer secret"))
    assert not knows(tokens, "secret")
    for number, broken in enumerate(("- broken", entry(tenant="2024-13-45"), None), start=1):
        path.unlink() if broken is None else path.write_text(broken)
        tokens.reload()
        until(lambda number=number: len([r for r in caplog.records if "stay in force" in r.getMessage()]) >= number)
        assert knows(tokens, "longer secret")
    other = tmp_path / "other"
    other.write_text(entry(token="third"))
    os.replace(other, path)
    until(lambda: knows(tokens, "third"))
    assert not knows(tokens, "longer secret")
    assert tokens.tenants() == {"acme"}


@pytest.mark.product
def test_a_folder_that_kubernetes_swaps_is_a_change(tmp_path: Path) -> None:
    """`tokens` leads to `..data/tokens`, and `..data` to a folder that is made anew for each version."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokens").write_text(entry(token=version))
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    tokens = TokenFile(tmp_path / "tokens")
    assert knows(tokens, "one")
    (tmp_path / "..next").symlink_to("two")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    until(lambda: knows(tokens, "two"))


@pytest.mark.product
def test_a_file_that_is_being_written_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first half would be YAML, too. Somebody writes on whenever the watch waits for him."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "t"
    path.write_text(entry())
    left = list(range(20))

    class Clock:
        monotonic = time.monotonic

        @staticmethod
        def sleep(seconds: float) -> None:
            if left:
                with path.open("a") as file:
                    file.write(entry(token=str(left.pop(0))))

    tokens = TokenFile(path)
    monkeypatch.setattr(files, "time", Clock)
    with path.open("a") as file:
        file.write(entry(token="first"))
    until(lambda: knows(tokens, "19"))
    until(lambda: "read again" in caplog.text)  # said once its entries are in force
    counts = [record.args for record in caplog.records if "read again" in record.getMessage()]
    assert counts == [(22,)]


def test_a_fifo_and_a_giant_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(20 << 20)
    for name, problem in (("fifo", "no file"), ("giant", "larger than 4 MiB")):
        with pytest.raises(BadSettings, match=problem):
            read_entries(tmp_path / name)


def test_a_token_that_is_known_takes_the_same_path_as_one_that_is_not(tokens_of: Callable[..., TokenFile]) -> None:
    """Line by line, until it is decided. Both are refused, so that nothing else differs."""
    tokens = tokens_of("".join(entry(token=str(number), rights="[view]") for number in range(100)))

    def path(token: str) -> list[tuple[str, int]]:
        lines: list[tuple[str, int]] = []

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                lines.append((frame.f_code.co_name, frame.f_lineno))
            return trace

        sys.settrace(trace)
        try:
            with pytest.raises((Unauthenticated, PermissionDenied)):
                tokens.authorize(bearer(token), GENERATE)
        finally:
            sys.settrace(None)
        return [line for line in lines if line[0] == "_of_token"]

    known, unknown = path("7"), path("stranger")
    assert len(known) == len(unknown) >= 4
    assert known[:-1] == unknown[:-1]
    assert known[-1] != unknown[-1]
