"""Starts the processes that share the data port, stops them like a gRPC server, and restarts one that dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc

from engine.settings import LogFormat
from service.core.errors import Overloaded, Reason
from service.transport.call.http2 import PortBounds
from service.transport.call.status import failure_of
from service.transport.port.tls import Certificates
from service.transport.relays.calls import RelayedCalls
from service.transport.relays.frames import (
    Alive,
    CallEnded,
    CallRefusal,
    CallStarted,
    Listen,
    Listening,
    Message,
    Order,
    PingRelay,
    RelayLink,
    Report,
    Stop,
    Stopped,
    TurnedAway,
    UseIdentification,
    WriteAccepted,
)
from service.transport.relays.life import SignsOfLife

_BACKOFF = (1.0, 60.0)  # seconds until another is started: after one that had listened; at most
_START = 60.0  # seconds until it listens, on however slow a machine
_LATE = 1.0  # seconds after its calls' grace that it gets to say that it has stopped
_END = 2.0  # seconds that it gets to end by itself
_EXIT_POLL = 0.005  # seconds
_HINTS = 16  # different ones, from 1 to 1.5 seconds
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "GLIBC_TUNABLES")
_log = logging.getLogger(__name__)


class CannotListen(Exception):
    """How the first listening process ended. One line."""


class RelayCounts(NamedTuple):
    processes: Counter[str]  # `listening`, `deaths`
    refusals: Counter[str]  # calls, by reason


@dataclass(frozen=True, slots=True)
class RelayOptions:
    count: int
    hang_timeout: float = 10.0  # seconds
    log_level: str = "info"
    log_format: LogFormat = "text"


class _Relay:
    def __init__(self, calls: RelayedCalls, options: RelayOptions, refusals: Counter[str]) -> None:
        self._calls = calls
        self._refusals = refusals
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self.process = _launch(theirs.fileno(), options)
        self._link: RelayLink[Report] = RelayLink(Report, self._receive, self._lost)
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._hang_timeout = options.hang_timeout
        self._life = SignsOfLife(options.hang_timeout, lambda: self.send(PingRelay()))
        self._watch: asyncio.Task[None] | None = None
        self._hung = False
        self.stopped = asyncio.Event()  # its server has, or it has gone itself
        self.lost = asyncio.Event()

    async def start(self, listen: Listen) -> int:
        """Returns the port; 0 where the relay cannot listen, or has gone."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=self._socket)
        self.send(listen)
        try:
            async with asyncio.timeout(_START):
                return await self._port
        except TimeoutError:
            return 0

    def send(self, order: Order) -> None:
        self._link.send(order)

    async def end(self) -> str:
        """Closes the socket, which asks the relay to end, and returns how it ended."""
        self._link.close()
        process = self.process
        if self._watch is not None:
            self._watch.cancel()
        try:
            async with asyncio.timeout(_END):
                while process.poll() is None:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(_EXIT_POLL)
        except TimeoutError:
            _log.warning("a relay does not end by itself")
        finally:
            process.kill()
            code = process.wait()  # a moment: it has ended, or was killed
        if self._hung:
            return f"gave no sign of life for {self._hang_timeout:g} s and was killed"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    async def _kill_if_hung(self) -> None:
        """Callers get UNAVAILABLE from the broken connections, because only the relay could write another status."""
        await self._life.silence()
        self._hung = True
        self.process.kill()

    def _receive(self, report: Report) -> None:
        self._life.heard()
        match report:
            case CallStarted():
                self._calls.begin(report, self._link)
            case Message() | WriteAccepted() | CallEnded():
                self._calls.on(report)
            case Listening(port=port) if self._port.done():  # `start` waits no longer
                pass
            case Listening(port=port):
                self._port.set_result(port)
                self._watch = asyncio.get_running_loop().create_task(self._kill_if_hung(), name="relay's life")
            case Alive():
                pass
            case TurnedAway(calls=calls):
                self._refusals[Reason.MESSAGES] += calls
            case Stopped():
                self.stopped.set()

    def _lost(self) -> None:
        if not self._port.done():
            self._port.set_result(0)
        self.lost.set()
        self.stopped.set()
        self._calls.lose()


