"""Renders a frame of `whippet top`: rates and latencies between two polls, from 0 where the engine was restarted
meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.pb.whippet.v1 import admin_pb2

Row = tuple[str, Sequence[str]]  # a label, and what stands beside it in pieces that are not cut

_BLANK: Row = ("", ())
_LABEL = 10  # columns
_BAR = 30
_QUANTILES = (0.5, 0.9, 0.99)
_TIMES = (
    ("first_token", "first token"),
    ("between_tokens", "between tokens"),
    ("queue", "in the queue"),
    ("whole", "whole answer"),
    ("event_loop", "event loop, late"),
)
_STATES = {
    admin_pb2.ENGINE_STATE_LOADING: "loading",
    admin_pb2.ENGINE_STATE_READY: "ready",
    admin_pb2.ENGINE_STATE_DRAINING: "draining",
    admin_pb2.ENGINE_STATE_RESTARTING: "RESTARTING",
    admin_pb2.ENGINE_STATE_STOPPED: "STOPPED",
}
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Look:
    at: float  # seconds, monotonic
    load: admin_pb2.GetLoadResponse


def birth(look: Look) -> Look:
    """The empty load of the server's start."""
    return Look(look.at - look.load.uptime.ToNanoseconds() / 1e9, admin_pb2.GetLoadResponse())


class Between:
    def __init__(self, before: Look, now: Look) -> None:
        self._before, self._now = before.load, now.load
        self.seconds = max(now.at - before.at, 1e-9)

    def rate(self, field: str) -> float:
        count: int = getattr(self._now, field) - getattr(self._before, field)
        return max(0, count) / self.seconds

    def rates(self, field: str) -> dict[str, float]:
        now, before = getattr(self._now, field), getattr(self._before, field)
        return {name: max(0, count - before.get(name, 0)) / self.seconds for name, count in sorted(now.items())}

    def counts(self, name: str) -> tuple[list[float], list[int]]:
        now = self._now.seconds.get(name, admin_pb2.Distribution())
        before = self._before.seconds.get(name, admin_pb2.Distribution())
        if before.borders != now.borders:
            return list(now.borders), list(now.counts)
        return list(now.borders), [max(0, a - b) for a, b in zip(now.counts, before.counts, strict=False)]

    @property
    def processor(self) -> float:
        """The share of one core that the front used."""
        used = self._now.front_cpu.ToNanoseconds() - self._before.front_cpu.ToNanoseconds()
        return max(0.0, used / 1e9 / self.seconds)


def frame(before: Look, now: Look, width: int) -> list[str]:
    if now.load.uptime.ToNanoseconds() < before.load.uptime.ToNanoseconds():  # it was started again
        before = birth(now)
    load, between = now.load, Between(before, now)
    rows = [
        *_server(load),
        _BLANK,
        *_requests(load, between),
        *_rates(between),
        _BLANK,
        *_latencies(between),
        _BLANK,
        *_pages(load),
        *_caches(load, between),
        _BLANK,
        *_engine(load, between),
        *_front(load, between),
    ]
    return [line[:width].rstrip() for label, cells in rows for line in _lines(label, cells, width)]


def _server(load: admin_pb2.GetLoadResponse) -> Iterator[Row]:
    state = _STATES.get(load.state, "?")
    up = _time(load.uptime.ToNanoseconds() / 1e9)
    yield f"whippet {load.version}", (f"  {load.model or '-'}", state, f"up {up}")
    yield load.runs_on or "nothing is loaded yet", ()


def _requests(load: admin_pb2.GetLoadResponse, between: Between) -> Iterator[Row]:
    cells = (
        f"{load.live_requests} live",
        f"{load.running} of {load.max_sequences} running",
        f"{load.queued_requests} of {load.queue_limit} queued",
        f"{load.paused} paused",
        f"{load.looking_requests} looking",
    )
    yield _row("requests", cells)
    ended = between.rates("ended_calls")
    yield _row("ended", (f"{code} {rate:.1f}/s" for code, rate in _first(ended, "OK")))
    refused = {reason: rate for reason, rate in between.rates("refused_requests").items() if rate}
    if refused:
        yield _row("refused", (f"{reason} {rate:.1f}/s" for reason, rate in refused.items()))


