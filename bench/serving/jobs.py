"""Defines the jobs and results of calling processes, as lines of JSON. Times are seconds of the monotonic clock, which
all processes of a machine share."""

from __future__ import annotations

import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime

import msgspec

from bench.own_server import RunningServer, cpu_seconds
from bench.pace import quantile

_STEP = math.log(1.01)  # between two borders of what is counted: quantiles are right to one per cent


class LoadRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request. Its prompt is `text`; without one, ids: of each of `blocks` 512, cut to `prompt`; without those,
    `prompt` ids that no other number has."""

    number: int
    prompt: int  # tokens
    tokens: int  # of the answer
    at: float | None = None  # seconds after the beginning; None: as soon as one of the job's streams is free
    text: str = ""
    blocks: tuple[int, ...] = ()


class LoadJob(msgspec.Struct, frozen=True):
    begin: float
    requests: list[LoadRequest]
    streams: int = 0  # at once; 0: each at its own time
    until: float | None = None  # with streams: the wishes again and again until this time; None: once
    vocabulary: int = 256
    priority: int = 0  # as on the wire
    patience: float = 300.0  # seconds; who waits for longer was lost


class EndedRequest(msgspec.Struct, array_like=True):
    due: float  # when it was to be asked: what waits in the caller counts against the server
    begun: float  # when it was asked
    ended: float = 0.0
    first: float = 0.0  # when its first token came
    last: float = 0.0
    tokens: int = 0
    messages: int = 0  # with tokens
    code: str = ""
    wanted: int = 0  # tokens
    finishes: int = 0
    late: bool = False  # a message came after the last one
    retry: float | None = None  # seconds after which a refusal says to come again

    @property
    def accepted(self) -> bool:
        return self.messages > 0 or self.finishes > 0

    @property
    def wrong(self) -> bool:
        """Returns whether an accepted job, or one reported as good, did not end exactly once with all its tokens."""
        if not self.accepted and self.code != "OK":
            return False
        return self.code != "OK" or self.finishes != 1 or self.late or self.tokens != self.wanted


class JobResult(msgspec.Struct):
    ended: list[EndedRequest]
    gaps: dict[int, int]  # between messages of a stream, by `bucket`
    tenths: dict[int, int]  # tokens that came in each tenth of a second after the beginning
    cpu: float  # seconds of processor time that this process used


def bucket(seconds: float) -> int:
    return round(math.log(max(seconds, 1e-7)) / _STEP)


def counted_quantile(counts: dict[int, int], share: float) -> float:
    """Seconds, by nearest rank; 0 of nothing."""
    left = int(sum(counts.values()) * share)
    for at in sorted(counts):
        left -= counts[at]
        if left < 0:
            return math.exp(at * _STEP)
    return math.exp(max(counts) * _STEP) if counts else 0.0


def summed(parts: Iterable[dict[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for part in parts:
        for at, count in part.items():
            total[at] = total.get(at, 0) + count
    return total


def shared_out(job: LoadJob, processes: int) -> list[LoadJob]:
    """Divides the job among processes, streams and requests evenly; fewer jobs where it has not enough streams."""
    parts = min(processes, job.streams) if job.streams else processes
    found = []
    for part in range(parts):
        streams = job.streams // parts + (part < job.streams % parts)
        found.append(msgspec.structs.replace(job, requests=job.requests[part::parts], streams=streams))
    return [one for one in found if one.requests]


def ids_of(request: LoadRequest, vocabulary: int) -> Sequence[int]:
    """Returns the prompt's ids. Never one of the first three, which models give a meaning."""
    room = vocabulary - 3
    if not request.blocks:
        return [3 + (request.number * 7919 + place * 104_729 + place * place) % room for place in range(request.prompt)]
    found: list[int] = []
    for block in request.blocks:
        found += [3 + (block * 7919 + place * 104_729) % room for place in range(512)]
    return found[: request.prompt]


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
class MachineCounters:
    front: float | None = None  # seconds of processor time that the front used; None where the server is not ours
    relays: float | None = None  # likewise of its relays together
    gpu: list[tuple[float, float]] = field(
        default_factory=list
    )  # (monotonic, per cent of a moment in which a kernel ran)


@contextmanager
def machine_counters(server: RunningServer | None) -> Iterator[MachineCounters]:
    found = MachineCounters()
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


def _samples(text: str) -> list[tuple[float, float]]:
    """Parses lines `2026/01/31 12:00:00.000, 97`."""
    found = []
    for line in text.splitlines():
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
class LoadOutcome:
    """Results of a load. Rates are of `window` where there is one, else from the first request to the last token."""

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
        """Returns the record: quantiles flat, by names that other benches use."""
        found: dict[str, object] = {}
        for name, value in asdict(self).items():
            if name == "extra":
                found |= value
            elif name.endswith("_ms"):
                found |= {f"{name}_{share}": one for share, one in value.items()}
            else:
                found[name] = value
        return found


def outcome(
    parts: Sequence[JobResult], begin: float, seen: MachineCounters, window: tuple[float, float] | None = None
) -> LoadOutcome:
    """Combines all processes' shares of one load; `window` in seconds after its beginning."""
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
    return LoadOutcome(
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


def _pace(one: EndedRequest) -> float:
    return (one.last - one.first) / (one.tokens - 1)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return _of_all(lambda share: quantile(seconds, share)) if seconds else {}


def _of_all(value: Callable[[float], float]) -> dict[str, float]:
    """Returns quantiles in milliseconds."""
    return {f"p{share}": round(value(share / 100) * 1e3, 3) for share in _SHARES}
