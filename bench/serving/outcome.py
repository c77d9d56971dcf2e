"""What a load came to, in figures."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime

from bench.own_server import Server, cpu_seconds
from bench.pace import quantile
from bench.serving.jobs import Ended, Found, counted_quantile, summed

REFUSED = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
_SHARES = (50, 95, 99)
_SMI = (
    "nvidia-smi",
    "--id=0",
    "--query-gpu=timestamp,utilization.gpu",
    "--format=csv,noheader,nounits",
    "--loop-ms=100",
)


@dataclass(slots=True)
class Watched:
    """Of the machine while a load ran."""

    front: float | None = None  # seconds of processor time that the front used; None where the server is not ours
    relays: float | None = None  # likewise of its relays together
    gpu: list[tuple[float, float]] = field(
        default_factory=list
    )  # (monotonic, per cent of a moment in which a kernel ran)


@contextmanager
def watched(server: Server | None) -> Iterator[Watched]:
    """What is used within the block."""
    found = Watched()
    before = (0.0, 0.0) if server is None else (cpu_seconds(server.pid), server.relays_cpu())
    sampler = _sampler()
    try:
        yield found
    finally:
        if server is not None:
            found.front = cpu_seconds(server.pid) - before[0]
            found.relays = server.relays_cpu() - before[1]
        if sampler is not None:
            sampler.terminate()
            found.gpu = _samples(sampler.communicate()[0])


def _samples(said: str) -> list[tuple[float, float]]:
    """Of lines `2026/01/31 12:00:00.000, 97`."""
    found = []
    for line in said.splitlines():
        when, _, share = line.partition(",")
        if share.strip().isdigit():
            at = datetime.strptime(when.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
            found.append((at - time.time() + time.monotonic(), float(share)))
    return found


def _sampler() -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(_SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rates are of `window` where there is one, else from the first request to the last token."""

    output_tokens_per_second: float
    requests_per_second: float
    seconds: float
    requests: int
    errors: int  # all that did not end well, refusals included
    errors_by_status: dict[str, int]
    accepted_not_ended_once: int
    refused: int
    refused_without_retry_info: int
    refusal_ms: dict[str, float]
    ttft_ms: dict[str, float]  # first token, from when the request was due
    tpot_ms: dict[str, float]  # a token after the first, of a request
    itl_ms: dict[str, float]  # between two messages of a stream
    tokens_a_message: float
    client_cores: float  # all calling processes
    client_cores_most: float  # of one of them: near 1, it is the client that was measured
    front_cores: float | None
    relay_cores: float | None  # all of them
    gpu_percent: float | None
    extra: dict[str, object] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """As kept: quantiles flat, by names that other benches use."""
        found: dict[str, object] = {}
        for name, value in asdict(self).items():
            if name == "extra":
                found |= value
            elif name.endswith("_ms"):
                found |= {f"{name}_{share}": one for share, one in value.items()}
            else:
                found[name] = value
        return found


def outcome(parts: Sequence[Found], begin: float, seen: Watched, window: tuple[float, float] | None = None) -> Outcome:
    """Of all processes' shares of one load; `window` in seconds after its beginning."""
    ended = [one for part in parts for one in part.ended]
    well = [one for one in ended if one.code == "OK" and not one.wrong]
    refused = [one for one in ended if not one.accepted and one.code in REFUSED]
    tenths = summed(part.tenths for part in parts)
    busy = max([one.ended - begin for one in ended], default=0.0) or 1.0
    if window is None:
        seconds = max(one.last for one in ended) - begin if tenths else busy
        tokens, count = sum(tenths.values()), len(well)
    else:
        low, high = window
        seconds = high - low
        tokens = sum(count for at, count in tenths.items() if round(low * 10) <= at < round(high * 10))
        count = sum(low <= one.ended - begin < high for one in well)
    cpu = [part.cpu / busy for part in parts]
    gpu = [share for at, share in seen.gpu if begin <= at < begin + busy]
    messages = sum(one.messages for one in ended)
    return Outcome(
        output_tokens_per_second=round(tokens / seconds, 1),
        requests_per_second=round(count / seconds, 2),
        seconds=round(seconds, 3),
        requests=len(ended),
        errors=len(ended) - len(well),
        errors_by_status=dict(Counter(one.code for one in ended if one.code != "OK")),
        accepted_not_ended_once=sum(one.wrong for one in ended),
        refused=len(refused),
        refused_without_retry_info=sum(one.retry is None for one in refused),
        refusal_ms=_quantiles([one.ended - one.begun for one in refused]),
        ttft_ms=_quantiles([one.first - one.due for one in ended if one.messages]),
        tpot_ms=_quantiles([_pace(one) for one in well if one.tokens > 1]),
        itl_ms=_of_all(lambda share: counted_quantile(summed(part.gaps for part in parts), share)),
        tokens_a_message=round(sum(one.tokens for one in ended) / messages, 2) if messages else 0.0,
        client_cores=round(sum(cpu), 2),
        client_cores_most=round(max(cpu, default=0.0), 2),
        front_cores=None if seen.front is None else round(seen.front / busy, 2),
        relay_cores=None if seen.relays is None else round(seen.relays / busy, 2),
        gpu_percent=round(sum(gpu) / len(gpu), 1) if gpu else None,
    )


def _pace(one: Ended) -> float:
    return (one.last - one.first) / (one.tokens - 1)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return _of_all(lambda share: quantile(seconds, share)) if seconds else {}


def _of_all(value: Callable[[float], float]) -> dict[str, float]:
    """Milliseconds."""
    return {f"p{share}": round(value(share / 100) * 1e3, 3) for share in _SHARES}
