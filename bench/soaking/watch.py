"""Memory, descriptors and threads of the server's processes while it is soaked, and whether they grow."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one moment."""

    at: float  # seconds
    front: int  # bytes resident
    engine: int  # bytes resident; 0 where there is none
    descriptors: int  # of the front
    threads: int  # of the front


def growth(points: Sequence[tuple[float, float]]) -> float:
    """How much larger the last of a straight line through (time, size) is than the first, by least squares."""
    if len({at for at, _ in points}) < 2:
        return 0.0
    slope, _ = statistics.linear_regression([at for at, _ in points], [size for _, size in points])
    return slope * (points[-1][0] - points[0][0])


def resident(pid: int) -> int:
    """Bytes; 0 where the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def engine_of(pid: int) -> int | None:
    """The engine process of a front."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            if b"engine.worker.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        except OSError:
            continue
    return None


@dataclass(slots=True)
class Watch:
    """Looks once in a while."""

    pid: int
    every: float = 1.0  # seconds
    samples: list[Sample] = field(default_factory=list)

    def look(self) -> Sample:
        engine = engine_of(self.pid)
        return Sample(
            time.monotonic(),
            resident(self.pid),
            0 if engine is None else resident(engine),
            len(os.listdir(f"/proc/{self.pid}/fd")),
            len(os.listdir(f"/proc/{self.pid}/task")),
        )

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.samples.append(self.look())
            await asyncio.sleep(self.every)

    def grown(self, since: float, until: float) -> tuple[float, float]:
        """Bytes by which front and engine have grown between two moments."""
        seen = [one for one in self.samples if since <= one.at <= until]
        return growth([(one.at, one.front) for one in seen]), growth(
            [(one.at, one.engine) for one in seen if one.engine]
        )
