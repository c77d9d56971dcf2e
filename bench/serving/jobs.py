"""What a calling process is told and what it says, as lines of JSON. Times are seconds of the monotonic clock,
which all processes of a machine share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

_STEP = math.log(1.01)  # between two borders of what is counted: quantiles are right to one per cent


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """One request. Its prompt is `text`; without one, ids: of each of `blocks` 512, cut to `prompt`; without those,
    `prompt` ids that no other number has."""

    number: int
    prompt: int  # tokens
    tokens: int  # of the answer
    at: float | None = None  # seconds after the beginning; None: as soon as one of the job's streams is free
    text: str = ""
    blocks: tuple[int, ...] = ()


class Job(msgspec.Struct, frozen=True):
    """Requests for one process."""

    begin: float
    wishes: list[Wish]
    streams: int = 0  # at once; 0: each at its own time
    until: float | None = None  # with streams: the wishes again and again until this time; None: once
    vocabulary: int = 256
    priority: int = 0  # as on the wire
    patience: float = 300.0  # seconds; who waits for longer was lost


class Ended(msgspec.Struct, array_like=True):
    """One request as its caller saw it."""

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
    late: bool = False  # a message came after the one that said it was the last
    retry: float | None = None  # seconds after which a refusal says to come again

    @property
    def accepted(self) -> bool:
        """Something came: no refusal."""
        return self.messages > 0 or self.finishes > 0

    @property
    def wrong(self) -> bool:
        """Accepted or said to have gone well, but not ended exactly once with all its tokens."""
        if not self.accepted and self.code != "OK":
            return False
        return self.code != "OK" or self.finishes != 1 or self.late or self.tokens != self.wanted


class Found(msgspec.Struct):
    """Of one job."""

    ended: list[Ended]
    gaps: dict[int, int]  # between messages of a stream, by `bucket`
    tenths: dict[int, int]  # tokens that came in each tenth of a second after the beginning
    cpu: float  # seconds of processor time that this process used


def bucket(seconds: float) -> int:
    """Where a duration is counted."""
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
    """Counts added up."""
    total: dict[int, int] = {}
    for part in parts:
        for at, count in part.items():
            total[at] = total.get(at, 0) + count
    return total


def shared_out(job: Job, processes: int) -> list[Job]:
    """The job cut for so many processes, streams and wishes evenly; fewer jobs where it has not enough streams."""
    parts = min(processes, job.streams) if job.streams else processes
    found = []
    for part in range(parts):
        streams = job.streams // parts + (part < job.streams % parts)
        found.append(msgspec.structs.replace(job, wishes=job.wishes[part::parts], streams=streams))
    return [one for one in found if one.wishes]


def ids_of(wish: Wish, vocabulary: int) -> Sequence[int]:
    """Of its prompt. Never one of the first three, which models give a meaning."""
    room = vocabulary - 3
    if not wish.blocks:
        return [3 + (wish.number * 7919 + place * 104_729 + place * place) % room for place in range(wish.prompt)]
    found: list[int] = []
    for block in wish.blocks:
        found += [3 + (block * 7919 + place * 104_729) % room for place in range(512)]
    return found[: wish.prompt]
