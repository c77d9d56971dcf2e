"""How a start ends whose model folder means harm: by one line, or by a signal that is obeyed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.service.conftest import PATIENCE, ROOT, command
from tests.service.test_main import start, the_line

pytestmark = pytest.mark.product

DEMO = ROOT / "models" / "demo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    done = start(f"--model={folder}")
    assert done.returncode == 3
    assert "tokenizer.json: is no regular file" in the_line(done)


def test_an_id_of_a_billion_is_one_line(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["odd"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    done = start(f"--model={folder}")
    assert done.returncode == 3
    assert "has token 1000000000" in the_line(done)


def test_a_signal_is_obeyed_while_a_template_is_compiled_for_ever(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ 999999999 ** 999999999 }}"  # folded by the compiler, which takes hours
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with subprocess.Popen(command(f"--model={folder}"), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end = time.monotonic() + PATIENCE
        pids: list[str] = []
        while not any(b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
            assert time.monotonic() < end
            time.sleep(0.01)
            pids = children.read_text().split()
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
        assert time.monotonic() - begun < 5
        assert process.returncode == 0
        assert "ready" not in out
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
