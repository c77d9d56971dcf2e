"""Whether a tokens file that is read again leaves the interpreter to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from service.transport.token_entries import read_entries
from tests.service.transport.presented import entry


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
