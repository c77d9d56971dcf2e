"""Reads the contents of a checkpoint of torch without unpickling.

Its description is a program for pickle's machine. Here the program is taken apart into data: a name that it wants to
import is compared with the few that tensors are described with, and nothing is ever imported or called.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

T = TypeVar("T")


class ProgramRefused(Exception):
    """The program wants what tensors need not, or is none. A phrase."""


@dataclass(frozen=True, slots=True)
class Name:
    dotted: str


@dataclass(frozen=True, slots=True)
class Storage:
    """Numbers of one type. `key`: the archive's member that holds them."""

    kind: str  # as torch calls it: FloatStorage
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class View:
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_STORAGES: Final = tuple(
    f"torch.{kind}Storage"
    for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
)
_DICT: Final = "collections.OrderedDict"
_TENSOR: Final = "torch._utils._rebuild_tensor_v2"
_PARAMETER: Final = "torch._utils._rebuild_parameter"
_KNOWN: Final = frozenset({*_STORAGES, _DICT, _TENSOR, _PARAMETER})
_MARK: Final = object()


def read_program(program: bytes) -> object:
    """Returns what the program describes: dicts, lists, tuples, numbers, texts and `View`s. Raises ProgramRefused."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name != "STOP":  # with which it ends
                machine.do(opcode.name, argument)
        return machine.stack.pop()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError):
        raise ProgramRefused("its description is damaged") from None


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name in ("GLOBAL", "INST"):
            self.stack.append(_known(argument.replace(" ", ".")))
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        else:
            raise ProgramRefused(f"its description has an instruction that tensors need not, {name}")

    def marked(self) -> list[Any]:
        """Returns what was put on the stack since the last mark, and removes the mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def pack(self, count: int | None) -> None:
        if count is None:
            self.stack.append(tuple(self.marked()))
        else:
            items = tuple(self.stack[-count:])
            del self.stack[-count:]
            self.stack.append(items)

    def import_name(self) -> None:
        module, name = self.stack[-2:]
        del self.stack[-2:]
        self.stack.append(_known(f"{module}.{name}"))

    def set_items(self, items: list[Any]) -> None:
        into = _of(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, Hashable):
                into[key] = value

    def append(self, items: list[Any]) -> None:
        _of(list, self.stack[-1]).extend(items)

    def storage(self) -> None:
        tag, kind, key, _, count = _of(tuple, self.stack.pop())
        if tag != "storage" or not isinstance(kind, Name) or kind.dotted not in _STORAGES:
            raise ProgramRefused("it has a storage of a kind that is not known")
        self.stack.append(Storage(kind.dotted.removeprefix("torch."), _of(str, key), _natural(count)))

    def call(self) -> None:
        """The three calls that a state dict is made of, done as data."""
        arguments, called = _of(tuple, self.stack.pop()), _of(Name, self.stack.pop()).dotted
        if called == _DICT and not arguments:
            self.stack.append({})
        elif called == _TENSOR:
            storage, offset, shape, strides = arguments[:4]
            view = View(_of(Storage, storage), _natural(offset), _naturals(shape), _naturals(strides))
            if len(view.shape) != len(view.strides):
                raise ValueError
            self.stack.append(view)
        elif called == _PARAMETER:
            self.stack.append(_of(View, arguments[0]))
        else:
            raise ProgramRefused(f"it calls {called}, in a way that tensors need not")

    def drop_state(self) -> None:
        """Attributes of a dict, such as versions of its modules."""
        self.stack.pop()
        _of(dict, self.stack[-1])


_IGNORED: Final = frozenset({"PROTO", "FRAME"})
_CONSTANTS: Final[Mapping[str, Callable[[], object]]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_LITERALS: Final = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
)
_ACTIONS: Final[Mapping[str, Callable[[_Machine], None]]] = {
    "TUPLE": lambda machine: machine.pack(None),
    "TUPLE1": lambda machine: machine.pack(1),
    "TUPLE2": lambda machine: machine.pack(2),
    "TUPLE3": lambda machine: machine.pack(3),
    "STACK_GLOBAL": _Machine.import_name,
    "SETITEM": lambda machine: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine: machine.set_items(machine.marked()),
    "APPEND": lambda machine: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine: machine.append(machine.marked()),
    "BINPERSID": _Machine.storage,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.drop_state,
}


def _known(dotted: str) -> Name:
    if dotted not in _KNOWN:
        raise ProgramRefused(f"it wants to import {dotted[:80]!r}, which tensors need not; nothing of it was run")
    return Name(dotted)


def _of(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError
    return value


def _naturals(value: object) -> tuple[int, ...]:
    if len(items := _of(tuple, value)) > 8:
        raise ValueError
    return tuple(map(_natural, items))
