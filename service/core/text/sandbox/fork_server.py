"""Loads the tokenizer once and forks text processes that share it.

The fork server runs no job and no thread, so that a fork is sound. It ends when the front's socket closes, and its
workers with it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from engine.constraints.forks import MAX_PACKET, ForkServer, confine, die_with_parent, limit_memory
from engine.errors import InvalidModel
from service.core.text.sandbox.control import (
    DONE,
    FAILED,
    HEADER,
    MAX_RESULT,
    REFUSED,
    ConfigureSandbox,
    ForkWorker,
    KillWorker,
    ModelLoaded,
    ModelUnloadable,
    WorkerEnded,
    decode_command,
    encode,
)
from service.core.text.sandbox.jobs import JobRefused
from service.core.text.tokenizer import Tokenizer

Job = Callable[[Tokenizer, bytes], bytes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    die_with_parent()
    with socket.socket(fileno=parser.parse_args().fd) as front:
        _serve(front)


def _serve(front: socket.socket) -> None:
    configure = decode_command(front.recv(MAX_PACKET))
    if not isinstance(configure, ConfigureSandbox):
        raise TypeError("the first message configures")
    limit_memory(configure.memory)
    _silence()
    try:
        tokenizer = _tokenizer(configure)
        jobs = tuple(_found(kind) for kind in configure.kinds)
    except InvalidModel as error:
        front.send(encode(ModelUnloadable(str(error))))
        return
    except MemoryError:
        front.send(
            encode(ModelUnloadable(_broken(configure.model, f"takes more than {configure.memory >> 20} MiB to load")))
        )
        return
    except BaseException as error:  # a panic in Rust is no Exception
        front.send(encode(ModelUnloadable(_broken(configure.model, f"cannot be loaded ({type(error).__name__})"))))
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page of it
    _SandboxForks(front, tokenizer, jobs).run()


def _tokenizer(configure: ConfigureSandbox) -> Tokenizer:
    if configure.model is None:
        return Tokenizer.of_bytes()
    return Tokenizer.load(configure.model, template=None if configure.template is None else Path(configure.template))


def _broken(model: str | None, problem: str) -> str:
    return f"{model}: its tokenizer or chat template {problem}; copy it again from where the model came from"


class _SandboxForks(ForkServer):
    def __init__(self, front: socket.socket, tokenizer: Tokenizer, jobs: tuple[Job, ...]) -> None:
        super().__init__(front)
        self._tokenizer = tokenizer
        self._jobs = jobs
        front.send(encode(ModelLoaded(tokenizer.digest)))

    def obey(self, order: bytes, descriptors: list[int]) -> None:
        match decode_command(order):
            case ForkWorker(key=key, memory=memory):
                with socket.socket(fileno=descriptors[0]) as ours:
                    self.fork(key, lambda: self._work(memory, ours))
            case KillWorker(key=key):
                self.kill(key)

    def ended(self, key: int, code: int) -> bytes:
        return encode(WorkerEnded(key, code))

    def _work(self, memory: int, ours: socket.socket) -> None:
        confine(memory)
        _Worker(ours, self._tokenizer, self._jobs).run()


class _Worker:
    def __init__(self, front: socket.socket, tokenizer: Tokenizer, jobs: tuple[Job, ...]) -> None:
        self._front = front
        self._tokenizer = tokenizer
        self._jobs = jobs

    def run(self) -> None:
        while head := self._read(HEADER.size):
            kind, size = HEADER.unpack(head)
            outcome, result = self._do(self._jobs[kind], self._read(size))
            self._front.sendall(HEADER.pack(outcome, len(result)))
            self._front.sendall(result)

    def _do(self, job: Job, payload: bytes) -> tuple[int, bytes]:
        try:
            result = job(self._tokenizer, payload)
        except JobRefused as error:
            return REFUSED, str(error).encode()
        except MemoryError:
            return REFUSED, b"takes more memory to process than is allowed"
        except BaseException as error:  # a panic in Rust is no Exception
            return FAILED, type(error).__name__.encode()
        return (DONE, result) if len(result) <= MAX_RESULT else (REFUSED, b"makes more than can be sent")

    def _read(self, size: int) -> bytes:
        """Returns fewer bytes where the front has gone."""
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            more = self._front.recv_into(view[got:])
            if not more:
                return b""
            got += more
        return bytes(data)


def _found(kind: str) -> Job:
    module, _, name = kind.partition(":")
    job: Job = getattr(importlib.import_module(module), name)
    return job


def _silence() -> None:
    """Silences standard output: a library's own words may hold a prompt."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.close(quiet)


if __name__ == "__main__":
    main()
