"""Whether a tokens file that is read again leaves the interpreter to others, and streams their tokens."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from service.transport.identity.token_entries import read_entries
from tests.service.conftest import PATIENCE, Server, ask_stream
from tests.service.tenants import metadata
from tests.service.transport.presented import entry

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def test_other_threads_run_while_a_large_file_is_read(tmp_path: Path) -> None:
    """Against the library's own reader, which lets nobody else run: the longest pause of this thread meanwhile."""
    path = tmp_path / "t"
    path.write_text("".join(entry(f"tenant{number}", str(number)) for number in range(8000)))

    def longest_pause(read: Callable[[], object]) -> float:
        reader = threading.Thread(target=read)
        reader.start()
        longest, before = 0.0, time.monotonic()
        while reader.is_alive():
            time.sleep(0.0005)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        reader.join()
        return longest

    ours = min(longest_pause(lambda: read_entries(path)) for _ in range(3))
    library = min(longest_pause(lambda: yaml.load(path.read_text(), Loader=yaml.CSafeLoader)) for _ in range(2))
    assert ours < library / 3


def test_reading_10000_tokens_stalls_no_stream(serve: Serve, tmp_path: Path) -> None:
    """The longest time without a token, in the better of two readings, against how long that reading took."""
    path = tmp_path / "t"
    path.write_text("".join(entry(f"tenant{number}", str(number)) for number in range(10_000)))
    shares: list[float] = []
    with serve(f"--auth.tokens-file={path}", "--fake.step-time=0.005") as one:

        def readings() -> int:
            return one.log.read_text().count("tokens read again: 10000 entries")

        for _ in range(2):
            stream = one.generation.GenerateStream(ask_stream("x", 4000), metadata=metadata("7"), timeout=4 * PATIENCE)
            next(stream)
            known, longest = readings(), 0.0
            one.process.send_signal(signal.SIGHUP)
            begun = before = time.monotonic()
            while readings() == known:
                next(stream)
                now = time.monotonic()
                longest, before = max(longest, now - before), now
            shares.append(longest / (before - begun))
            stream.cancel()
    assert min(shares) < 0.2, shares
