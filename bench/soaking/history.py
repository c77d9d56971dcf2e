"""Checks histories of requests against what callers are promised. Knows no gRPC and no clock.

A history is a list of events in the order in which callers saw them. `verdict` compares it with an oracle: the answers
to the same questions, each asked alone while nothing was wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# How a request may end by what its caller does. UNAVAILABLE: the engine process died, or is not there. NOT_FOUND of an
# abort: what it names is over.
_ALWAYS = frozenset({"OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED"})
CODES: Mapping[str, frozenset[str]] = {
    "unary": _ALWAYS,
    "stream": _ALWAYS,
    "sampled": _ALWAYS,
    "slow": _ALWAYS | {"ABORTED"},  # reads late, but within the time that a reader has
    "leaves": _ALWAYS | {"CANCELLED"},
    "hurries": _ALWAYS | {"DEADLINE_EXCEEDED"},  # its deadline is shorter than its answer
    "guest": _ALWAYS | {"UNAUTHENTICATED"},  # its token comes and goes
    "stranger": frozenset({"UNAUTHENTICATED"}),
}
PROMISED = frozenset({"unary", "stream", "slow", "guest", "leaves", "hurries"})  # whose text the oracle knows


@dataclass(frozen=True, slots=True)
class OracleQuestion:
    tenant: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Began:
    number: int
    kind: str
    question: OracleQuestion


@dataclass(frozen=True, slots=True)
class EndedCall:
    number: int
    code: str
    texts: tuple[str, ...] = ()  # of its messages, one behind the other
    finishes: int = 0  # messages that ended an answer
    late: bool = False  # something came behind such a message
    entry: str = ""  # the cache entry that it came from


Event = Began | EndedCall


@dataclass(slots=True)
class SoakVerdict:
    """A sentence for each fault, and how many requests there were by kind and code."""

    faults: list[str] = field(default_factory=list)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        return self.ends.total()


def verdict(events: Iterable[Event], questions: Sequence[OracleQuestion]) -> SoakVerdict:
    """Checks that every request that began has ended once, in a documented way, and with no text but its own."""
    found = SoakVerdict()
    owners = {question.answer: question for question in questions}
    began: dict[int, Began] = {}
    ended: set[int] = set()
    entries: dict[str, str] = {}  # cache entry → the tenant that was served from it
    for event in events:
        if isinstance(event, Began):
            if event.number in began:
                found.faults.append(f"{event.number} began twice")
            began[event.number] = event
            continue
        asked = began.get(event.number)
        if asked is None or event.number in ended:
            found.faults.append(f"{event.number} ended {'unasked' if asked is None else 'twice'}")
            continue
        ended.add(event.number)
        found.ends[asked.kind, event.code] += 1
        wrong = [*_form(asked, event), *_text(asked, event, owners), *_entry(asked, event, entries)]
        found.faults += [f"{event.number}, {asked.kind} of {asked.question.tenant}: {one}" for one in wrong]
    found.faults += [f"{number}, {one.kind}, never ended" for number, one in began.items() if number not in ended]
    return found


def _form(asked: Began, event: EndedCall) -> Iterable[str]:
    if event.code not in CODES[asked.kind]:
        yield f"ended with {event.code}"
    if event.finishes > 1 or event.late:
        yield f"{event.finishes} messages ended the answer, or more followed: {event.late}"
    if event.code == "OK" and event.finishes == 0:
        yield "OK, and no message ended the answer"


def _text(asked: Began, event: EndedCall, owners: Mapping[str, OracleQuestion]) -> Iterable[str]:
    text = "".join(event.texts)
    if asked.kind not in PROMISED:
        if asked.kind == "stranger" and text:
            yield "a caller without a token got text"
        return
    if event.finishes:
        if text != asked.question.answer:
            owner = owners.get(text)
            foreign = owner is not None and owner.tenant != asked.question.tenant
            yield "the answer of another tenant" if foreign else "another text than alone"
    elif not asked.question.answer.startswith(text):
        yield "cut off, and what came is not how its answer begins"


def _entry(asked: Began, event: EndedCall, entries: dict[str, str]) -> Iterable[str]:
    if event.entry and entries.setdefault(event.entry, asked.question.tenant) != asked.question.tenant:
        yield f"served from an entry of {entries[event.entry]}"
