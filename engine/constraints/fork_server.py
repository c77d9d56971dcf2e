"""Loads the vocabulary once and forks the processes that follow grammars: `python -m engine.constraints.fork_server
--fd N`.

Each process serves one caller. It is killed when it exceeds a bound (processor time by a timer's signal, memory by a
resource limit), and never outlives the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket

from engine.constraints.bounds import STACK, on_own_stack
from engine.constraints.budget import Budget
from engine.constraints.following import Following
from engine.constraints.forks import MAX_PACKET, ForkServer, confine, die_with_parent
from engine.constraints.grammars import Grammars
from engine.constraints.heap import HeapGauge
from engine.constraints.messages import (
    Begin,
    ConfigureConstraints,
    ForkProcess,
    KillProcess,
    LookAhead,
    ProcessEnded,
    VocabularyLoaded,
    VocabularyUnloadable,
    command_reader,
    decode_order,
    encode,
)
from engine.ipc import framing

_NICE = 10  # the step loop and the streams go first where cores are few
_CHUNK = 256 * 1024  # bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    given = parser.parse_args()
    die_with_parent()
    with socket.socket(fileno=given.fd) as engine, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        configure = decode_order(engine.recv(MAX_PACKET))
        if not isinstance(configure, ConfigureConstraints):
            raise TypeError("the first message configures")
        grammars = Grammars(configure.folder)
        try:
            size = len(grammars.matcher("start: /[a-z]*/").compute_bitmask())
        except Exception as error:
            engine.send(encode(VocabularyUnloadable(f"{type(error).__name__}: {error}"[:1000])))
            return
        gc.collect()
        gc.freeze()  # a collection in a process that was forked would copy every page of it
        engine.send(encode(VocabularyLoaded(size)))
        _ConstraintForks(engine, grammars, configure).run()


class _ConstraintForks(ForkServer):
    def __init__(self, engine: socket.socket, grammars: Grammars, configure: ConfigureConstraints) -> None:
        super().__init__(engine)
        self._grammars = grammars
        self._configure = configure

    def obey(self, order: bytes, descriptors: list[int]) -> None:
        match decode_order(order):
            case ForkProcess(number=number):
                with socket.socket(fileno=descriptors[0]) as ours:
                    self.fork(number, lambda: self._work(ours))
            case KillProcess(number=number):
                self.kill(number)

    def ended(self, key: int, code: int) -> bytes:
        return encode(ProcessEnded(key, code))

    def _work(self, ours: socket.socket) -> None:
        # Within one command a grammar may grow by `of_constraint` on top of what may be kept; more ends the process.
        confine(self._configure.of_caller + self._configure.of_constraint + STACK)
        os.nice(_NICE)
        on_own_stack(lambda: _follow(ours, self._grammars, self._configure))


def _follow(engine: socket.socket, grammars: Grammars, configure: ConfigureConstraints) -> None:
    heap = HeapGauge()
    budget = Budget(of_constraint=configure.of_constraint, of_caller=configure.of_caller)
    following = Following(grammars, budget, heap.used, heap.give_back)
    frames = command_reader()
    while data := engine.recv(_CHUNK):
        for command in frames.feed(data):
            seconds = configure.compiling if isinstance(command, Begin) else configure.masking
            if isinstance(command, LookAhead):
                seconds *= len(command.draft)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            for answer in following.obey(command):
                engine.sendall(framing.encode(answer))
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
