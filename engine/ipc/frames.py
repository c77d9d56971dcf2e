"""What travels between front and engine process: typed msgpack messages behind a length of four bytes."""

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
    """First frame: what to load, and the folders of made code that the engine's environment names."""

    settings: EngineSettings
    folders: dict[str, str] = {}


def configure(settings: EngineSettings) -> ConfigureEngine:
    return ConfigureEngine(settings, {name: os.environ[name] for name in FOLDERS if name in os.environ})


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Keys are never reused in the life of a process. A step that begins with at least solo[0] and fewer than solo[1]
    tokens of output is run for it alone."""

    key: int
    request: GenerationRequest
    solo: tuple[int, int] = (0, 0)


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    key: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=4):
    key: int


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=5):
    key: int


class SetSwitch(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """`Switched` with the same ticket answers."""

    ticket: int
    name: str
    enabled: bool


class SetLogLevel(msgspec.Struct, frozen=True, array_like=True, tag=10):
    level: LogLevel


class PingEngine(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Asks for `Pong`, sent once all earlier frames have been obeyed."""


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag=8):
    ticket: int
    seconds: float


class EndProfile(msgspec.Struct, frozen=True, array_like=True, tag=9):
    ticket: int


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag=1):
    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    info: ModelInfo


class LoadRefused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The process ends: it will never be ready with these settings."""

    kind: Literal["invalid_model", "unsupported"]
    message: str


class StepEvents(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Nearly every sequence gets one id and nothing else: `ids[n]` for the one with `keys[n]`, before its `events`."""

    events: list[Event]
    load: EngineLoad | None
    keys: list[int] = []
    ids: list[int] = []


class Switched(msgspec.Struct, frozen=True, array_like=True, tag=5):
    ticket: int
    refusal: str | None
    steps: int = 0  # that were done before


class TurnedBack(msgspec.Struct, frozen=True, array_like=True, tag=8):
    what: Reverted


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Nothing else sends it, so that a step that never ends gives no sign of life."""


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The profile's form is `engine.stacks`."""

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


def as_path(kind: type, value: Any) -> Path:
    """Decodes paths, for msgspec."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)


_NOTHING_ELSE = Event(0, ())[2:]


def packed(events: list[Event], load: EngineLoad | None) -> StepEvents:
    """Events of one sequence keep their order."""
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
    return FrameReader(msgspec.msgpack.Decoder(Command, dec_hook=as_path))


def report_reader() -> FrameReader[Report]:
    return FrameReader(msgspec.msgpack.Decoder(Report))
