"""What the driver's tool says of memory, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.result import gpu_bytes

pytestmark = pytest.mark.product


def says(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, processes: str, code: int = 0) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\ncase $1 in *query-gpu*) printf '{gpus}';; *) printf '{processes}';; esac\nexit {code}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_process_and_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(tmp_path, monkeypatch, "6100\\n20\\n", "77, 5304\\n78, 12\\n77, 6\\n")
    assert gpu_bytes() == 6120 << 20
    assert gpu_bytes(77) == 5310 << 20
    assert gpu_bytes(7) is None


@pytest.mark.parametrize(
    ("gpus", "processes", "code"), [("[N/A]\\n", "77, [N/A]\\n", 0), ("", "", 0), ("5\\n", "77, 5\\n", 9)]
)
def test_what_is_not_told_is_no_number(
    gpus: str, processes: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(tmp_path, monkeypatch, gpus, processes, code)
    assert gpu_bytes() is None
    assert gpu_bytes(77) is None


def test_no_tool_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bytes() is None
