"""A command on a terminal of its own."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.service.conftest import PATIENCE, ROOT


class Terminal:
    """100 columns, 40 lines. Killed where it has not ended with the `with` block."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        environ = {**os.environ, "COLUMNS": "100", "LINES": "40", **(environment or {})}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)
        self.said = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._at = 0  # of `said`: the end of what was waited for last

    def until(self, pattern: str) -> str:
        """Reads until that was said after the last thing that was waited for; all between them."""
        end = time.monotonic() + 2 * PATIENCE
        while (match := re.compile(pattern).search(self.said, self._at)) is None:
            assert time.monotonic() < end, self.said[-2000:]
            if select.select([self._master], [], [], 0.1)[0]:
                self.said += self._decoder.decode(os.read(self._master, 65536))
        before, self._at = self.said[self._at : match.start()], match.end()
        return before

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def rest(self) -> str:
        """All that was said, once the command has ended."""
        try:
            while data := os.read(self._master, 65536):
                self.said += self._decoder.decode(data)
        except OSError:  # EIO: it has closed the terminal
            pass
        return self.said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
