"""Descriptors are divided before they are short."""

from __future__ import annotations

import resource

import pytest

from service.transport.process.descriptors import divide


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "had", "spare"),
    [
        (1024, 1024, None, 512, 21),  # what most systems give
        (256, 4096, 4096, 512, 512),
        (1024, 1_048_576, 65_536, 512, 512),
        (1024, resource.RLIM_INFINITY, 65_536, 512, 512),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 512, 512),
        (600, 600, None, 104, 16),
        (100, 100, None, 16, 16),
    ],
)
def test_limits(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    raised: int | None,
    had: int,
    spare: int,
) -> None:
    """The soft limit is raised, and what is left for connections is told where it is less than was wanted."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: seen.append(limits))
    assert divide(512) == (had, spare)
    assert seen == ([] if raised is None else [(raised, hard)])
    assert len(caplog.records) == (had < 512)