def _rates(between: Between) -> Iterator[Row]:
    cells = (
        f"{between.rate('generated_tokens'):,.1f}/s generated",
        f"{between.rate('prompt_tokens'):,.1f}/s of prompts",
        f"{between.rate('cached_tokens'):,.1f}/s of them cached",
    )
    yield _row("tokens", cells)
    guessed = between.rate("draft_proposed")
    if guessed:
        right = between.rate("draft_accepted")
        yield _row("guessed", (f"{guessed:,.1f}/s", f"{right / guessed:.0%} of them right"))


def _latencies(between: Between) -> Iterator[Row]:
    heads = "".join(f"{f'p{share * 100:g}':>11}" for share in _QUANTILES)
    yield _row("latency", (f"{'':16}{heads}{'count':>11}",))
    for name, cells in _TIMES:
        borders, counts = between.counts(name)
        found = [_short(quantile(borders, counts, share)) for share in _QUANTILES]
        yield _row("", (f"{cells:16}{''.join(f'{value:>11}' for value in found)}{sum(counts):>11,}",))


def _pages(load: admin_pb2.GetLoadResponse) -> Iterator[Row]:
    total = load.total_pages
    used, kept = (part / total if total else 0.0 for part in (load.used_pages, load.kept_pages))
    marks = "#" * round(used * _BAR)
    marks += "-" * min(_BAR - len(marks), round(kept * _BAR))
    size = f"{total:,} of {load.page_size} tokens"
    yield _row("pages", (f"[{marks:{_BAR}}]", f"{used:.0%} used", f"{kept:.0%} kept", size))


def _caches(load: admin_pb2.GetLoadResponse, between: Between) -> Iterator[Row]:
    counts = between.rates("cache_counts")
    cells = []
    for name, hits, lookups in (
        ("response", ("response_lookup.hit",), "response_lookup."),
        ("semantic", ("semantic_lookup.strict", "semantic_lookup.learned"), "semantic_lookup."),
    ):
        asked = sum(rate for key, rate in counts.items() if key.startswith(lookups))
        found = sum(counts.get(key, 0.0) for key in hits)
        cells.append(f"{name} {found / asked:.0%} found of {asked:.1f}/s" if asked else f"{name} -")
    prompts = between.rate("prompt_tokens")
    cells.append(f"prefix {between.rate('cached_tokens') / prompts:.0%} of tokens" if prompts else "prefix -")
    cells.append(f"read along {counts.get('flight.follow', 0.0):.1f}/s")
    yield _row("caches", cells)
    if load.cache_breakers:
        yield _row("redis", (f"{name} {_breaker(state)}" for name, state in sorted(load.cache_breakers.items())))


def _engine(load: admin_pb2.GetLoadResponse, between: Between) -> Iterator[Row]:
    cells = (
        _STATES.get(load.state, "?"),
        f"{between.rate('steps'):,.1f} steps/s",
        f"{load.restarts} restarts",
        f"{load.preemptions} preemptions",
    )
    yield _row("engine", cells)
    if load.device_bytes:
        used = f"{_bytes(load.device_used_bytes)} of {_bytes(load.device_bytes)}"
        yield _row("gpu", (used, f"{load.device_used_bytes / load.device_bytes:.0%} used"))


def _front(load: admin_pb2.GetLoadResponse, between: Between) -> Iterator[Row]:
    yield _row("front", (f"{between.processor:.0%} of a core", _bytes(load.front_bytes)))


def quantile(borders: list[float], counts: list[int], share: float) -> float | None:
    """Takes values to be spread evenly in their bucket; at most the last border. None where nothing was counted."""
    below, wanted = 0, share * sum(counts)
    if not wanted:
        return None
    for number, count in enumerate(counts[: len(borders)]):
        if below + count >= wanted:
            low = borders[number - 1] if number else 0.0
            return low + (borders[number] - low) * (wanted - below) / count
        below += count
    return borders[-1] if borders else None


def _row(label: str, cells: Iterable[str]) -> Row:
    return f"{label:{_LABEL}}", tuple(cells)


def _lines(label: str, cells: Sequence[str], width: int) -> Iterator[str]:
    line = label
    for part in cells:
        if len(line) + len(part) > width and len(line) > _LABEL:
            yield line
            line = " " * _LABEL
        line += f"{part}  "
    yield line


def _first(rates: Mapping[str, float], name: str) -> list[tuple[str, float]]:
    others = [(other, rate) for other, rate in rates.items() if other != name and rate]
    return [(name, rates.get(name, 0.0)), *others]


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days} d ' if days else ''}{hours}:{minutes:02}:{rest:02}"


def _bytes(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def _breaker(state: str) -> str:
    return {"closed": "asked", "open": "NOT ASKED"}.get(state, state)
