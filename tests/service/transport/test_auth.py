"""Tokens: whom they stand for, what they allow, and files that are wrong."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from service.config.settings import BadSettings
from service.core.errors import PermissionDenied, Unauthenticated
from service.transport.auth import Caller, NoTokens, Right, TokenFile, read_tokens


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


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("service.transport.auth.time.monotonic", lambda: now[0])
    path = tmp_path / "t"
    path.write_text(entry())
    tokens = TokenFile(path)

    def works(token: str) -> bool:
        now[0] += 2
        try:
            tokens.authorize(bearer(token), Right.GENERATE)
        except Unauthenticated:
            return False
        return True

    assert works("secret")
    path.write_text(entry(token="longer secret"))
    assert works("longer secret")
    assert not works("secret")
    path.write_text("- broken")
    assert works("longer secret")
    path.unlink()
    assert works("longer secret")
    other = tmp_path / "other"
    other.write_text(entry(token="third"))
    os.replace(other, path)
    assert works("third")
    assert not works("longer secret")
