"""As in a container that is run with care: UID 10001 without a name, no HOME, and a read-only root file system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.conftest import ROOT, _ready

pytestmark = pytest.mark.proof

# Only $0 stays writable.
_CONFINE = (
    'mount --bind "$0" "$0" && mount -o remount,ro,bind / && '
    'exec unshare --user --map-user=10001 --map-group=10001 "$@"'
)
_NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount")


def confined(writable: Path) -> list[str]:
    """What to put before a command. Nothing where the kernel gives no namespaces: then HOME alone is missing."""
    prefix = [*_NAMESPACES, "sh", "-c", _CONFINE, str(writable)]
    done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if done.returncode == 0 else []


def serve_confined(kept: Path, log: Path, *flags: str, **environment: str) -> None:
    """A server where only `kept` can be written; a greedy answer, and its end."""
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen", "metrics-listen")]
    model = ("--model", str(ROOT / "models" / "demo-awq"), "--device=cpu", "--scheduler.threads=1")
    command = [*confined(kept), sys.executable, "-m", "service.cli", "serve", *ports, *model, *flags]
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--cache.semantic.mode=off"],
            cwd=ROOT,
            env=environ | environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        running = _ready(process, log)
        with grpc.insecure_channel(running.data) as channel:
            request = generation_pb2.GenerateRequest(text="def read_json(path):")
            request.stopping.max_tokens = 4
            answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
            assert answer.text
    finally:
        process.terminate()
        try:
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()


def test_a_model_is_served_with_one_writable_folder(tmp_path: Path) -> None:
    kept, log = tmp_path / "kept", tmp_path / "log"
    kept.mkdir(mode=0o700)
    serve_confined(kept, log, f"--cache-dir={kept}")
    (products,) = (kept / "kernels").glob("products-*.so")
    assert not products.stat().st_mode & 0o022
    assert os.listdir(kept / "kernels") == [products.name], "nothing else is left behind"
    assert "WARNING" not in log.read_text(), log.read_text()


def test_nothing_is_compiled_where_all_was_built_ahead(tmp_path: Path) -> None:
    ahead, unused, log = tmp_path / "ahead", tmp_path / "unused", tmp_path / "log"
    unused.mkdir()
    made = [sys.executable, "-m", "service.cli", "prebuild", "--into", str(ahead)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    (tmp_path / "file").touch()  # below it nothing can be written, by root neither
    kept = f"--cache-dir={tmp_path}/file/kept"
    serve_confined(unused, log, kept, CC="no-such-compiler", WHIPPET_PREBUILT_DIR=str(ahead))
    warnings = [line for line in log.read_text().splitlines() if "WARNING" in line]
    assert all("cache-dir" in line for line in warnings), warnings
    assert os.listdir(unused) == []
