"""Owns what travels between front and engine process: typed msgpack messages behind a length of four bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.api import EngineLoad, GenerationRequest, ModelInfo, Reverted
from engine.ipc.events import Event
from engine.ipc.framing import FrameReader
from engine.settings import EngineSettings, LogLevel

FOLDERS = ("WHIPPET_CACHE_DIR", "WHIPPET_PREBUILT_DIR")


class ConfigureEngine(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First to the engine: what to load, and which folders of made code its environment names, which may be others
    than at its start."""

    settings: EngineSettings
    folders: dict[str, str] = {}


def configure(settings: EngineSettings) -> ConfigureEngine:
    """With the folders that this process's environment names."""
    return ConfigureEngine(settings, {name: os.environ[name] for name in FOLDERS if name in os.environ})


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A sequence to generate. Keys are never used again in the life of a process.

    A step that begins with at least solo[0] and fewer than solo[1] tokens of output is run for it alone.
    """

    key: int
    request: GenerationRequest
    solo: tuple[int, int] = (0, 0)


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Nobody reads this sequence any more. No answer."""

    key: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The reader of this sequence is behind."""

    key: int


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The reader has caught up."""

    key: int


class SetSwitch(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Turn an optimisation on or off. `Switched` with the same ticket answers."""

    ticket: int
    name: str
    enabled: bool


class SetLogLevel(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """What the engine process logs from now on. No answer."""

    level: LogLevel


class PingEngine(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Say something. `Pong` answers, after everything that was sent before has been obeyed."""


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Look at the stacks of this process, so many seconds at most. No answer."""

    ticket: int
    seconds: float


class EndProfile(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Stop looking. `Profiled` with the same ticket answers."""

    ticket: int


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """How far loading is."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Loaded; sequences may come."""

    info: ModelInfo


class LoadRefused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """It will never be ready with these settings. The process ends."""

    kind: Literal["invalid_model", "unsupported"]
    message: str


class StepEvents(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """All that a step brought to all sequences; now and then how busy the engine is.

    Nearly every sequence gets one id and nothing else: `ids[n]` for the one with `keys[n]`, before its `events`.
    """

    events: list[Event]
    load: EngineLoad | None
    keys: list[int] = []
    ids: list[int] = []


class Switched(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The switch is in force, or why not."""

    ticket: int
    refusal: str | None
    steps: int = 0  # that were done before


class TurnedBack(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The engine took a switch back by itself."""

    what: Reverted


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The loop goes round. Nothing else sends it, so that it is no proof of life of a step that never ends."""


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """What was seen, in the form of `engine.stacks`."""

    ticket: int
    stacks: str


# front → engine
Command = (
    ConfigureEngine
    | Submit
    | Cancel
    | Pause
    | Resume
    | SetSwitch
    | SetLogLevel
    | PingEngine
    | StartProfile
    | EndProfile
)
Report = LoadProgress | Ready | LoadRefused | StepEvents | Switched | TurnedBack | Pong | Profiled  # engine → front


def _as_path(kind: type, value: Any) -> Path:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)


_NOTHING_ELSE = Event(0, ())[2:]


def packed(events: list[Event], load: EngineLoad | None) -> StepEvents:
    """The frame of a step. Of events of one sequence the order is kept."""
    keys: list[int] = []
    ids: list[int] = []
    others: list[Event] = []
    with_others = set[int]()
    for event in events:
        if event[2:] == _NOTHING_ELSE and len(event[1]) == 1 and event[0] not in with_others:
            keys.append(event[0])
            ids.append(event[1][0])
        else:
            with_others.add(event[0])
            others.append(event)
    return StepEvents(others, load, keys, ids)


def command_reader() -> FrameReader[Command]:
    """What the engine process reads with."""
    return FrameReader(msgspec.msgpack.Decoder(Command, dec_hook=_as_path))


def report_reader() -> FrameReader[Report]:
    """What the front reads with."""
    return FrameReader(msgspec.msgpack.Decoder(Report))
