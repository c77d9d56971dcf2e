"""The engine for the front, in one event loop. `supervisor` owns the process, `streams` the requests, `switching` the
switches. `cancel` may be called from a `finally`, since it does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.api import EngineLoad, EngineState, GenerationRequest, ModelInfo, Reverted
from engine.client.inbox import InboxStream
from engine.client.profiles import PendingProfiles
from engine.client.streams import Streams
from engine.client.supervisor import Backoff, Supervisor
from engine.client.switching import Switching
from engine.errors import EngineUnavailable, InvalidModel
from engine.ipc.frames import LoadProgress, Profiled, SetLogLevel, StepEvents, Switched, TurnedBack
from engine.ipc.step_mark import MarkedStep
from engine.launch import Begun
from engine.settings import EngineSettings, LogLevel
from quant.checkpoint.digest import of_model, of_texts
from quant.checkpoint.errors import BadFile

_BACKOFF = Backoff()


class EngineClient:
    """To be made inside the event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        texts: str | None = None,  # `texts_digest` of the files that prompts are made with; None: not known
        stream_buffer: int = 256 * 1024,  # bytes unread, above which a sequence pauses
        on_progress: Callable[[str, int, int], None] | None = None,  # stage, done, total
        backoff: Backoff = _BACKOFF,
        begun: Begun | None = None,  # its first process
    ) -> None:
        self._supervisor = Supervisor(settings, self, backoff, begun)
        self._folder, self._digest = settings.model, settings.model_digest
        self._texts = texts
        self._streams = Streams(asyncio.get_running_loop(), self._supervisor.send, stream_buffer)
        self._profiles = PendingProfiles(self._supervisor.send)
        self._progress = on_progress
        self._info: ModelInfo | None = None
        self._replaced = False  # the model's files, by others
        self._closing = False
        self._log_level: LogLevel | None = None  # if it was changed
        self._load = EngineLoad()
        self._switching = Switching(settings, self._supervisor.send)

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def load(self) -> EngineLoad:
        return self._load

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def deaths(self) -> Mapping[str, int]:
        return self._supervisor.deaths

    @property
    def quarantines(self) -> int:
        return self._streams.quarantines

    @property
    def reverted(self) -> Mapping[str, Reverted]:
        return self._switching.reverted

    @property
    def reverts(self) -> Mapping[str, int]:
        return self._switching.reverts

    @property
    def alive(self) -> bool:
        """Whether an absent engine may still be expected; see `engine.give_up`."""
        return self._supervisor.alive

    @property
    def live(self) -> int:
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    async def start(self) -> None:
        await self._supervisor.start()

    async def ended(self) -> None:
        """Raises what ended restarts, such as InvalidModel where the model folder was replaced."""
        await self._supervisor.ended()

    def submit(self, request: GenerationRequest) -> InboxStream:
        if self._info is None or self._supervisor.state is not EngineState.READY:
            raise self.unavailable()
        check(request, self._info)
        return self._streams.open(request)

    def unavailable(self) -> EngineUnavailable:
        why = f"the engine is {self._supervisor.state}"
        if self._replaced:
            why = "the model's files were replaced; the server has to be started again"
        elif self._closing:
            why = "the server is stopping"
        return EngineUnavailable(why, self._supervisor.retry_after)

    async def set_optimization(self, name: str, enabled: bool) -> None:
        if self._supervisor.state is not EngineState.READY:
            raise self.unavailable()
        await self._switching.set(name, enabled)

    async def profile(self, seconds: float) -> str:
        if self._supervisor.state is not EngineState.READY:
            raise self.unavailable()
        return await self._profiles.take(seconds)

    def set_log_level(self, level: LogLevel) -> None:
        self._log_level = level
        self._supervisor.send(SetLogLevel(level))

    def kill(self) -> None:
        """Kills the process, so that `close` need not wait for it."""
        self._supervisor.kill()

    async def close(self) -> None:
        self._closing = True
        self.on_ended()
        await self._supervisor.close()

    # What the supervisor tells

    def on_ready(self, info: ModelInfo) -> None:
        if (change := self._change(info)) is not None:
            self._replaced = True
            raise InvalidModel(f"{self._folder}: {change} since this server started; start it again to serve them")
        found = of_model(info.weights_digest, info.texts_digest)
        if self._digest not in (None, found):
            raise InvalidModel(f"{self._folder}: its digest is {found}, which is not the model-digest that is set")
        self._info = info
        self._load = EngineLoad(total_pages=info.total_pages)
        self._switching.tell()
        if self._log_level is not None:
            self._supervisor.send(SetLogLevel(self._log_level))
        self._streams.resume()

    def on_lost(self) -> None:
        if self.live and not self._closing:  # one that dies without work does not die of a switch
            self._switching.lost(self._load.steps)
        self._load = EngineLoad()
        self._streams.lose(self.unavailable)
        self._profiles.fail(self.unavailable)
        self._switching.fail(self.unavailable)

    def on_death(self, step: MarkedStep | None) -> None:
        info = self._info
        if step is None or info is None:
            self._streams.clear_crash()
        else:
            self._streams.attribute_crash(step, info.lookahead_tokens + info.max_tokens_per_row, self.unavailable)

    def on_late(self) -> None:
        self._streams.give_up(self.unavailable)

    def on_ended(self) -> None:
        self.on_lost()
        self._streams.fail(self.unavailable)

    def on_progress(self, progress: LoadProgress) -> None:
        if self._progress is not None:
            self._progress(progress.stage, progress.done, progress.total)

    def on_report(self, report: StepEvents | Switched | TurnedBack | Profiled) -> None:
        match report:
            case StepEvents():  # first: each step has one
                if report.load is not None:
                    self._load = report.load
                self._streams.deliver(report.events, report.keys, report.ids)
            case Switched():
                self._switching.settle(report)
            case TurnedBack(what=what):
                self._switching.turned_back(what)
            case Profiled():
                self._profiles.settle(report)

    def _change(self, info: ModelInfo) -> str | None:
        known = self._info
        texts = self._texts if known is None else known.texts_digest
        if texts is not None and info.texts_digest != texts:
            return "tokenizer, chat template or config were replaced"
        if known is not None and info.weights_digest != known.weights_digest:
            return "weights were replaced"
        return None


def texts_digest(folder: str) -> str:
    """Taken before the files are read: the engine process must find the same. Raises InvalidModel."""
    try:
        return of_texts(Path(folder)) if folder else ""
    except BadFile as error:
        raise InvalidModel(str(error)) from error


def check(request: GenerationRequest, info: ModelInfo) -> None:
    """Raises ValueError for what this model cannot run; a front that validates never meets it."""
    prompt = request.token_ids
    if not 0 < len(prompt) < info.max_context:
        raise ValueError(f"{len(prompt)} prompt tokens leave no room in a context of {info.max_context}")
    if request.stopping.max_tokens < (request.prompt_logprobs is None):
        raise ValueError("max_tokens is too low")
    if not 0 <= request.sampling.seed < 1 << 64:
        raise ValueError("the seed does not fit into 64 bits")
    biased = [token_id for token_id, _ in request.sampling.logit_bias]
    for name, ids in (
        ("token_ids", prompt),
        ("stop_token_ids", request.stopping.stop_token_ids),
        ("logit_bias", biased),
    ):
        if ids and (min(ids) < 0 or max(ids) >= info.vocab_size):
            raise ValueError(f"{name} has an id outside of a vocabulary of {info.vocab_size}")
