"""Records an engine's last steps in memory and writes them to a file when one of them fails, to be repeated elsewhere
(`engine.worker.replay`). The file holds the token ids of prompts and answers: only its owner can read it, and it is
only made where settings ask for it."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.api import ModelInfo
from engine.errors import EngineFailed
from engine.scheduling.plan import Admitted, StepPlan, StepResult
from engine.scheduling.sequence_state import SequenceTable, readmission
from engine.settings import EngineSettings

_log = logging.getLogger(__name__)
MOST_STEPS = 256
MOST_FILES = 4  # of one process
VERSION = 1


class NoRecording(Exception):
    """The file is no recording of this version; the text is the reason in one line."""


class RecordedStep(msgspec.Struct, frozen=True, array_like=True):
    plan: StepPlan
    result: StepResult | None  # None: it raised


class HeldSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that held a slot before the first recorded step."""

    admitted: Admitted  # with all its tokens until then
    pages: tuple[int, ...]


class Recording(msgspec.Struct, frozen=True):
    """All that is needed to repeat the steps, but for the weights."""

    version: int
    settings: EngineSettings  # without the model's folder and the shared tier
    info: ModelInfo
    page_bytes: int
    first: int  # number of the first recorded step, from 0
    held: tuple[HeldSequence, ...]
    steps: tuple[RecordedStep, ...]
    fault: str | None


class StepRecorder:
    """Keeps the last steps; older ones are folded into their sequences' state."""

    def __init__(
        self,
        settings: EngineSettings,
        info: ModelInfo,
        page_bytes: int,
        folder: Path | None = None,
        most_steps: int = MOST_STEPS,
    ) -> None:
        self._settings = replace(settings, model="", draft_model=None, shared_tier=None)
        self._info = info
        self._page_bytes = page_bytes
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._most_steps = most_steps
        self._steps: deque[RecordedStep] = deque()
        self._before = SequenceTable()  # as of the first of them
        self._first = 0
        self._files = 0

    def add(self, plan: StepPlan, result: StepResult | None) -> None:
        self._steps.append(RecordedStep(plan, result))
        if len(self._steps) > self._most_steps:
            self._fold()

    def write(self, fault: BaseException) -> Path | None:
        """None where there are enough files of this process, or there is no room. Later steps are a recording of their
        own, which begins behind the fault."""
        if self._files == MOST_FILES:
            return None
        try:
            path = self._write(msgspec.msgpack.encode(self._recording(fault)))
        except OSError as error:
            _log.error("the last steps could not be written to %s: %s", self._folder, error)
            return None
        self._files += 1
        _log.error("the last %d steps are in %s; they hold token ids of prompts", len(self._steps), path)
        while self._steps:
            self._fold()
        return path

    def _fold(self) -> None:
        gone = self._steps.popleft()
        self._first += 1
        with contextlib.suppress(EngineFailed):  # a plan at odds with itself is a fault that was recorded
            self._before.apply(gone.plan)
            if gone.result is not None:
                self._before.append(gone.plan.rows, gone.result.rows)

    def _recording(self, fault: BaseException) -> Recording:
        return Recording(
            version=VERSION,
            settings=self._settings,
            info=self._info,
            page_bytes=self._page_bytes,
            first=self._first,
            held=tuple(HeldSequence(readmission(state), tuple(state.pages)) for state in self._before.states()),
            steps=tuple(self._steps),
            fault=describe(fault),
        )

    def _write(self, data: bytes) -> Path:
        """The name appears only once all is there. Opened with O_EXCL and mode 0600 by mkstemp."""
        handle, part = tempfile.mkstemp(prefix="whippet-steps-", suffix=".part", dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            path = Path(part.removesuffix(".part") + ".msgpack")
            os.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        return path


def describe(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}".split("\n", 1)[0]


def read_recording(path: Path) -> Recording:
    """Raises NoRecording or OSError."""
    try:
        recording = msgspec.msgpack.decode(path.read_bytes(), type=Recording)
    except (msgspec.DecodeError, ValueError) as error:
        raise NoRecording(f"{path}: {error}") from None
    if recording.version != VERSION:
        raise NoRecording(f"{path}: version {recording.version}, this is {VERSION}")
    return recording
