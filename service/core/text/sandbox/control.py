"""Defines the messages between the front and its text processes. The fork server has a seqpacket socket of msgpack
messages, a new worker's socket beside `ForkWorker`; a worker has a stream socket for one job at a time, a header before
each payload and result."""

from __future__ import annotations

import struct

import msgspec

HEADER = struct.Struct("!BI")  # kind of the job, or how it ended; bytes that follow
MAX_RESULT = 32 * 2**20  # bytes

# How a job ended; what follows
DONE = 0  # the result
REFUSED = 1  # a sentence for the caller
FAILED = 2  # the exception's name, for the log


class ConfigureSandbox(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A kind names its function: "module:function"."""

    model: str | None  # folder; None: bytes are tokens
    kinds: tuple[str, ...]
    memory: int  # bytes for loading
    template: str | None = None  # file instead of the folder's chat templates


class ForkWorker(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Keys are never reused."""

    key: int
    memory: int  # bytes, beyond what the fork server has


class KillWorker(msgspec.Struct, frozen=True, array_like=True, tag=3):
    key: int


class ModelLoaded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    digest: str  # of the tokenizer


class ModelUnloadable(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The model folder is unusable; the process ends."""

    message: str


class WorkerEnded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    key: int
    code: int  # exit code, or minus the signal


Command = ConfigureSandbox | ForkWorker | KillWorker  # front → fork server
Report = ModelLoaded | ModelUnloadable | WorkerEnded  # fork server → front

encode = msgspec.msgpack.Encoder().encode
_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)


def decode_command(packet: bytes) -> Command:
    command: Command = _commands.decode(packet)
    return command


def decode_report(packet: bytes) -> Report:
    report: Report = _reports.decode(packet)
    return report
