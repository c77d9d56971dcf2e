"""The alerts and the dashboard, on a real Prometheus: each alert fires, and each query finds what a server shows."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from bench.redis_server import RedisServer, free_port
from service.observability.metric_names import FAMILIES
from tests.helm.conftest import CHART, ROOT
from tests.service.conftest import Server, ask, ask_stream, serve, template

pytestmark = pytest.mark.proof

__all__ = ["serve", "template"]

PATIENCE = 60.0  # seconds
ALERTS = CHART / "files" / "alerts.yaml"
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
QUERIES = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}


def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    cases = Path(__file__).with_name("alerts_test.yaml")
    for path in (cases, ALERTS):
        shutil.copy(path, tmp_path)
    asked = [one["alertname"] for test in yaml.safe_load(cases.read_text())["tests"] for one in test["alert_rule_test"]]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert set(asked) == {rule["alert"] for rule in rules}
    promtool = ROOT / ".tools" / "promtool"
    done = subprocess.run(
        [promtool, "test", "rules", cases.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def names(expression: str) -> set[str]:
    """Families that an expression reads."""
    found = re.findall(r"whippet_\w+", expression)
    return {re.sub(r"_(total|bucket|sum|count)$", "", one).removeprefix("whippet_") for one in found}


def test_alerts_and_queries_name_metrics_that_exist() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    read = set[str]().union(*(names(rule["expr"]) for rule in rules), *map(names, QUERIES.values()))
    assert read <= FAMILIES.keys()


@contextlib.contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Callable[[str], list[Any]]]:
    """One that scrapes `target` each second; asks it."""
    port = free_port()
    scraped = {"targets": [target], "labels": {"namespace": "n", "pod": "p"}}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "j", "static_configs": [scraped]}]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    flags = (f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data")
    listen = f"--web.listen-address=127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([ROOT / ".tools" / "prometheus", *flags, listen], stdout=log, stderr=log)

    def query(expression: str) -> list[Any]:
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{asked}", timeout=60) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
        return found

    try:
        yield query
    finally:
        process.terminate()
        process.wait(PATIENCE)


def traffic(server: Server) -> None:
    """Something of everything that is counted: answers, repeated ones, refused ones."""
    for number in range(3):
        for _ in range(2):
            server.generation.Generate(ask(f"again {number}", 4, sampling={"temperature": 0}), timeout=60)
        list(server.generation.GenerateStream(ask_stream(f"stream {number}", 8), timeout=60))
    with pytest.raises(grpc.RpcError):
        server.generation.Generate(ask("late", 4), timeout=0.0001)


def test_each_query_finds_something(
    serve: Callable[..., contextlib.AbstractContextManager[Server]],
    make_redis: Callable[..., RedisServer],
    tmp_path: Path,
) -> None:
    redis = make_redis()
    flags = (f"--cache.redis-url={redis.url}", "--fake.step-time=0.005", "--limits.queued-requests=0")
    left = {
        title: expression.replace('namespace=~"$namespace",job=~"$job"', 'namespace=~"n",job=~"j"').replace(
            "$__rate_interval", "10s"
        )
        for title, expression in QUERIES.items()
    }
    with serve(*flags, "--scheduler.max-sequences=1") as server, prometheus(server.metrics, tmp_path) as query:
        end = time.monotonic() + PATIENCE
        redis.stop()  # faults are counted as well
        while left:
            assert time.monotonic() < end, f"no data: {left}"
            busy = [server.generation.GenerateStream(ask_stream(f"busy {n}", 40), timeout=60) for n in range(4)]
            for stream in busy:
                with contextlib.suppress(grpc.RpcError):
                    list(stream)
            traffic(server)
            with contextlib.suppress(OSError):  # not yet there
                left = {title: expression for title, expression in left.items() if not query(expression)}
            time.sleep(0.2)
