"""What every result says of itself: the commit and the machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def revision(tree: Path = ROOT) -> str:
    """The commit, with a mark where the tree differs from it; empty without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=tree, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()


def device() -> str:
    """The GPU, or the processor with its cores."""
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
    """Bytes of GPU memory that the driver counts for a process, or for all; None where it does not say."""
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
