"""Workloads by name, and the list of records that a file keeps of them: for benches with and without gRPC.

`nN`: N requests at once, of so many tokens in and out. `firstN`: one of N tokens in and two out.
`mixed256`: 256 of 100 to 1,024 in and out. `short1024`: 1,024 of 128 in and out.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

Work = list[tuple[int, int]]  # of each request, tokens in and out
# Of a record; two of the same are of one measurement. Flags are there where a server was started with any.
NAMES = ("device", "model", "path", "workload", "revision", "flags")


def workload(name: str, prompt: int, tokens: int) -> Work:
    """By its name."""
    if name == "mixed256":
        generator = random.Random(5)
        return [(generator.randint(100, 1024), generator.randint(100, 1024)) for _ in range(256)]
    if name == "short1024":
        return [(128, 128)] * 1024
    if name.startswith("first") and name[5:].isdigit():
        return [(int(name[5:]), 2)]
    if name[:1] != "n" or not name[1:].isdigit():
        raise ValueError(f"{name!r} is no workload")
    return [(prompt, tokens)] * int(name[1:])


def append(path: Path, records: list[dict[str, object]], names: tuple[str, ...] = NAMES) -> None:
    """Adds to the list in a file, in place of what it has of the same names."""
    held = json.loads(path.read_text()) if path.exists() else []

    def named(one: dict[str, object]) -> str:
        return json.dumps([one.get(name) for name in names])

    fresh = set(map(named, records))
    kept = [one for one in held if named(one) not in fresh]
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in [*kept, *records]) + "\n]\n")
