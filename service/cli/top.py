"""Prints repeatedly what a running server does: `whippet top`."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from service.cli.channel import (
    USAGE,
    Parser,
    ServerAddress,
    UsageError,
    cancelled_at_ctrl_c,
    complain,
    exit_code,
    explain,
)
from service.cli.top_frame import Look, birth, frame
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1.admin_pb2_grpc import AdminServiceStub

_PATIENCE = 5.0  # seconds for an answer
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, without a cursor
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_HOPELESS = {  # what another try would not change
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}


def run(argv: Sequence[str]) -> int:
    try:
        flags = _parser().parse_args(argv)
        if not 0.1 <= flags.interval <= 3600:
            raise UsageError("--interval must be from 0.1 to 3600")
        server = ServerAddress.of(flags)
        with server.channel() as channel:
            watch = ServerWatch(channel, server)
            show = _once if flags.once else _live if sys.stdout.isatty() else _listed
            show(watch, flags.interval)
        return 0
    except Unseen as error:
        return complain(str(error), error.code)
    except UsageError as error:
        return complain(f"{error}; see whippet top --help", USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's last flush meets no broken pipe
        return 0
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="whippet top",
        description="Shows what a server does: requests, rates, latencies, caches, pages, engine. Ends with q or "
        "ctrl-C. Where stdout is no terminal, frames are written one after another.",
        allow_abbrev=False,
    )
    ServerAddress.add_operator_flags(parser)
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two looks; default: %(default)s"
    )
    parser.add_argument("--once", action="store_true", help="one frame, of one interval")
    return parser


class Unseen(Exception):
    """The server cannot be polled. One line, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ServerWatch:
    def __init__(self, channel: grpc.Channel, server: ServerAddress) -> None:
        self._stub = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        self._server = server
        self._looks: list[Look] = []  # the last two
        self._trouble = ""  # why the last one brought nothing; until the next, the last frame stays

    def look(self, once: bool = False) -> None:
        """Raises Unseen where another try would not help, or is not wanted."""
        call = self._stub.GetLoad.future(admin_pb2.GetLoadRequest(), timeout=_PATIENCE, metadata=self._server.metadata)
        with cancelled_at_ctrl_c(call) as interrupted:
            try:
                load = call.result()
            except grpc.FutureCancelledError:
                raise KeyboardInterrupt from None
            except grpc.RpcError as error:
                self._trouble = explain(error, self._server.address)
                if once or call.code() in _HOPELESS:
                    raise Unseen(self._trouble, exit_code(error)) from None
                return
        if interrupted.is_set():
            raise KeyboardInterrupt
        self._looks = [*self._looks[-1:], Look(time.monotonic(), load)]
        self._trouble = ""

    def lines(self, width: int) -> list[str]:
        """Before the second poll, covers the server's whole life."""
        trouble = [f"trying again: {self._trouble}"[:width]] if self._trouble else []
        if not self._looks:
            return trouble
        now = self._looks[-1]
        return [*trouble, *frame(self._looks[0] if len(self._looks) > 1 else birth(now), now, width)]


def _once(watch: ServerWatch, interval: float) -> None:
    watch.look(once=True)
    time.sleep(interval)
    watch.look(once=True)
    _print(watch)


def _listed(watch: ServerWatch, interval: float) -> None:
    while True:
        watch.look()
        _print(watch)
        time.sleep(interval)


def _print(watch: ServerWatch) -> None:
    width = shutil.get_terminal_size((120, 40)).columns
    sys.stdout.write("\n".join([*watch.lines(width), "", ""]))
    sys.stdout.flush()


def _live(watch: ServerWatch, interval: float) -> None:
    with _screen() as ended:
        while True:
            watch.look()
            columns, rows = shutil.get_terminal_size()
            head, *rest = watch.lines(columns)[: max(1, rows - 1)]
            text = f"{_END_OF_LINE}\r\n".join([f"{_BOLD}{head}{_PLAIN}", *rest])
            sys.stdout.write(f"{_HOME}{text}{_END_OF_LINE}{_BELOW}")
            sys.stdout.flush()
            if ended(interval):
                return


@contextmanager
def _screen() -> Iterator[Callable[[float], bool]]:
    """Opens an alternate screen. Yields a function that waits for `q`."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = None if keys is None else termios.tcgetattr(keys)

    def ended(seconds: float) -> bool:
        end = time.monotonic() + seconds
        polling = [signals] if keys is None else [signals, keys]
        while ready := select.select(polling, [], [], max(0.0, end - time.monotonic()))[0]:
            if signals in ready:
                os.read(signals, 64)
            if keys in ready and os.read(keys, 1) in (b"q", b"Q", b""):
                return True
        return False

    sys.stdout.write(_ENTER)
    with _signals() as signals:
        try:
            if keys is not None:
                tty.setcbreak(keys)
            yield ended
        finally:
            if keys is not None and before is not None:
                termios.tcsetattr(keys, termios.TCSADRAIN, before)
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


@contextmanager
def _signals() -> Iterator[int]:
    """Yields a descriptor that is readable once a signal has come. `select` alone misses one that comes just before it
    waits, or that another thread gets."""
    ours, handlers = socket.socketpair()
    with ours, handlers:
        handlers.setblocking(False)
        before = signal.set_wakeup_fd(handlers.fileno(), warn_on_full_buffer=False)
        try:
            yield ours.fileno()
        finally:
            signal.set_wakeup_fd(before)
