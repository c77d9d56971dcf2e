"""A server whose configuration is replaced as Kubernetes does it, while a stream runs."""

from __future__ import annotations

import contextlib
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from service.pb.whippet.v1 import admin_pb2
from tests.service.conftest import Server, ask_stream
from tests.waiting import wait_for

pytestmark = pytest.mark.product

TOKENS = 400  # of the stream
Serve = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.mark.proof
def test_a_replaced_configmap_takes_effect_under_a_stream(serve: Serve, tmp_path: Path) -> None:
    def publish(number: int, text: str) -> None:
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        (folder / "config.yaml").write_text(text)
        (tmp_path / "..new").symlink_to(folder.name)
        os.replace(tmp_path / "..new", tmp_path / "..data")

    def counted() -> tuple[int, int]:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as page:
            lines = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if not line.startswith("#"))
        names = ("whippet_config_reloads_total", "whippet_config_reload_failures_total")
        return tuple(int(float(lines[name])) for name in names)  # type: ignore[return-value]

    def batching() -> tuple[bool, bool]:
        answer = server.admin.ListOptimizations(admin_pb2.ListOptimizationsRequest(), timeout=60)
        return next((one.enabled, one.effective) for one in answer.optimizations if one.name == "batching")

    publish(0, "log-level: info\n")
    (tmp_path / "config.yaml").symlink_to("..data/config.yaml")
    with serve(f"--config={tmp_path / 'config.yaml'}", "--fake.step-time=0.02") as server:
        stream = server.generation.GenerateStream(ask_stream("on and on", TOKENS), timeout=60)
        publish(1, "log-level: debug\noptimizations: {batching: false}\n")
        wait_for(lambda: batching() == (False, False))
        publish(2, "log-level: loud\n")
        wait_for(lambda: counted() == (1, 1))
        assert batching() == (False, False)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: counted() == (1, 2))
        publish(3, "optimizations: {batching: true}\n")
        wait_for(lambda: batching() == (True, True))
        assert len("".join(message.text for message in stream)) == TOKENS
    log = server.log.read_text()
    assert "the settings stay as they are: log-level: " in log
    assert "changed: log-level, optimizations.batching" in log
