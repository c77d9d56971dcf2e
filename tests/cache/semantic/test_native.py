"""The encoder in C against the same arithmetic written out in numpy, at its limits, and where it cannot be had."""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from scipy.special import erf
from tokenizers import Tokenizer

from cache.semantic import embedder as embedders
from cache.semantic import export, native
from cache.semantic.embedder import MANIFEST, TOKENIZER, open_embedder
from cache.semantic.export import ExportFailed, default_source, make_embedder
from cache.semantic.native import LIBRARY, WEIGHTS, NativeEncoder, NotNative, compile_encoder, write_weights
from cache.semantic.source import REFERENCE
from tests.properties import example_count

Array = npt.NDArray[Any]
Round = Callable[[Array], Array]

able = pytest.mark.skipif(bool(native.lacking()), reason=f"this processor lacks {native.lacking()}")


@dataclass(frozen=True)
class Size:
    width: int = 128
    heads: int = 4
    wide: int = 192
    layers: int = 2
    words: int = 300
    places: int = 130


SIZES = (Size(), Size(heads=2), Size(width=384, heads=12, wide=64, layers=1), Size(width=64, heads=1, wide=64))


def random_weights(size: Size) -> dict[str, Array]:
    random = np.random.default_rng(size.width + size.heads)

    def some(*shape: int, around: float = 0.0, spread: float = 0.3) -> Array:
        return (around + spread * random.standard_normal(shape)).astype(np.float32)

    found = {
        "embeddings.word_embeddings.weight": some(size.words, size.width),
        "embeddings.position_embeddings.weight": some(size.places, size.width),
        "embeddings.token_type_embeddings.weight": some(2, size.width),
    }
    norms = ["embeddings"]
    for number in range(size.layers):
        name = f"encoder.layer.{number}"
        linears = {f"attention.self.{each}": (size.width, size.width) for each in ("query", "key", "value")}
        linears |= {"attention.output.dense": (size.width, size.width)}
        linears |= {"intermediate.dense": (size.wide, size.width), "output.dense": (size.width, size.wide)}
        for each, shape in linears.items():
            found[f"{name}.{each}.weight"] = some(*shape, spread=shape[1] ** -0.5)
            found[f"{name}.{each}.bias"] = some(shape[0])
        norms += [f"{name}.attention.output", f"{name}.output"]
    for name in norms:
        found[f"{name}.LayerNorm.weight"] = some(size.width, around=1.0)
        found[f"{name}.LayerNorm.bias"] = some(size.width)
    return found


def by_channel(weight: Array) -> Array:
    scale = np.abs(weight).max(1, keepdims=True) / 127
    return np.asarray(np.rint(weight / scale) * scale)


def by_row(x: Array) -> Array:
    low = np.minimum(x.min(1, keepdims=True), 0)
    step = (np.maximum(x.max(1, keepdims=True), 0) - low) / 255
    zero = np.floor(0.5 - low / step)
    return np.asarray((np.clip(np.rint(x / step + zero), 0, 255) - zero) * step)


def exact(x: Array) -> Array:
    return x


def bert(weights: dict[str, Array], size: Size, ids: list[int], weigh: Round, act: Round) -> Array:
    """In float64, with whatever rounding of weights and of what goes into a product."""

    def linear(x: Array, name: str) -> Array:
        return np.asarray(act(x) @ weigh(weights[f"{name}.weight"].astype(float)).T + weights[f"{name}.bias"])

    def norm(x: Array, name: str) -> Array:
        x = x - x.mean(1, keepdims=True)
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-12)
        return np.asarray(x * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"])

    x = weigh(weights["embeddings.word_embeddings.weight"].astype(float))[ids]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings")
    for number in range(size.layers):
        name = f"encoder.layer.{number}"
        query, key, value = (
            linear(x, f"{name}.attention.self.{each}").reshape(len(ids), size.heads, -1).transpose(1, 0, 2)
            for each in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 2, 1) * (size.width // size.heads) ** -0.5
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        seen = (shares @ value).transpose(1, 0, 2).reshape(len(ids), -1)
        x = norm(x + linear(seen, f"{name}.attention.output.dense"), f"{name}.attention.output")
        raised = linear(x, f"{name}.intermediate.dense")
        raised = raised * 0.5 * (1 + erf(raised / 2**0.5))
        x = norm(x + linear(raised, f"{name}.output.dense"), f"{name}.output")
    total = x.sum(0)
    return np.asarray(total / np.linalg.norm(total))


@pytest.fixture(scope="module")
def made(exported_embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Size], NativeEncoder]:
    library = exported_embedder / LIBRARY  # of this very source: the folder is named after it
    if not library.is_file():
        library = tmp_path_factory.mktemp("library") / LIBRARY
        compile_encoder(library)

    @cache
    def make(size: Size) -> NativeEncoder:
        folder = tmp_path_factory.mktemp("encoder")
        shutil.copy(library, folder / LIBRARY)
        write_weights(folder / WEIGHTS, random_weights(size), size.layers, size.heads, 1e-12)
        return NativeEncoder(folder)

    return make


@able
@settings(max_examples=example_count(80), deadline=None)
@given(size=st.sampled_from(SIZES), data=st.data())
def test_it_computes_what_it_should(made: Callable[[Size], NativeEncoder], size: Size, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, size.words - 1), min_size=1, max_size=size.places))
    vector = made(size)(ids)
    weights = random_weights(size)
    assert abs(float(np.linalg.norm(vector)) - 1) < 1e-5
    # A value on the edge may be rounded either way, which is why this is not a comparison of digits.
    assert float(vector @ bert(weights, size, ids, by_channel, by_row)) > 0.9999
    assert float(vector @ bert(weights, size, ids, exact, exact)) > 0.995
    assert np.array_equal(made(size)(ids), vector)


