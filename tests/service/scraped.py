"""The metrics page of a server, read as Prometheus reads it."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.service.conftest import PATIENCE, Server

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fetch(url: str, accept: str = "") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=60) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def parsed(text: str) -> Page:
    """Read by the library's own parser, and held to what Prometheus expects of names."""
    page: Page = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert family.name.startswith(("whippet_", "process_")), family.name
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in page, key
            page[key] = sample.value
    return page


def page_of(server: Server) -> Page:
    match = re.search(r" metrics (http\S+)$", server.log.read_text(), re.MULTILINE)
    assert match
    return parsed(fetch(match[1]))


def value(page: Page, name: str, **labels: str) -> float:
    return page.get((f"whippet_{name}", tuple(sorted(labels.items()))), 0.0)


def told(server: Server, name: str, least: float, within: float = PATIENCE, **labels: str) -> float:
    """Waits until there is as much."""
    end = time.monotonic() + within
    while (found := value(page_of(server), name, **labels)) < least:
        assert time.monotonic() < end, (name, labels, found)
        time.sleep(0.05)
    return found
