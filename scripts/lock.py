"""Writes the requirements of the images, every version with its hashes, into requirements/:

python scripts/lock.py          (make lock)

`cpu.txt` and `cuda.txt` are what runs in the target of that name, `embedder.txt` what exporting the embedder needs
besides, `build.txt` what makes our own wheel. They follow pyproject.toml and constraints.txt. For `cpu.txt` PyTorch is
looked for in pip's find-links as well, and only its own build for CPUs (`+cpu`) will do, so that none of CUDA is in it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
PYTHON = "3.11.2"  # Debian 12's, which the images are made of
PLATFORM = "x86_64-manylinux_2_31"  # the oldest that all have wheels for
HEAD = "# Written by `make lock` out of pyproject.toml and constraints.txt.\n"
TORCH = "2.13.0"
TARGETS = {"cpu": ("embed", "otel"), "cuda": ("cuda", "embed", "otel")}  # → extras
MAKERS = ("onnx", "sentence-transformers")  # of the extra `embed`: needed to export, not to serve
BUILDS = "cpu"  # what is after a version of PyTorch that has no CUDA in it


def _uv(arguments: list[str], wanted: str = "") -> str:
    """`wanted` is requirements besides those that the arguments name."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    always = ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    always += ["--quiet", "--python-version", PYTHON, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    done = subprocess.run(
        [uv, "pip", "compile", *always, "-c", "constraints.txt", *arguments, "-"],
        cwd=ROOT,
        input=wanted,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _links() -> list[str]:
    """Returns pip's sources besides an index, since uv does not read pip's configuration."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
    )
    return [part for link in done.stdout.split() for part in ("--find-links", link)]


def locked(target: str, *, exporting: bool) -> str:
    """Returns the requirements of one target, with what exports the embedder or without."""
    version = f"{TORCH}+{BUILDS}" if target == BUILDS else TORCH
    arguments = [part for extra in TARGETS[target] for part in ("--extra", extra)]
    arguments += _links() if target == BUILDS else []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as never:
        if not exporting:  # whoever asks for them gets them on a platform that there is not
            never.write("".join(f"{name}; sys_platform == 'none'\n" for name in MAKERS))
            never.flush()
            arguments += ["--override", never.name]
        return _uv([*arguments, "pyproject.toml"], f"torch=={version}\n")


def besides(whole: str, part: str) -> str:
    """Returns the entries of a lock that another one lacks."""
    return "".join(entry for entry in entries(whole) if entry not in entries(part))


def entries(text: str) -> list[str]:
    return re.findall(r"^\S+==.*(?:\n    --hash.*)*\n", text, re.MULTILINE)


if __name__ == "__main__":
    found = {target: locked(target, exporting=False) for target in TARGETS}
    makers = {besides(locked(target, exporting=True), found[target]) for target in TARGETS}
    if len(makers) != 1:
        sys.exit("what exports the embedder differs between the targets")
    LOCKS.mkdir(exist_ok=True)
    for name, text in {**found, "embedder": makers.pop(), "build": _uv([], "hatchling\n")}.items():
        (LOCKS / f"{name}.txt").write_text(HEAD + text)
        sys.stdout.write(f"requirements/{name}.txt: {len(entries(text))} packages\n")
