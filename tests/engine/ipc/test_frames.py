"""Frames survive any cutting of the stream, and nonsense is an error rather than a message."""

from __future__ import annotations

import itertools
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import EngineLoad, Finish, FinishReason, GenerationRequest, ModelInfo, Priority, Start, TokenLogprob
from engine.fake import FakeRunner, plain_request
from engine.ipc.events import Event, Failure
from engine.ipc.frames import (
    Cancel,
    Command,
    ConfigureEngine,
    LoadProgress,
    LoadRefused,
    Pause,
    PingEngine,
    Pong,
    Ready,
    Report,
    Resume,
    SetSwitch,
    StepEvents,
    Submit,
    Switched,
    command_reader,
    packed,
    report_reader,
)
from engine.ipc.framing import MAX_FRAME, FrameError, encode
from engine.settings import EngineSettings, FakeSettings
from tests.properties import example_count

floats = st.floats(allow_nan=False)
keys = st.integers(0, 2**53)
logprobs = st.builds(TokenLogprob, floats, st.lists(st.tuples(keys, floats), max_size=3).map(tuple))
info = FakeRunner(EngineSettings(model="m", kind="fake")).info
finishes = st.builds(
    Finish,
    reason=st.sampled_from(FinishReason),
    stop_token_id=st.none() | keys,
    cached_tokens=keys,
    queue=floats,
    prefill=floats,
    decode=floats,
)
events = st.builds(
    Event,
    keys,
    st.lists(keys, max_size=5).map(tuple),
    st.lists(logprobs, max_size=3).map(tuple),
    st.none() | finishes,
    st.none() | st.sampled_from(Failure),
    st.none() | st.builds(Start, cached_tokens=keys, queue=floats, prefill=floats),
    draft_proposed=keys,
    draft_accepted=keys,
    prompt_logprobs=st.lists(logprobs, max_size=3).map(tuple),
)
requests = st.builds(
    plain_request,
    st.lists(keys, max_size=5).map(tuple),
    keys,
    request_id=st.text(),
    priority=st.sampled_from(Priority),
    deadline=st.none() | floats,
    logprobs=st.none() | st.integers(0, 20),
)
commands = st.one_of(
    st.builds(ConfigureEngine, st.builds(EngineSettings, model=st.text(), fake=st.builds(FakeSettings))),
    st.builds(Submit, keys, requests),
    st.builds(Cancel, keys),
    st.builds(Pause, keys),
    st.builds(Resume, keys),
    st.builds(SetSwitch, keys, st.text(), st.booleans()),
    st.builds(PingEngine),
)
reports = st.one_of(
    st.builds(LoadProgress, st.text(), keys, keys),
    st.just(Ready(info)),
    st.builds(LoadRefused, st.sampled_from(["invalid_model", "unsupported"]), st.text()),
    st.builds(StepEvents, st.lists(events, max_size=4), st.none() | st.builds(EngineLoad, running=keys)),
    st.builds(Switched, keys, st.none() | st.text()),
    st.builds(Pong),
)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(borders)]


@pytest.mark.product
@given(st.lists(commands, max_size=5), st.lists(st.integers(0, 10_000), max_size=8))
def test_commands_come_whole_however_they_are_cut(messages: list[Command], places: list[int]) -> None:
    reader = command_reader()
    stream = b"".join(encode(message) for message in messages)
    assert [message for chunk in cut(stream, places) for message in reader.feed(chunk)] == messages


@given(st.lists(reports, max_size=5), st.lists(st.integers(0, 10_000), max_size=8))
def test_reports_come_whole_however_they_are_cut(messages: list[Report], places: list[int]) -> None:
    reader = report_reader()
    stream = b"".join(encode(message) for message in messages)
    assert [message for chunk in cut(stream, places) for message in reader.feed(chunk)] == messages


