"""Tokens: whom they stand for, what they allow, and files that are wrong."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config.settings import BadSettings
from service.core.errors import PermissionDenied, Unauthenticated
from service.transport.auth import Caller, NoTokens, Right
from service.transport.token_file import TokenFile, read_tokens
from tests.service.conftest import PATIENCE


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def entry(tenant: str = "acme", token: str = "secret", rights: str = "[generate]") -> str:
    return f'- {{tenant: {tenant}, sha256: "{digest(token)}", rights: {rights}}}\n'


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "test"), ("authorization", f"Bearer {token}"))


def test_without_a_file_everyone_may_everything() -> None:
    for right in Right:
        assert NoTokens().authorize((), right) == Caller("default", frozenset(Right))


def test_a_token_stands_for_its_tenant_and_rights(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(entry() + entry("ops", "root", "[admin, generate]"))
    tokens = TokenFile(path)
    assert tokens.authorize(bearer("secret"), Right.GENERATE).tenant == "acme"
    assert tokens.authorize(bearer("root"), Right.ADMIN).tenant == "ops"
    with pytest.raises(PermissionDenied):
        tokens.authorize(bearer("secret"), Right.ADMIN)
    for metadata in (
        (),
        bearer("wrong"),
        bearer(""),
        bearer(digest("secret")),
        (("authorization", "secret"),),
        (("authorization", "Basic secret"),),
    ):
        with pytest.raises(Unauthenticated):
            tokens.authorize(metadata, Right.GENERATE)
    assert tokens.authorize((("authorization", b"bearer secret"),), Right.GENERATE).tenant == "acme"


def test_two_tokens_of_a_tenant_are_two_callers(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(entry(token="one") + entry(token="two"))
    names = [TokenFile(path).authorize(bearer(token), Right.GENERATE).name for token in ("one", "two", "one")]
    assert names[0] == names[2] != names[1]
    assert "" not in names
    assert not any(name in digest(token) for name in names for token in ("one", "two"))


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
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(BadSettings) as caught:
        read_tokens(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert digest("secret") not in str(caught.value)


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadSettings):
            read_tokens(path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(BadSettings):
        read_tokens(tmp_path / "latin")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def knows(tokens: TokenFile, token: str) -> bool:
    try:
        tokens.authorize(bearer(token), Right.GENERATE)
    except Unauthenticated:
        return False
    return True


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


def test_a_fifo_and_a_giant_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(20 << 20)
    for name, problem in (("fifo", "no file"), ("giant", "larger than 4 MiB")):
        with pytest.raises(BadSettings, match=problem):
            read_tokens(tmp_path / name)
