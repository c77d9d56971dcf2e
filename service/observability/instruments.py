"""Makes the server's observers, once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from service.observability.access_log import AccessLog
from service.observability.calls import CallCounts
from service.observability.loop_lag import LoopLag
from service.observability.progress import ProgressReporter
from service.observability.recent import RecentErrors
from service.observability.record import Observer, Observers, Sample


class Instruments:
    def __init__(
        self,
        log_tenants: bool = False,
        others: Sequence[Observer] = (),
        traces: Mapping[str, int] = MappingProxyType({}),
        sample: Sample | None = None,
    ) -> None:
        """`traces`: counts of traces by outcome. `sample`: decides which calls are traced."""
        self.started_at = time.monotonic()
        self.calls = CallCounts()
        self.access = AccessLog(log_tenants)
        self.recent = RecentErrors()
        self.lag = LoopLag()
        self.progress = ProgressReporter()
        self.traces = traces
        self.reloads = Counter({"reloads": 0, "failures": 0})  # of the settings
        self.relays = Counter({"listening": 0, "deaths": 0})  # processes that speak gRPC beside the front
        self.observers = Observers([self.calls, self.access, self.recent, *others], self.calls.between, sample)
