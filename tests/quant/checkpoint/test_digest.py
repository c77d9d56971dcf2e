"""The digest of a model folder's files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from quant.checkpoint.digest import TEXTS, WeightsDigest, of_texts
from quant.checkpoint.errors import BadFile


def test_it_is_over_names_and_contents_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    lines = "".join(f"{name} {hashlib.sha256(name.encode() * 3).hexdigest()}\n" for name in ("a", "b"))
    found = WeightsDigest([tmp_path / "b", tmp_path / "a"])
    assert found.result() == hashlib.sha256(lines.encode()).hexdigest()
    found.close()


def test_digest_of_a_vanished_file_is_refused(tmp_path: Path) -> None:
    found = WeightsDigest([tmp_path / "gone.safetensors"])
    with pytest.raises(BadFile, match=r"gone\.safetensors"):
        found.result()
    found.close()


def test_every_text_file_counts_and_so_does_its_absence(tmp_path: Path) -> None:
    seen = {of_texts(tmp_path)}
    for name in TEXTS:
        (tmp_path / name).write_bytes(b"")
        seen.add(of_texts(tmp_path))
        (tmp_path / name).write_bytes(b"x")
        seen.add(of_texts(tmp_path))
    assert len(seen) == 1 + 2 * len(TEXTS)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert of_texts(tmp_path) in seen


def test_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert of_texts(tmp_path) == of_texts(tmp_path / "nowhere")
