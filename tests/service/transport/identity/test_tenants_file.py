"""The tenants file: what it says, what it may not say, and that it is followed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from engine.api import Priority
from service.config.settings import BadSettings
from service.core.admission.tenants import TenantPolicy
from service.transport.identity import tenants_file
from service.transport.identity.tenants_file import TenantsFile, read_tenants

WHOLE = """
acme: {tokens-per-minute: 600_000, burst: 1200000, requests: 64, priority: normal, metrics: true}
"2026": {requests: 1}
default: {tokens-per-minute: 60000}
"""


def write(path: Path, text: str) -> Path:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)
    return path


def test_what_it_says(tmp_path: Path) -> None:
    policies = read_tenants(write(tmp_path / "t", WHOLE))
    acme = policies.of("acme")
    assert acme == TenantPolicy(
        tokens_per_minute=600_000, burst=1_200_000, requests=64, priority=Priority.NORMAL, metrics=True
    )
    assert policies.of("2026") == TenantPolicy(requests=1)
    assert policies.of("whoever") == policies.of("default") == TenantPolicy(tokens_per_minute=60_000)
    assert policies.of("whoever").most == 60_000
    assert policies.in_metrics == ("acme",)


def test_without_a_default_others_are_not_limited(tmp_path: Path) -> None:
    assert read_tenants(write(tmp_path / "t", "a: {requests: 1}")).of("b") == TenantPolicy()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not YAML"),
        ("", "not a mapping of tenants"),
        ("a: 1", "a is not a mapping of"),
        ("a: {token-per-minute: 1}", "a is not a mapping of"),
        ("2026: {requests: 1}", "entry 1"),
        ('"a b": {}', "entry 1"),
        (f"{'a' * 65}: {{}}", "entry 1"),
        ("a: {requests: 0}", "requests is not a whole number"),
        ("a: {requests: -1}", "requests is not a whole number"),
        ("a: {requests: 1.5}", "requests is not a whole number"),
        ('a: {requests: "1"}', "requests is not a whole number"),
        ("a: {requests: true}", "requests is not a whole number"),
        ("a: {tokens-per-minute: 10000000000000}", "tokens-per-minute is not a whole number"),
        (f"a: {{tokens-per-minute: {'9' * 5000}}}", "tokens-per-minute is not a whole number"),
        ("a: {burst: 5}", "burst needs tokens-per-minute"),
        ("a: {priority: high}", "priority is none of background, normal, interactive"),
        ("a: {priority: 1}", "priority is none of"),
        ("a: {metrics: acme}", "metrics is neither"),
        ("a: {}\na: {}", "is not YAML"),
        ("a: &x {requests: 1}\nb: *x", "is not YAML"),
        ("a: [[[[[[]]]]]]", "is not YAML"),
        ("a: {", "is not YAML"),
        ("a: {} #" + "x" * (4 << 20), "larger than 4 MiB"),
    ],
)
def test_what_it_may_not_say(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadSettings, match=said) as caught:
        read_tenants(write(tmp_path / "t", text))
    assert str(caught.value).startswith("auth.tenants-file: ")
    assert len(str(caught.value)) < 400


def test_a_fifo_or_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "none", "."):
        with pytest.raises(BadSettings):
            read_tenants(tmp_path / name)


@pytest.mark.product
def test_it_is_followed_and_one_that_is_wrong_leaves_the_old_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ConfigMap's file is a link that is pointed elsewhere."""
    counted: list[str] = []
    read = threading.Event()

    def count(outcome: str) -> None:
        counted.append(outcome)
        read.set()

    def point(text: str) -> None:
        read.clear()
        (tmp_path / f"v{len(counted)}").write_text(text)
        (tmp_path / "link").symlink_to(tmp_path / f"v{len(counted)}")
        (tmp_path / "link").rename(tmp_path / "t")
        assert read.wait(60)

    def requests() -> int | None:
        return file.policies().of("a").requests

    (tmp_path / "first").write_text("a: {requests: 1}")
    (tmp_path / "t").symlink_to(tmp_path / "first")
    file = TenantsFile(tmp_path / "t", count)
    assert requests() == 1
    point("a: {requests: 20}")
    assert requests() == 20
    point("a: {requests: many}")
    assert requests() == 20
    assert counted == ["read", "invalid"]
    read.clear()
    file.reload()
    assert read.wait(60)
    assert counted == ["read", "invalid", "invalid"]
    read.clear()
    monkeypatch.setattr(tenants_file, "read_tenants", lambda path: 1 / 0)
    file.reload()
    assert read.wait(60)
    assert counted == ["read", "invalid", "invalid", "invalid"]  # whatever was wrong