class Relays:
    """Runs several processes that listen on one address, as one server."""

    def __init__(
        self,
        relays: RelayOptions,
        address: str,
        bounds: PortBounds,
        handlers: grpc.GenericRpcHandler[bytes, bytes],
        certificates: Certificates | None,
        counts: RelayCounts,
        reserved: Sequence[socket.socket],
    ) -> None:
        """`certificates`: None for plaintext. `reserved` sockets are bound to the address, and closed in the end."""
        self._relays = relays
        self._address = address
        self._bounds = bounds
        self._handlers = handlers
        self._certificates = certificates
        self._counts = counts
        self._reserved = reserved
        self._hints = [_turned_away(1.0 + number / (2 * _HINTS)) for number in range(_HINTS)]
        self._alive = set[_Relay]()
        self._supervisors: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(relay.process.pid for relay in self._alive)

    async def start(self) -> None:
        """Returns once all of them listen. Raises CannotListen."""
        if self._certificates is not None:
            loop = asyncio.get_running_loop()
            self._certificates.subscribe(partial(loop.call_soon_threadsafe, self._show))
        relays = await asyncio.gather(*(self._open() for _ in range(self._relays.count)))
        self._supervisors = [asyncio.create_task(self._supervise(relay), name="relay") for relay in relays]

    async def stop(self, grace: float | None) -> None:
        """Behaves as grpc.aio.Server.stop, and may be called again with less grace."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        relays = tuple(self._alive)
        for relay in relays:
            relay.send(Stop(grace))
        with suppress(TimeoutError):
            async with asyncio.timeout((grace or 0.0) + _LATE):
                await asyncio.gather(*(relay.stopped.wait() for relay in relays))
        await asyncio.gather(*(relay.end() for relay in relays), *self._supervisors, return_exceptions=True)
        for one in self._reserved:
            one.close()

    def _show(self) -> None:
        assert self._certificates is not None
        for relay in self._alive:
            relay.send(UseIdentification(self._certificates.current()))

    async def _open(self) -> _Relay:
        relay = _Relay(RelayedCalls(self._handlers), self._relays, self._counts.refusals)
        identification = None if self._certificates is None else self._certificates.current()
        try:
            listens = await relay.start(
                Listen(self._address, self._bounds, identification, self._relays.hang_timeout, self._hints)
            )
        except BaseException:
            await relay.end()
            raise
        if not listens:
            raise CannotListen(await relay.end())
        self._alive.add(relay)
        self._counts.processes["listening"] += 1
        return relay

    async def _supervise(self, relay: _Relay) -> None:
        while True:
            await relay.lost.wait()
            self._alive.remove(relay)
            self._counts.processes["listening"] -= 1
            relay = await self._follow(await relay.end())

    async def _follow(self, how: str) -> _Relay:
        delay, most = _BACKOFF
        while True:
            self._counts.processes["deaths"] += 1
            _log.error("a relay %s; another is started in %g s", how, delay)
            await asyncio.sleep(delay)
            try:
                return await self._open()
            except (CannotListen, OSError) as error:
                how, delay = str(error), min(2 * delay, most)


def _turned_away(hint: float) -> CallRefusal:
    """Refuses a call that arrives while the front is too far behind to hear of it; retry in `hint` seconds."""
    failure = failure_of(Overloaded("too many calls wait", Reason.MESSAGES, hint), None)
    return CallRefusal(failure.code.value[0], failure.message, list(failure.trailers))


def _launch(fd: int, options: RelayOptions) -> subprocess.Popen[bytes]:
    """Passes on only the environment that it needs. The interpreter ignores the working folder, so that no `service`
    there is taken for ours."""
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    home = Path(__file__).resolve().parents[3]
    if home.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), environment.get("PYTHONPATH")]))
    flags = ("--fd", str(fd), "--log-level", options.log_level, "--log-format", options.log_format)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "service.transport.relays.process", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[fd],
        env=environment,
        start_new_session=True,  # a terminal's ctrl-C is the front's to handle
    )
