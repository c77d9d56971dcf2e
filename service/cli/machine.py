"""Reads the machine's processor, memory, package versions and ports from the system."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine.cores import usable_cores

# Of /proc/cpuinfo, x86 and Arm: what matrix products run on.
FEATURES = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
PACKAGES = ("torch", "grpcio", "protobuf", "tokenizers", "safetensors", "jinja2", "msgspec", "pydantic", "uvloop")


@dataclass(frozen=True, slots=True)
class Machine:
    """None where the system does not report it."""

    system: str
    python: str
    cpu: str
    cores: int  # that this process may use
    features: tuple[str, ...]
    memory_bytes: int | None
    free_bytes: int | None  # that could be taken now
    packages: dict[str, str | None]  # name → version
    compiler: str | None  # of C, which products of quantized weights on a CPU and the embedder are made with


@dataclass(frozen=True, slots=True)
class PortState:
    address: str
    problem: str | None


def look(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Machine:
    cpuinfo = _fields(proc / "cpuinfo")
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    memory = _fields(proc / "meminfo")
    total, free = _bytes(memory.get("MemTotal")), _bytes(memory.get("MemAvailable"))
    limit, used = _integer(cgroup / "memory.max"), _integer(cgroup / "memory.current")
    if limit is not None:
        total = limit if total is None else min(total, limit)
        room = max(0, limit - (used or 0))
        free = room if free is None else min(free, room)
    names = os.uname()  # `platform.platform` and `platform.processor` start a process
    return Machine(
        system=f"{names.sysname}-{names.release}-{names.machine}-with-{''.join(platform.libc_ver())}",
        python=platform.python_version(),
        cpu=cpuinfo.get("model name") or names.machine,
        cores=usable_cores(),
        features=tuple(name for name in FEATURES if name in flags),
        memory_bytes=total,
        free_bytes=free,
        packages={name: _version(name) for name in PACKAGES},
        compiler=_compiler(),
    )


def probe(address: str) -> PortState:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, int(port)))
            sock.listen(1)
    except OSError as error:
        return PortState(address, error.strerror or str(error))
    except (ValueError, OverflowError):
        return PortState(address, "write HOST:PORT, [ADDRESS]:PORT for IPv6")
    return PortState(address, None)


def _compiler() -> str | None:
    """Searches as the engine does: $CC, or the first of the usual names."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, (named,) if named else ("cc", "gcc", "clang"))), None)


def _fields(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _bytes(value: str | None) -> int | None:
    number = (value or "").split()
    return int(number[0]) * 1024 if number and number[0].isdigit() else None


def _integer(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" where there is no limit


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
