"""What a sampler sees of its own process."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest

from engine import stacks
from engine.stacks import StackSampler

PATIENCE = 60.0  # seconds after which a test that waits has failed
LINE = re.compile(r"[ -:<-~]+(;[ -:<-~]+)* \d+")  # ASCII, `;` between frames alone


def known_inner(secret: str, seen: threading.Event) -> str:
    seen.wait(PATIENCE)
    return secret


def known_outer(secret: str, seen: threading.Event) -> str:
    return known_inner(secret, seen)


def sampled(until: Callable[[StackSampler], bool], seconds: float = PATIENCE) -> str:
    sampler = StackSampler(seconds)
    sampler.start()
    end = time.monotonic() + PATIENCE
    while not until(sampler):
        assert time.monotonic() < end
        time.sleep(0.01)
    return sampler.finish()


def test_a_thread_is_seen_from_its_outermost_frame_on_and_no_value_is() -> None:
    over = threading.Event()
    thread = threading.Thread(target=known_outer, args=("canary", over), name="known;thread\u2028")
    thread.start()
    text = sampled(lambda sampler: any("known_inner" in str(stack) for stack in sampler._seen))
    over.set()
    thread.join()
    lines = text.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), text
    (found,) = {line.rpartition(" ")[0] for line in lines if line.startswith("known_thread_;")}
    frames = found.split(";")
    here = "tests/engine/test_stacks.py"
    assert [frame.rpartition(":")[0] for frame in frames if here in frame] == [
        f"known_outer ({here}",
        f"known_inner ({here}",
    ]
    assert frames[-1].startswith("Condition.wait (threading.py:")
    assert "canary" not in text
    assert "stack sampler" not in text


def deep(frames: int, until: threading.Event) -> None:
    if frames:
        deep(frames - 1, until)
    else:
        until.wait(PATIENCE)


def test_depth_and_bytes_are_bounded_and_what_is_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MOST_BYTES", 12_000)
    monkeypatch.setattr(stacks, "_MOST_STACKS", 30)
    over = threading.Event()
    threads = [threading.Thread(target=deep, args=(depth, over)) for depth in (*range(60), 300)]
    for thread in threads:
        thread.start()
    text = sampled(lambda sampler: sum(sampler._seen.values()) > 300)
    over.set()
    for thread in threads:
        thread.join()
    assert len(text) < 12_100
    assert all(line.count(";") <= 129 for line in text.splitlines())
    assert re.search(r"^\(stacks left out\) \d+$", text, re.MULTILINE)


def test_one_that_nobody_ends_ends_by_itself() -> None:
    sampler = StackSampler(0.02)
    sampler.start()
    sampler._thread.join(PATIENCE)
    assert not sampler._thread.is_alive()
    sampler.finish()
