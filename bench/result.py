"""Gives all benches' results one form, with the commit, a hash of the measured code and the machine."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ("engine", "quant/checkpoint")
# Bench → folders and files whose code it measures. What has no line measures the whole server.
MEASURED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("decode", "offline", "steps", "speculation", "engine_cpu", "quantized_cpu", "compare"), ENGINE),
    **dict.fromkeys(("attention", "constrained", "gated", "kernels", "machine", "products", "sampling"), ENGINE),
    **dict.fromkeys(("batch", "matrix", "sampled", "soak", "step", "throughput", "two_pass", "two_gpus"), ENGINE),
    **dict.fromkeys(("quality", "kept"), ("engine", "quant")),
    **dict.fromkeys(("pairs",), ("cache/semantic",)),
    **dict.fromkeys(("prefix",), ("cache", *ENGINE)),
    **dict.fromkeys(("front", "two_fronts", "overload"), ("service", "engine/fake", "engine/client", "engine/ipc")),
    "constraints": ("engine/constraints",),
    "peers": ENGINE,
}
SERVER = ("service", "cache", *ENGINE)
_CODE = (".py", ".cu", ".cuh", ".c", ".h")


def measured_code(bench: str) -> tuple[str, ...]:
    """Folders that a bench measures, by its name or by the first word of it."""
    return MEASURED.get(bench) or MEASURED.get(bench.partition("_")[0], SERVER)


def code_hash(bench: str, root: Path = ROOT) -> str:
    """Hashes all code that a bench measures, names included: 12 hexadecimal digits. Comments count."""
    files: dict[str, bytes] = {}
    for name in measured_code(bench):
        paths = [root / name] if (root / name).is_file() else sorted((root / name).rglob("*"))
        files |= {one.relative_to(root).as_posix(): one.read_bytes() for one in paths if one.suffix in _CODE}
    return digest(files)


def digest(files: Mapping[str, bytes]) -> str:
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Samples:
    """One figure, measured once a round, for comparisons."""

    unit: str
    values: tuple[float, ...]

    @property
    def less_is_better(self) -> bool:
        """Whether lower is better: rates are good when high, times and bytes when low."""
        return not (self.unit.endswith("/s") or self.unit == "share")


@dataclass(frozen=True, slots=True)
class Result:
    """`figures` has what a bench measured in its own form. `samples` has, by name, what comparisons use."""

    bench: str
    settings: Mapping[str, Any]
    figures: Mapping[str, Any]
    samples: Mapping[str, Samples] = field(default_factory=dict)
    revision: str = ""  # where git is not
    device: str = ""  # where it is another machine's

    def record(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "revision": self.revision or revision(),
            "code": code_hash(self.bench),
            "device": self.device or device(),
            "settings": {name: _plain(value) for name, value in self.settings.items()},
            "figures": self.figures,
            "samples": {name: {"unit": one.unit, "values": list(one.values)} for name, one in self.samples.items()},
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def finish(result: Result, output: Path | None = None) -> int:
    """Prints the one JSON line that every bench ends in, and keeps it in a file where one is named. Returns 0."""
    text = json.dumps(result.record(), ensure_ascii=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(text + "\n", "utf-8")
    print(text, flush=True)
    return 0


def load(path: Path) -> dict[str, Any]:
    """Loads a result that `finish` wrote. Raises ValueError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict) or not {"bench", "code", "figures", "samples"} <= found.keys():
        raise ValueError(f"{path}: not a result of whippet bench")
    return found


@functools.cache
def revision(tree: Path = ROOT) -> str:
    """Returns the commit, with a mark where the tree differs from it; the version of an installed wheel, which has no
    git."""
    if not (tree / ".git").exists():
        return _version() if tree == ROOT else ""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=tree, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()


def _version() -> str:
    from service.version import version

    return f"v{version()}"


def device() -> str:
    if gpu := _gpu():
        return gpu
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _gpu() -> str:
    try:
        import torch  # seconds, and not everybody who measures has it
    except ImportError:
        return "".join(name for (name,) in _smi("--query-gpu=name")[:1])
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def gpu_bytes(pid: int | None = None) -> int | None:
    """Returns the driver's count of GPU memory for a process, or for all; None where it has none."""
    if pid is None:
        return _mebibytes([used for (used,) in _smi("--query-gpu=memory.used")])
    return _mebibytes([used for one, used in _smi("--query-compute-apps=pid,used_memory") if one == str(pid)])


def _mebibytes(counted: list[str]) -> int | None:
    return sum(map(int, counted)) << 20 if counted and all(map(str.isdigit, counted)) else None


def _smi(query: str) -> list[list[str]]:
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True)
    except OSError:
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]


def run_one_of(default: Callable[..., object] | None, **others: Callable[..., object]) -> int:
    """Runs the `main` that the first word of the command line names, else `default`. Returns the exit code."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in others:
        del sys.argv[1]
        return _code(others[word]())
    if default is None:
        raise SystemExit(f"name one of {', '.join(others)}")
    return _code(default())


def summary(main: Callable[..., object]) -> str | None:
    """Returns the first line of a docstring, for `--help`."""
    return main.__doc__.splitlines()[0] if main.__doc__ else None


def _code(returned: object) -> int:
    return returned if isinstance(returned, int) else 0
