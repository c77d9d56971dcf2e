"""Declares what a protocol receives and provides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import grpc

from engine.api import Engine, EngineState
from service.core.admission.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.answers.flush import Flusher
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.operations.draining import Drain
from service.core.operations.profiling import Profiler
from service.core.switches import OptimizationSwitches
from service.core.text.archive import TokenizerArchive
from service.core.text.sandbox.processes import TextProcesses
from service.core.tokenization import Tokenization
from service.observability.instruments import Instruments
from service.observability.record import Observers
from service.transport.call.inbox import Inbox
from service.transport.call.rpc import Guard
from service.transport.call.writer import StallWatch


@dataclass(frozen=True, slots=True)
class UseCases:
    engine: Engine
    model: ServedModel
    processes: TextProcesses
    generator: Generator
    tokenization: Tokenization
    tokenizer_files: TokenizerArchive
    admission: Admission
    drain: Drain
    switches: OptimizationSwitches
    caches: AnswerCaches
    flusher: Flusher
    profiler: Profiler
    instruments: Instruments
    counted: frozenset[
        str
    ]  # methods that all protocols together count as load: `whippet.v1.GenerationService/Generate`

    @property
    def objection(self) -> str:
        """Why callers should go elsewhere; empty where they may call."""
        if self.drain.begun:
            return "the server is draining"
        return "" if self.engine.state is EngineState.READY else str(self.engine.unavailable())


@dataclass(frozen=True, slots=True)
class Services:
    """One port's gRPC services, and the full names that reflection lists."""

    handlers: tuple[grpc.GenericRpcHandler[bytes, bytes], ...]
    names: tuple[str, ...]
    generating: tuple[str, ...] = ()  # those of them that health knows: they serve while requests are accepted


class WireProtocol(Protocol):
    @property
    def counted(self) -> frozenset[str]:
        """Methods of the data port whose calls are load: not those that probe or look."""

    def data_services(
        self, cases: UseCases, guard: Guard, inbox: Inbox, watch: StallWatch, observers: Observers
    ) -> Services:
        pass

    def admin_services(self, cases: UseCases, guard: Guard, inbox: Inbox, observers: Observers) -> Services:
        pass
