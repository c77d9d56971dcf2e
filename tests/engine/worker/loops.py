"""A running loop with the test as its front."""

from __future__ import annotations

import socket
import threading

from engine.api import EngineLoad
from engine.fake import FakeRunner
from engine.ipc.events import Event
from engine.ipc.frames import Command, Report, StepEvents, report_reader
from engine.ipc.framing import encode
from engine.ipc.link import EngineLink
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.settings import EngineSettings, FakeSettings
from engine.worker.device_memory import DeviceMemory
from engine.worker.loop import Loop
from engine.worker.switches import WorkerSwitches

PATIENCE = 60.0  # seconds after which a test that waits has failed


def all_of(step: StepEvents) -> list[Event]:
    """Its events, those that are ids alone too."""
    return [Event(key, (one,)) for key, one in zip(step.keys, step.ids, strict=True)] + step.events


class Front:
    """The other end of a running loop."""

    def __init__(
        self, memory: DeviceMemory | None = None, runner: type[FakeRunner] = FakeRunner, **fake: object
    ) -> None:
        settings = EngineSettings(
            model="",
            kind="fake",
            max_sequences=2,
            fake=FakeSettings(faults=True, total_pages=64, **fake),  # type: ignore[arg-type]
        )
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        self.reader = report_reader()
        self.seen: list[Report] = []
        limits = Limits(max_sequences=2, max_batch_tokens=64, max_context=1024)
        self.runner, self.scheduler = runner(settings), Scheduler(limits, PagePool(64))
        switches = WorkerSwitches(settings, self.runner, self.scheduler)
        self.loop = Loop(EngineLink(theirs), self.runner, self.scheduler, switches, memory=memory)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(theirs,))
        self.thread.start()

    def _run(self, theirs: socket.socket) -> None:
        with theirs:
            try:
                self.loop.run()
            except Exception as error:
                self.error = error

    def send(self, *commands: Command) -> None:
        self.socket.sendall(b"".join(encode(command) for command in commands))

    def receive(self) -> list[Report]:
        data = self.socket.recv(1 << 16)
        assert data, "the loop has gone"
        reports = self.reader.feed(data)
        self.seen += reports
        return reports

    def events(self, key: int) -> list[Event]:
        return [event for step in self.steps() for event in step if event.key == key]

    def steps(self) -> list[list[Event]]:
        """What each brought, of those that brought anything."""
        told = [all_of(report) for report in self.seen if isinstance(report, StepEvents)]
        return [step for step in told if step]

    def read_to_end(self, key: int) -> list[Event]:
        while not any(event.finish or event.failure for event in self.events(key)):
            self.receive()
        return self.events(key)

    def loads(self) -> list[EngineLoad]:
        return [report.load for report in self.seen if isinstance(report, StepEvents) and report.load is not None]

    def wait_for_load(self, **wanted: int) -> EngineLoad:
        """Until the last load told is such."""
        while True:
            for load in self.loads()[-1:]:
                if all(getattr(load, name) == value for name, value in wanted.items()):
                    return load
            self.receive()

    def close(self) -> None:
        self.socket.close()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
