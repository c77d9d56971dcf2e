"""Turns traces on where they are asked for."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from service.config.settings import BadSettings, TraceOptions
from service.observability.record import Observer
from service.version import version

if TYPE_CHECKING:
    from service.tracing.exporter import TraceExporter

_EXTRA = "in a checkout pip install -e '.[otel]', for a wheel pip install 'FILE.whl[otel]'"


class Traces:
    def __init__(self, exporter: TraceExporter | None) -> None:
        self.observers: tuple[Observer, ...] = () if exporter is None else (exporter,)
        self.sample = None if exporter is None else exporter.sample
        self.counts: Mapping[str, int] = {} if exporter is None else exporter.counts
        self._exporter = exporter

    async def close(self) -> None:
        if self._exporter is not None:
            await self._exporter.close()


def start(options: TraceOptions, model: str) -> Traces:
    """Called inside the event loop. Raises BadSettings."""
    if options.endpoint is None:
        return Traces(None)
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.proto") is None:
        raise BadSettings(f"traces.endpoint: needs opentelemetry-proto: {_EXTRA}")
    from service.tracing.exporter import TraceExporter  # protobuf's classes for OTLP, which only traces need

    resource = {
        "service.name": "whippet",
        "service.version": version(),
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    try:
        roots = None if options.ca_file is None else options.ca_file.read_bytes()
    except OSError as error:
        raise BadSettings(f"traces.ca-file: {options.ca_file}: {error.strerror}") from None
    return Traces(TraceExporter(options.endpoint, options.sample, model, resource, roots))
