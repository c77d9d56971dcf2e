"""Messages between the engine loop and the processes that follow grammars. Commands and answers travel in the frames of
`engine.ipc.framing`; orders and news are packets."""

from __future__ import annotations

import msgspec

from engine.ipc.framing import FrameReader


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Begins a sequence, or resumes one after the tokens `ids`. Compiles a grammar that is not known yet."""

    key: int
    grammar: str
    ids: tuple[int, ...]
    stops: tuple[int, ...]


class Advance(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Appends `ids`; with `force`, also the tokens about which the grammar leaves no choice."""

    key: int
    ids: tuple[int, ...]
    force: bool


class LookAhead(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Requests the masks after each token of a draft, which is not appended."""

    key: int
    draft: tuple[int, ...]


class TakeBack(msgspec.Struct, frozen=True, array_like=True, tag=4):
    key: int
    count: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=5):
    key: int


class Advanced(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First answer to Advance; `Masked` or `Failed` follows."""

    key: int
    allowed: bool
    forced: tuple[int, ...]
    over: bool  # nothing may follow, and the answer is whole


class Masked(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Last answer to Begin, Advance and TakeBack."""

    key: int
    length: int  # tokens of the answer before the mask's token
    mask: bytes  # a bit for each token, from the lowest bit of the first byte on; stop tokens where the answer may end
    whole: bool  # the answer may end here
    used: int  # bytes of all grammars of this process


class MaskedAhead(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answers LookAhead. A mask is empty after tokens that the grammar forbids or ends with."""

    key: int
    length: int
    draft: tuple[int, ...]
    masks: tuple[bytes, ...]
    used: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Last answer to any command, or unasked where another sequence's command exceeded a bound."""

    key: int
    reason: str  # one of `Reason`
    used: int
    answers: bool  # whether this answers a command


class SequenceEnded(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answers End, and commands for a failed sequence."""

    key: int
    used: int


class ConfigureConstraints(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message to the fork server."""

    folder: str  # of the model; empty: tokens are bytes
    compiling: float
    masking: float
    of_constraint: int
    of_caller: int


class ForkProcess(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The process's socket is sent along. Numbers are never reused."""

    number: int


class KillProcess(msgspec.Struct, frozen=True, array_like=True, tag=3):
    number: int


class VocabularyLoaded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    mask_bytes: int


class VocabularyUnloadable(msgspec.Struct, frozen=True, array_like=True, tag=2):
    message: str


class ProcessEnded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    number: int
    code: int  # exit code, or minus the signal


Command = Begin | Advance | LookAhead | TakeBack | End
Answer = Advanced | Masked | MaskedAhead | Failed | SequenceEnded
Order = ConfigureConstraints | ForkProcess | KillProcess
News = VocabularyLoaded | VocabularyUnloadable | ProcessEnded

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_news = msgspec.msgpack.Decoder(News).decode


def command_reader() -> FrameReader[Command]:
    return FrameReader(msgspec.msgpack.Decoder(Command))


def answer_reader() -> FrameReader[Answer]:
    return FrameReader(msgspec.msgpack.Decoder(Answer))
