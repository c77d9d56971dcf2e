"""One writer a folder, whatever becomes of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quant.claim import claimed
from quant.errors import CannotQuantize

ROOT = Path(__file__).resolve().parents[2]
HOLD = (
    "import sys; from pathlib import Path; from quant.claim import claimed\n"
    "with claimed(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


def holder(out: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    return child


@pytest.mark.product
def test_the_second_is_refused_and_told_by_whom_until_the_first_ends(tmp_path):
    out = tmp_path / "models" / "out"
    with holder(out) as first:
        for path in (out, out.parent / "." / "out", Path(os.path.relpath(out))):
            with pytest.raises(CannotQuantize, match=rf"is being written by process {first.pid}:"), claimed(path):
                pass
        with claimed(out.with_name("other")):
            pass
        first.communicate(timeout=60)
    with claimed(out):
        pass
    assert list(out.parent.iterdir()) == []


@pytest.mark.product
def test_one_that_was_killed_holds_nothing(tmp_path):
    with holder(tmp_path / "out") as first:
        first.kill()
        first.wait(60)
    assert len(list(tmp_path.iterdir())) == 1
    with claimed(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.product
def test_two_runs_of_the_command(tmp_path):
    """Before anything is read: the model is not even there."""
    with holder(tmp_path / "out") as first:
        for command in ("quantize", "convert"):
            asked = [sys.executable, "-m", "quant", command, str(tmp_path / "m"), str(tmp_path / "out")]
            done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith(f"{tmp_path / 'out'} is being written by process {first.pid}: ")
            assert done.stderr.count("\n") == 1
        first.communicate(timeout=60)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotQuantize, match="name a folder that can be written"), claimed(tmp_path / "file" / "out"):
        pass
