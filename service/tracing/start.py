"""Turns traces on where they are asked for."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING

from service.config.settings import BadSettings, TraceOptions
from service.version import version

if TYPE_CHECKING:
    from service.tracing.exporter import TraceExporter

_EXTRA = "pip install 'whippet-serve[otel]'"


def start(options: TraceOptions, model: str) -> TraceExporter | None:
    """None where they are off. To be called inside the event loop. Raises BadSettings."""
    if options.endpoint is None:
        return None
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.proto") is None:
        raise BadSettings(f"traces.endpoint: needs opentelemetry-proto: {_EXTRA}")
    from service.tracing.exporter import TraceExporter  # protobuf's classes for OTLP, which nobody else needs

    resource = {
        "service.name": "whippet",
        "service.version": version(),
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    return TraceExporter(options.endpoint, options.sample, model, resource)