@able
@pytest.mark.parametrize("rows", [*range(1, 34), 63, 64, 65, 96, 97, 129, 130])
def test_every_number_of_rows_stays_in_its_room(
    made: Callable[[Size], NativeEncoder], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = SIZES[0]
    ids = list(range(rows))
    encoder = made(size)
    inner = ctypes.addressof(vars(encoder)["_encoder"])
    library = ctypes.CDLL(str(encoder.library))
    library.room.argtypes, library.room.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_size_t
    room = library.room(inner, rows)
    work = np.full(room + 4096, 0xA5, np.uint8)
    begin = -work.ctypes.data % 64
    monkeypatch.setattr(encoder, "_work", work[begin:])
    vector = encoder(ids)
    assert (work[begin + room :] == 0xA5).all()
    assert float(vector @ bert(random_weights(size), size, ids, by_channel, by_row)) > 0.9999


@able
@pytest.mark.parametrize("ids", [[], [300], [-1], [0, 2**31 - 1], [0] * 131])
def test_what_is_outside_its_tables_is_refused(made: Callable[[Size], NativeEncoder], ids: list[int]) -> None:
    with pytest.raises(ValueError, match="130 at most and all below 300"):
        made(SIZES[0])(ids)


@pytest.mark.parametrize("size", [Size(wide=100), Size(width=96, heads=3), Size(heads=8)])
def test_other_shapes_are_refused(tmp_path: Path, size: Size) -> None:
    with pytest.raises(NotNative, match=r"a product of|heads of"):
        write_weights(tmp_path / WEIGHTS, random_weights(size), size.layers, size.heads, 1e-12)


@pytest.mark.product
def test_no_compiler_and_one_that_fails_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NotNative, match="no C compiler: no-such-compiler"):
        compile_encoder(tmp_path / LIBRARY)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(NotNative, match="false: failed"):
        compile_encoder(tmp_path / LIBRARY)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotNative, match=r"no C compiler$"):
        compile_encoder(tmp_path / LIBRARY)


def test_what_a_processor_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPU_HIDE_FEATURES", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(Path, "read_text", lambda _: "processor: 0\nflags\t: fpu avx2 avx512f avx512bw fma\n")
    monkeypatch.setenv("CPU_HIDE_FEATURES", "")
    assert native.lacking() == "avx512vl, avx512dq, avx512_vnni"
    monkeypatch.setenv("CPU_HIDE_FEATURES", "amx_tile,fma")
    assert native.lacking() == "avx512vl, avx512dq, avx512_vnni, fma"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in native.lacking()


def test_what_is_hidden_counts_as_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(Path, "read_text", lambda _: f"flags\t: fpu {' '.join(native.NEEDS)}\n")
    monkeypatch.delenv("CPU_HIDE_FEATURES", raising=False)
    assert (native.lacking(), native.hidden()) == ("", frozenset())
    monkeypatch.setenv("CPU_HIDE_FEATURES", "avx512_bf16,avx512_vnni,avx512f")
    assert native.lacking() == "avx512f, avx512_vnni"
    assert native.hidden() == {"avx512f", "avx512_vnni"}
    monkeypatch.setenv("CPU_HIDE_FEATURES", "avx512_bf16")
    assert (native.lacking(), native.hidden()) == ("", frozenset())


