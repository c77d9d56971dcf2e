"""The checker of the soak's history: what it passes, and that it sees every kind of lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.soaking.history import Began, EndedCall, Event, OracleQuestion, verdict
from bench.soaking.trouble import growth

OURS, SECOND = OracleQuestion("acme", "one", "first answer"), OracleQuestion("acme", "two", "second answer")
THEIRS = OracleQuestion("bravo", "one of bravo", "answer of bravo")
QUESTIONS = (OURS, SECOND, THEIRS)
WHOLE = EndedCall(1, "OK", ("first ", "answer"), 1)


def told(*events: Event) -> list[str]:
    return verdict(events, QUESTIONS).faults


def ended(kind: str, end: EndedCall) -> list[str]:
    return told(Began(1, kind, OURS), end)


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("unary", WHOLE),
        ("stream", WHOLE),
        ("stream", EndedCall(1, "UNAVAILABLE", ("first",))),
        ("stream", EndedCall(1, "RESOURCE_EXHAUSTED")),
        ("leaves", EndedCall(1, "CANCELLED", ("fir", "st"))),
        ("leaves", WHOLE),
        ("hurries", EndedCall(1, "DEADLINE_EXCEEDED", ("first answer",))),  # all of it, but the message that says so
        ("slow", EndedCall(1, "ABORTED", ("first",))),
        ("guest", EndedCall(1, "UNAUTHENTICATED")),
        ("stranger", EndedCall(1, "UNAUTHENTICATED")),
        ("sampled", EndedCall(1, "OK", ("anything",), 1)),
    ],
)
def test_what_is_promised_passes(kind: str, end: EndedCall) -> None:
    assert ended(kind, end) == []


@pytest.mark.parametrize(
    ("kind", "end", "named"),
    [
        ("unary", replace(WHOLE, code="INTERNAL"), "ended with INTERNAL"),
        ("unary", EndedCall(1, "CANCELLED"), "ended with CANCELLED"),
        ("stream", EndedCall(1, "never", ("first",)), "ended with never"),
        ("stranger", replace(WHOLE), "ended with OK"),
        ("stranger", EndedCall(1, "UNAUTHENTICATED", ("first answer",)), "without a token got text"),
        ("stream", replace(WHOLE, finishes=2), "2 messages"),
        ("stream", replace(WHOLE, late=True), "more followed"),
        ("stream", replace(WHOLE, finishes=0), "no message ended"),
        ("stream", replace(WHOLE, texts=("first ",)), "another text"),  # a message was lost
        ("stream", replace(WHOLE, texts=("first ", "first ", "answer")), "another text"),  # one came twice
        ("stream", replace(WHOLE, texts=("answer", "first ")), "another text"),  # in another order
        ("unary", replace(WHOLE, texts=("second answer",)), "another text"),  # of another question
        ("unary", replace(WHOLE, texts=("answer of bravo",)), "the answer of another tenant"),
        ("stream", EndedCall(1, "UNAVAILABLE", ("firth",)), "cut off"),
        ("leaves", EndedCall(1, "CANCELLED", ("first", "answer")), "cut off"),
        ("hurries", EndedCall(1, "DEADLINE_EXCEEDED", ("answer of",)), "cut off"),
    ],
)
def test_what_is_not_promised_is_seen(kind: str, end: EndedCall, named: str) -> None:
    (said,) = [one for one in ended(kind, end) if named in one]
    assert said.startswith("1, ")


def test_a_request_ends_once_and_none_is_lost() -> None:
    began = Began(1, "unary", OURS)
    assert told(began) == ["1, unary, never ended"]
    assert told(began, WHOLE, WHOLE) == ["1 ended twice"]
    assert told(began, WHOLE, began) == ["1 began twice"]
    assert told(WHOLE) == ["1 ended unasked"]


def test_no_entry_serves_two_tenants() -> None:
    theirs = EndedCall(2, "OK", ("answer of bravo",), 1, entry="e1")
    events = (Began(1, "unary", OURS), replace(WHOLE, entry="e1"), Began(2, "unary", THEIRS))
    assert told(*events, replace(theirs, entry="e2")) == []
    assert told(*events, theirs) == ["2, unary of bravo: served from an entry of acme"]


def test_ends_are_counted() -> None:
    found = verdict([Began(1, "unary", OURS), WHOLE, Began(2, "stream", OURS), EndedCall(2, "UNAVAILABLE")], QUESTIONS)
    assert (found.requests, found.ends["unary", "OK"], found.ends["stream", "UNAVAILABLE"]) == (2, 1, 1)


def test_growth_is_that_of_the_line_and_not_of_its_ends() -> None:
    flat = [(float(at), 100.0 + (at % 2)) for at in range(100)]
    assert abs(growth(flat)) < 1
    assert growth([(float(at), 100.0 + 2 * at) for at in range(100)]) == pytest.approx(198)
    assert growth([*flat[:-1], (99.0, 5000.0)]) < 500
    assert growth([]) == growth([(1.0, 5.0)]) == 0.0
