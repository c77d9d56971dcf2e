"""Counts the cores that this process may use, within its affinity and its container's share of time. Standard library
only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """At least 1. A fractional share is rounded down: a further thread would be throttled again and again."""
    shares = [len(os.sched_getaffinity(0)), *_quotas(root)]
    return max(1, int(min(shares)))


def _quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time by each control group (v2: `cpu.max`, v1: `cpu.cfs_quota_us`)."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            tops: tuple[str, ...] = ("", "unified")
        elif "cpu" in controllers.split(","):
            tops = (controllers, "cpu")
        else:
            continue
        for top in tops:
            yield from _limits(mounted / top, path)


def _limits(top: Path, path: str) -> Iterator[float]:
    """In a container without a namespace of its own the path is the host's, and a missing file limits nothing."""
    group = Path(os.path.normpath(top / path.lstrip("/")))  # `..`, where the group lies outside of our namespace
    for folder in {top, *(one for one in (group, *group.parents) if one.is_relative_to(top))}:
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        try:
            if int(quota) > 0 and int(period) > 0:
                yield int(quota) / int(period)
        except ValueError:  # `max`, or nothing
            continue


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
