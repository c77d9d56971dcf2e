"""As in a container that is run with care: UID 10001 without a name, no HOME, and a read-only root file system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc

from service.pb.whippet.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.conftest import ROOT, _ready

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


def test_a_model_is_served_with_one_writable_folder(tmp_path: Path) -> None:
    kept, log = tmp_path / "kept", tmp_path / "log"
    kept.mkdir(mode=0o700)
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen", "metrics-listen")]
    model = ("--model", str(ROOT / "models" / "demo-awq"), "--device=cpu", "--scheduler.threads=1")
    command = [*confined(kept), sys.executable, "-m", "service.cli", "serve", *ports, *model, f"--cache-dir={kept}"]
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--cache.semantic.mode=off"], cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        running = _ready(process, log)
        with grpc.insecure_channel(running.data) as channel:
            request = generation_pb2.GenerateRequest(text="def read_json(path):")
            request.stopping.max_tokens = 4
            answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
            assert answer.text
        (products,) = (kept / "kernels").glob("products-*.so")
        assert not products.stat().st_mode & 0o022
        assert os.listdir(kept / "kernels") == [products.name], "nothing else is left behind"
    finally:
        process.terminate()
        try:
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
    assert "WARNING" not in log.read_text(), log.read_text()
