"""Builds our Dockerfile as a container engine would, by the tools of this machine, and serves from the result.

make image-proof, or as root:  python -m scripts.image_proof [--target cpu] [--work FOLDER]

The base is Debian by debootstrap. Each stage is a folder; each RUN is the Dockerfile's own command in a chroot. The
server then runs as the image's user, from a read-only root, in a network of its own that has nothing but loopback, with
the volume and /tmp as Kubernetes gives them (mode 0777), and grpcurl asks it from outside the chroot.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.dockerfile import Instruction, Stage, image, kept, stages
from scripts.image_serving import Serving

ROOT = Path(__file__).parents[1]
SUITE = "bookworm"
BASE = "base"  # the build argument that names the base
FORBIDDEN = ("cc", "gcc", "clang", "c++", "ld", "make", "pip", "curl", "wget", "git", "grpcurl")
# What this machine needs to reach its package registries, brought into the chroot while a step runs.
REACH = ("/etc/resolv.conf", "/etc/apt/sources.list.d/debian.sources", "/etc/apt/apt.conf.d")
TRUSTED, TRUSTED_THERE = "/etc/ssl/certs/ca-certificates.crt", "/run/trusted.crt"
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds stages below `work`, each once for as long as what it is made of stays the same."""

    stages: dict[str, Stage]
    work: Path
    context: Path
    arguments: dict[str, str]
    shared: tuple[str, ...]  # folders of this machine that steps may read

    def build(self, name: str) -> Path:
        root, done, made_of = self.work / name, self.work / f"{name}.done", self._made_of(name)
        if done.exists() and done.read_text() == made_of:
            return root
        done.unlink(missing_ok=True)
        stage = self.stages[name]
        if stage.base == "scratch":
            root.mkdir(parents=True, exist_ok=True)
        else:
            base = self.build(stage.base) if stage.base in self.stages else self._debian()
            step(f"{name}: FROM {stage.base}", lambda: _copy(base, root))
        for one in stage.instructions:
            self._do(name, root, one)
        done.write_text(made_of)
        return root

    def _made_of(self, name: str) -> str:
        """Hashes a stage's instructions, the files and stages that it copies, and its base."""
        stage = self.stages[name]
        found = hashlib.sha256(repr((stage, self.arguments)).encode())
        found.update(self._made_of(stage.base).encode() if stage.base in self.stages else b"")
        for origin, words, _ in filter(None, map(_copies, stage.instructions)):
            found.update(self._made_of(origin).encode() if origin else b"")
            for word in () if origin else words:
                paths = [self.context / word, *sorted((self.context / word).rglob("*"))]
                for path in filter(Path.is_file, paths):
                    found.update(f"{path}\0".encode() + path.read_bytes())
        return found.hexdigest()

    def _debian(self) -> Path:
        root = self.work / BASE
        if not (self.work / f"{BASE}.done").exists():
            make = ["debootstrap", "--variant=minbase", SUITE, str(root)]
            step(f"debootstrap {SUITE}", lambda: run([*make, *([mirror] if (mirror := _mirror()) else [])]))
            (self.work / f"{BASE}.done").touch()
        return root

    def _do(self, name: str, root: Path, one: Instruction) -> None:
        if one.word == "RUN":
            step(f"{name}: RUN {one.rest[:100]}", lambda: self._run(name, root, one.rest))
        elif (copies := _copies(one)) is not None:
            origin, words, target = copies
            source = self.build(origin) if origin else self.context
            step(f"{name}: COPY {one.rest}", lambda: _copy_in(source, words, root, target))

    def _run(self, name: str, root: Path, text: str) -> None:
        """Runs in a mount namespace, so that no mount stays."""
        found = image(self.stages, name)
        mounts = ["set -e", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        for path in (*REACH, TRUSTED, *self.shared):
            there = Path(f"{root}{TRUSTED_THERE if path == TRUSTED else path}")
            if Path(path).is_dir():
                there.mkdir(parents=True, exist_ok=True)
            else:
                there.parent.mkdir(parents=True, exist_ok=True)
                there.touch()
            mounts.append(f"mount --bind {path} {there} && mount -o remount,ro,bind {there}")
        given = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **found.env,
            **self._given(name),
        }
        given |= {key: os.environ[key] for key in PROXIES if key in os.environ} | {"PIP_CERT": TRUSTED_THERE}
        listed = [f"{key}={value}" for key, value in given.items()]
        command = ["chroot", str(root), "env", "--ignore-environment", f"--chdir={found.folder}", *listed]
        script = "\n".join([*mounts, 'exec "$@"'])
        run(["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "-", *command, "sh", "-c", text])
        for path in self.shared:
            shutil.rmtree(f"{root}{path}", ignore_errors=True)

    def _given(self, name: str) -> dict[str, str]:
        declared = {one.rest for one in self.stages[name].instructions if one.word == "ARG"}
        return {key: value for key, value in self.arguments.items() if key in declared}


def _copies(one: Instruction) -> tuple[str, list[str], str] | None:
    """Returns stage (empty: the build's context), sources, target."""
    if one.word != "COPY":
        return None
    *words, target = one.rest.split()
    origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
    return origin, [word.lstrip("/") for word in words], target


def _copy_in(origin: Path, words: list[str], root: Path, target: str) -> None:
    for word in words:
        source, there = origin / word, Path(f"{root}{target}")
        if source.is_dir():
            shutil.copytree(source, there, dirs_exist_ok=True, symlinks=True)
        else:
            there = there / source.name if target.endswith("/") else there
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, there)


def _context(folder: Path) -> Path:
    """Copies what git has of this tree, as far as .dockerignore permits."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = (ROOT / ".dockerignore").read_text()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: kept(ignored, name), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def _mirror() -> str | None:
    path = Path("/etc/apt/sources.list.d/debian.sources")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split()[1] for line in lines if line.startswith("URIs:")), None)


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    run(["cp", "--archive", "--reflink=auto", str(source), str(target)])


def run(command: list[str]) -> None:
    """Prints the output only where it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-4000:]}\nfailed with {done.returncode}: {' '.join(command)[:300]}")


def step(what: str, do: Callable[[], None]) -> None:
    began = time.monotonic()
    do()
    print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)


def tools(root: Path) -> list[str]:
    folders = ("opt/whippet/venv/bin", "usr/local/bin", "usr/bin", "usr/sbin", "bin", "sbin")
    return sorted({name for name in FORBIDDEN for folder in folders if (root / folder / name).exists()})


def _links() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.image_proof")
    parser.add_argument("--target", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/whippet-image"), help="kept, and used again")
    flags = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("a chroot and mounts need root")
    wheels = _links()
    arguments = {"BASE": BASE, "TORCH_WHEELS": wheels, "VERSION": "proof", "REVISION": "proof"}
    found = stages((ROOT / "Dockerfile").read_text(), arguments)
    builder = Builder(
        found, flags.work, _context(flags.work / "context"), arguments, tuple(filter(os.path.isdir, wheels.split()))
    )
    root = builder.build(flags.target)
    billed = builder.build(f"sbom-{flags.target}") / "sbom.json"
    size = int(subprocess.run(["du", "-sm", str(root)], capture_output=True, text=True, check=True).stdout.split()[0])
    print(
        f"{size} MiB in {root}; its bill of materials has {len(json.loads(billed.read_text())['components'])} packages"
    )
    if left := tools(root):
        sys.exit(f"not to be in the image: {', '.join(left)}")
    Serving(root, image(found, flags.target)).prove()


if __name__ == "__main__":
    main()
