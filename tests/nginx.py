"""A real NGINX in front of servers, as examples/load-balancing/nginx.conf sets it up, but for ports and folders."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.redis_server import free_port
from tests.envoy import Backend

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "load-balancing" / "nginx.conf"
_PATIENCE = 60.0  # seconds
# Where it would otherwise write, below the prefix that it was built with.
_SCRATCH = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextmanager
def running(folder: Path, backends: list[Backend], example: str | None = None) -> Iterator[str]:
    """In front of these, until the block is left; its address."""
    port = free_port()
    text = re.sub(r"listen 50\d\d\d", f"listen 127.0.0.1:{port}", example or EXAMPLE.read_text())
    for number, one in enumerate(backends):
        text = text.replace(f"whippet-{number}.example:50051", f"127.0.0.1:{one.data}")
    text = text.replace("grpc_connect_timeout 2s", "grpc_connect_timeout 30s")  # of a busy machine
    with subprocess.Popen(_command(folder, text)) as process:
        try:
            end = time.monotonic() + _PATIENCE
            while process.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), _PATIENCE):
                    break
                assert time.monotonic() < end, "NGINX does not listen"
                time.sleep(0.02)
            assert process.poll() is None, "NGINX has ended"
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def _command(folder: Path, text: str) -> list[str]:
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert found, "nginx is needed: apt-get install nginx-light"
    scratch = "".join(f"{name}_temp_path {folder}/{name};" for name in _SCRATCH)
    config = folder / "nginx.conf"
    config.write_text(re.sub(r"^http \{", f"http {{ {scratch}", text, flags=re.MULTILINE))
    own = "user root;" if os.geteuid() == 0 else ""
    globals_ = f"daemon off; pid {folder}/pid; error_log {folder}/error.log; {own}"
    return [found, "-c", str(config), "-p", str(folder), "-e", f"{folder}/error.log", "-g", globals_]