def test_what_is_made_with_something_hidden_lies_apart(
    exported_embedder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Path] = []

    def make(folder: Path, work: Path, digest: str, anywhere: bool) -> Path:
        made.append(work / "made")
        made[-1].mkdir()
        (made[-1] / MANIFEST).write_text("{}")
        return made[-1]

    monkeypatch.setattr(export, "_export", make)
    found = set()
    for hide in ("", "avx512_vnni"):
        monkeypatch.setenv("CPU_HIDE_FEATURES", hide)
        found |= {make_embedder(default_source(), tmp_path) for _ in range(2)}
    assert len(found) == len(made) == 2


def test_a_processor_that_lacks_it_uses_onnxruntime(exported_embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedders, "lacking", lambda: "avx512_vnni")
    found = open_embedder(exported_embedder)
    assert "-int" in found.digest
    assert abs(float(np.linalg.norm(found.embed("How do I sell a used car?"))) - 1) < 1e-3


def test_a_library_that_cannot_be_loaded_is_onnxruntimes(
    exported_embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "made"
    shutil.copytree(exported_embedder, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["runtimes"].setdefault("native", manifest["runtimes"]["onnxruntime"])
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / LIBRARY).write_bytes(b"no library")
    monkeypatch.setattr(embedders, "lacking", lambda: "")
    assert "-int" in open_embedder(folder).digest
    assert "left to onnxruntime" in caplog.text


@pytest.fixture
def raw(exported_embedder: Path, tmp_path: Path) -> Path:
    """What `source` leaves of a small random model."""
    size = Size(words=40_000, places=512)
    folder = tmp_path / "raw"
    folder.mkdir()
    weights = random_weights(size)
    shutil.copy(exported_embedder / TOKENIZER, folder / TOKENIZER)
    config = {"hidden_act": "gelu", "num_hidden_layers": size.layers, "num_attention_heads": size.heads}
    config |= {"hidden_size": size.width, "layer_norm_eps": 1e-12}
    shape = {"architecture": "BertModel", "modules": ["Transformer", "Pooling"], "config": config}
    (folder / "shape.json").write_text(json.dumps(shape | {"pooling": {"pooling_mode_mean_tokens": True}}))
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.no_padding()
    vectors = [bert(weights, size, tokenizer.encode(text).ids, exact, exact) for text in REFERENCE]
    save_file(weights, folder / "weights.safetensors")
    save_file({"vectors": np.array(vectors, np.float32)}, folder / "reference.safetensors")
    return folder


def quantized(raw: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    shutil.copy(raw / TOKENIZER, folder / TOKENIZER)
    export._quantize(raw, folder, "d")
    runtimes: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["runtimes"]
    return runtimes


@pytest.mark.proof
@able
def test_an_export_without_a_compiler_or_too_far_off_is_onnxruntimes(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtimes = quantized(raw, tmp_path / "both")
    assert {name: each["digest"] for name, each in runtimes.items()} == {"onnxruntime": "d-int8", "native": "d-c"}
    assert open_embedder(tmp_path / "both").digest == "d-c"
    with monkeypatch.context() as patch:
        patch.setenv("CC", "no-such-compiler")
        assert set(quantized(raw, tmp_path / "uncompiled")) == {"onnxruntime"}
    assert "no C compiler" in caplog.text
    assert open_embedder(tmp_path / "uncompiled").digest == "d-int8"
    write = export.write_weights

    def worse(target: Path, weights: dict[str, Array], *rest: Any) -> None:
        write(target, {name: np.round(value, 0) for name, value in weights.items()}, *rest)

    monkeypatch.setattr(export, "write_weights", worse)
    monkeypatch.setattr(export, "compile_encoder", lambda target: shutil.copy(tmp_path / "both" / LIBRARY, target))
    assert set(quantized(raw, tmp_path / "worse")) == {"onnxruntime"}
    assert "c is too far from the original" in caplog.text
    assert open_embedder(tmp_path / "worse").digest == "d-int8"


@pytest.mark.proof
def test_a_model_for_any_processor_has_seven_bits(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "lacking", lambda: "what the encoder in C needs")
    folder = tmp_path / "made"
    folder.mkdir()
    shutil.copy(raw / TOKENIZER, folder / TOKENIZER)
    export._quantize(raw, folder, "d", anywhere=True)
    assert json.loads((folder / MANIFEST).read_text())["runtimes"]["onnxruntime"]["digest"] == "d-int7"


@pytest.mark.proof
@able
def test_a_model_that_no_runtime_keeps_to_is_not_exported(raw: Path, tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).standard_normal((len(REFERENCE), 128)).astype(np.float32)
    save_file({"vectors": vectors}, raw / "reference.safetensors")
    with pytest.raises(ExportFailed, match="int7 is too far from the original"):
        quantized(raw, tmp_path / "made")
