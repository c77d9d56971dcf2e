"""Writes the requirements of the images, every version with its hashes, into requirements/:

python scripts/lock.py          (make lock)

`cpu.txt` and `cuda.txt` are what runs in the target of that name, `build.txt` what makes our own wheel. They follow
pyproject.toml and constraints.txt. PyTorch's wheels for a CPU are looked for in pip's find-links and extra indexes as
well, and only its own build for that (`+cpu`) is accepted, so that no lock of a CPU brings CUDA along.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
PYTHON = "3.11.2"  # Debian 12's, which the images are made of
PLATFORM = "x86_64-manylinux_2_28"
HEAD = "# Written by `make lock` out of pyproject.toml and constraints.txt.\n"
TORCH = "2.13.0"
TARGETS = {"cpu": ("embed", "otel"), "cuda": ("cuda", "embed", "otel")}  # → extras
BUILDS = "cpu"  # what is after a version of PyTorch that has no CUDA in it


def _uv(arguments: list[str]) -> str:
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    always = ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    always += ["--quiet", "--python-version", PYTHON, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    done = subprocess.run(
        [uv, "pip", "compile", *always, "-c", "constraints.txt", *arguments, "-"],
        cwd=ROOT,
        input="",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _links() -> list[str]:
    """Where pip looks besides an index; uv does not read pip's configuration."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
    )
    return [part for link in told.stdout.split() for part in ("--find-links", link)]


def locked(target: str) -> str:
    """The requirements of one target."""
    version = f"{TORCH}+{BUILDS}" if target == BUILDS else TORCH
    extras = [part for extra in TARGETS[target] for part in ("--extra", extra)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as torch:
        torch.write(f"torch=={version}\n")
        torch.flush()
        return _uv([*extras, *(_links() if target == BUILDS else ()), "pyproject.toml", torch.name])


def built_with() -> str:
    """The requirements of pyproject's build."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("hatchling\n")
        wanted.flush()
        return _uv([wanted.name])


if __name__ == "__main__":
    LOCKS.mkdir(exist_ok=True)
    for name, text in [*((target, locked(target)) for target in TARGETS), ("build", built_with())]:
        (LOCKS / f"{name}.txt").write_text(HEAD + text)
        sys.stdout.write(f"requirements/{name}.txt: {text.count('==')} packages\n")