def test_byte_by_byte() -> None:
    reader = command_reader()
    stream = encode(Cancel(7)) + encode(Submit(8, plain_request((1, 2, 3))))
    got = [message for index in range(len(stream)) for message in reader.feed(stream[index : index + 1])]
    assert [type(message) for message in got] == [Cancel, Submit]


def test_types_are_kept() -> None:
    """Enums come back as enums and tuples as tuples, not as what msgpack has for them."""
    request = plain_request((1, 2), priority=Priority.INTERACTIVE)
    (submit,) = command_reader().feed(encode(Submit(1, request)))
    assert isinstance(submit, Submit)
    assert type(submit.request) is GenerationRequest
    assert type(submit.request.priority) is Priority
    assert type(submit.request.token_ids) is tuple
    (step,) = report_reader().feed(encode(StepEvents([Event(1, (2,), failure=Failure.STEP)], None)))
    assert isinstance(step, StepEvents)
    assert type(step.events[0]) is Event
    assert type(step.events[0].failure) is Failure
    (ready,) = report_reader().feed(encode(Ready(info)))
    assert isinstance(ready, Ready)
    assert type(ready.info) is ModelInfo


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([(), (5,), (6, 7)]), st.booleans())))
def test_ids_alone_go_in_columns_and_each_sequence_keeps_its_order(
    made: list[tuple[int, tuple[int, ...], bool]],
) -> None:
    began = Start(cached_tokens=0, queue=0.0, prefill=0.0)
    told = [Event(key, ids, start=began if begins else None) for key, ids, begins in made]
    step = packed(told, None)
    back = [Event(key, (one,)) for key, one in zip(step.keys, step.ids, strict=True)] + step.events
    for key in range(4):
        assert [event for event in back if event.key == key] == [event for event in told if event.key == key]
    (got,) = report_reader().feed(encode(step))
    assert got == step
    lone = [Event(key, (key,)) for key in range(300)]
    assert packed(lone, None).events == []
    assert len(encode(packed(lone, None))) < 6 * len(lone), "bytes"


@settings(max_examples=example_count(200))
@given(st.binary(max_size=200))
def test_nonsense_is_an_error_or_a_message(body: bytes) -> None:
    for reader in (command_reader(), report_reader()):
        try:
            messages = reader.feed(struct.pack(">I", len(body)) + body)
        except FrameError:
            continue
        assert len(messages) == 1
        assert isinstance(messages[0], Command | Report)


@settings(max_examples=example_count(200))
@given(st.one_of(commands, reports), st.data())
def test_a_damaged_frame_is_an_error_or_a_message(message: Command | Report, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(4, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    for reader in (command_reader(), report_reader()):
        try:
            messages = reader.feed(bytes(frame))
        except FrameError:
            continue
        assert all(isinstance(one, Command | Report) for one in messages)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        msgspec.msgpack.encode([99, 1]),
        msgspec.msgpack.encode([3]),
        msgspec.msgpack.encode([3, "seven"]),
        msgspec.msgpack.encode({"type": 3, "key": 1}),
        msgspec.msgpack.encode([3, 1]) + b"\x00",
        b"\x91" * 100_000,
    ],
)
def test_known_nonsense(body: bytes) -> None:
    with pytest.raises(FrameError):
        command_reader().feed(struct.pack(">I", len(body)) + body)


def test_a_giant_length_is_an_error_before_its_bytes_come() -> None:
    with pytest.raises(FrameError, match="too long"):
        command_reader().feed(struct.pack(">I", MAX_FRAME + 1))
    reader = command_reader()
    assert reader.feed(struct.pack(">I", MAX_FRAME)) == []
    reader = command_reader()
    assert reader.feed(b"\xff") == []
    with pytest.raises(FrameError, match="too long"):
        reader.feed(b"\xff\xff\xff")


def test_nothing_giant_is_sent() -> None:
    with pytest.raises(FrameError, match="too long"):
        encode(LoadRefused("unsupported", "x" * MAX_FRAME))
