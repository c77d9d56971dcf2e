"""Decides whether to fetch keys and values or to compute them again, by measured rates."""

from __future__ import annotations

import threading
from dataclasses import dataclass

WEIGHT = 0.2  # of the newest measurement
MARGIN = 1.1  # a fetch must be predicted to be faster by so much


@dataclass(frozen=True, slots=True)
class Rates:
    round_trip: float | None  # seconds
    bytes_per_second: float | None  # of fetching, opening and copying together
    tokens_per_second: float | None  # of prefill


@dataclass(frozen=True, slots=True)
class Prediction:
    fetch: bool
    reason: str
    fetching: float | None = None  # seconds
    computing: float | None = None


class FetchGate:
    def __init__(self, token_bytes: int, min_tokens: int) -> None:
        self._token_bytes = token_bytes
        self._min_tokens = min_tokens
        self._lock = threading.Lock()
        self._rates = Rates(None, None, None)

    @property
    def rates(self) -> Rates:
        with self._lock:
            return self._rates

    def fetched(self, size: int, seconds: float) -> None:
        """`seconds` includes a round trip."""
        with self._lock:
            net = max(seconds - (self._rates.round_trip or 0.0), seconds / 10, 1e-9)
            rate = _mixed(self._rates.bytes_per_second, size / net)
            self._rates = Rates(self._rates.round_trip, rate, self._rates.tokens_per_second)

    def answered(self, seconds: float) -> None:
        with self._lock:
            trip = _mixed(self._rates.round_trip, seconds)
            self._rates = Rates(trip, self._rates.bytes_per_second, self._rates.tokens_per_second)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens < 1 or seconds <= 0:
            return
        with self._lock:
            rate = _mixed(self._rates.tokens_per_second, tokens / seconds)
            self._rates = Rates(self._rates.round_trip, self._rates.bytes_per_second, rate)

    def decide(self, tokens: int) -> Prediction:
        """Fetches before anything was measured, since only that gives a measurement."""
        rates = self.rates
        if tokens < self._min_tokens:
            return Prediction(False, "short")
        fetching = None
        if rates.bytes_per_second is not None:
            fetching = (rates.round_trip or 0.0) + tokens * self._token_bytes / rates.bytes_per_second
        if rates.tokens_per_second is None:
            return Prediction(True, "prefill_unmeasured", fetching)
        computing = tokens / rates.tokens_per_second
        if fetching is None:
            return Prediction(True, "link_unmeasured", None, computing)
        faster = fetching * MARGIN < computing
        return Prediction(faster, "faster" if faster else "slower", fetching, computing)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
