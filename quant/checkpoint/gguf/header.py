"""Reads the header of a GGUF file: its metadata and the positions of its tensors, checked against limits.

Memory is bounded by a small multiple of the header's own bytes, whatever lengths it claims. Needs no torch.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn, TypeAlias

from quant.checkpoint.errors import AGAIN, BadFile
from quant.checkpoint.gguf.kinds import KINDS, OTHERS, BlockType
from quant.checkpoint.regular import open_regular

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER: Final = 32 << 20  # bytes; a vocabulary of 256,000 tokens takes 12 MiB
MAX_KEYS: Final = 4096
MAX_TENSORS: Final = 1 << 15
MAX_STRINGS: Final = 1 << 20  # texts in all arrays together
MAX_NAME: Final = 256  # bytes of a key or of a tensor's name
MAX_STRING: Final = 1 << 20  # bytes
MAX_ALIGNMENT: Final = 1 << 16
MAX_SIDE: Final = 1 << 31
_READ_AHEAD: Final = 4 << 20
_STRING, _ARRAY = 8, 9
_BOOL: Final = 7
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}

Value: TypeAlias = "bool | int | float | str | list[str] | array[int] | array[float]"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Locates one tensor in the file. `shape` has rows first, as in torch; the file has them last."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]  # in the order of the file


def read_header(file: Path) -> Header:
    """Reads and checks the header. Raises BadFile, which names the key or the tensor."""
    try:
        with open_regular(file) as opened:
            return _HeaderReader(file, opened).header()
    except FileNotFoundError:
        raise BadFile(file, "no such file", "download the model") from None
    except OSError as error:
        raise BadFile(file, f"cannot be read ({error.strerror})", "check its permissions") from error


class _HeaderReader:
    def __init__(self, file: Path, opened: BinaryIO) -> None:
        self._file = file
        self._opened = opened
        self._size = os.fstat(opened.fileno()).st_size
        self._most = min(self._size, MAX_HEADER)
        self._data = b""  # the header's bytes read so far
        self._at = 0
        self._strings = 0
        self._within = "header"  # the key or tensor being read, for error texts

    def header(self) -> Header:
        if self._size < 24 or self._take(4) != MAGIC:
            self._refuse("is no GGUF file, or was cut short", AGAIN)
        self._check_version()
        tensors, keys = self._count("tensor count", MAX_TENSORS), self._count("count of keys", MAX_KEYS)
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            self._within = "header"
            key = self._string(MAX_NAME)
            self._within = _printable(key)
            if key in metadata:
                self._refuse("is there twice", AGAIN)
            metadata[key] = self._value(self._number("I"))
        self._within = "header"
        found = [self._tensor() for _ in range(tensors)]
        return Header(metadata, self._placed(found, _alignment(self._file, metadata)))

    def _check_version(self) -> None:
        version = self._number("I")
        if version.to_bytes(4, "little")[::-1] in (one.to_bytes(4, "little") for one in VERSIONS):
            self._refuse("is in the byte order of other machines", "convert it with --bigendian left out")
        if version not in VERSIONS:
            self._refuse(f"has version {version}", "convert the model again with a llama.cpp of today")

    def _refuse(self, fault: str, remedy: str) -> NoReturn:
        where = "" if self._within == "header" else f"{self._within} "
        raise BadFile(self._file, f"{where}{fault}", remedy)

    def _fill(self, upto: int) -> bytes:
        """Reads on until at least `upto` bytes of the header are there, and returns all bytes read so far."""
        if upto > self._most:
            if upto > self._size:
                self._refuse("ends beyond the end of the file", AGAIN)
            self._refuse(f"goes on beyond {MAX_HEADER >> 20} MiB of header", "this is no model's file")
        wanted = min(self._most, max(upto, len(self._data) + _READ_AHEAD))
        self._data += self._opened.read(wanted - len(self._data))
        if len(self._data) < upto:
            self._refuse("was cut short while it was read", AGAIN)
        return self._data

    def _take(self, count: int) -> bytes:
        first, self._at = self._at, self._at + count
        data = self._data if self._at <= len(self._data) else self._fill(self._at)
        return data[first : self._at]

    def _number(self, code: str) -> int:
        (found,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return int(found)

    def _count(self, what: str, most: int) -> int:
        found = self._number("Q")
        if found > most:
            self._refuse(f"{what}: {found}, {most} at most", "this is no model's file")
        return found

    def _string(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            self._refuse(f"has a text of {length} bytes, {most} at most", "this is no model's file")
        return self._decoded(self._take(length))

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            self._refuse("holds a text that is not UTF-8", "convert the model again")

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string(MAX_STRING)
        if kind == _ARRAY:
            return self._array()
        return self._scalar(kind)

    def _scalar(self, kind: int) -> bool | int | float:
        code = self._code(kind)
        (found,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        if kind != _BOOL:
            return float(found) if code in "fd" else int(found)
        if found > 1:
            self._refuse(f"is neither true nor false but {found}", AGAIN)
        return bool(found)

    def _array(self) -> Value:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return self._texts(count)
        if kind == _ARRAY:
            self._refuse("holds arrays within an array", "this is no model's file")
        code = self._code(kind)
        found: array[int] = array(code)
        if count > (self._most - self._at) // found.itemsize:
            self._refuse(f"claims {count} numbers, more than the file has", AGAIN)
        found.frombytes(self._take(count * found.itemsize))
        return found

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            self._refuse(f"is of an unknown type, {kind}", AGAIN)
        return _SCALARS[kind]

    def _texts(self, count: int) -> list[str]:
        """Reads an array of texts. A vocabulary has hundreds of thousands, so the loop avoids calls of methods."""
        self._strings += count
        if self._strings > MAX_STRINGS or count > (self._most - self._at) // 8:
            self._refuse(f"claims {count} texts, more than a model's file has", AGAIN)
        found: list[str] = []
        data, at = self._data, self._at
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(data):
                data = self._fill(at + 8)
            end = at + 8 + length_at(data, at)[0]
            if end > len(data):
                data = self._fill(end)
            found.append(self._decoded(data[at + 8 : end]))
            at = end
        self._at = at
        return found

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Reads one entry of the table: name, block type, shape, and offset from the start of the tensors' data."""
        self._within = "header"
        name = self._string(MAX_NAME)
        self._within = f"tensor {_printable(name)}"
        dimensions = self._number("I")
        if not 1 <= dimensions <= 4:
            self._refuse(f"has {dimensions} dimensions", AGAIN)
        sides = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        number, offset = self._number("I"), self._number("Q")
        if number not in KINDS:
            known = ", ".join(kind.name for kind in KINDS.values())
            other = OTHERS.get(number, f"type {number}")
            self._refuse(f"is in {other}, which is not served", f"take a file of {known}")
        kind = KINDS[number]
        if any(not 1 <= side <= MAX_SIDE for side in sides) or sides[0] % kind.values:
            self._refuse(f"has sides {list(sides)}, which {kind.name} cannot have", AGAIN)
        return name, kind, tuple(reversed(sides)), offset

    def _placed(self, found: list[tuple[str, BlockType, tuple[int, ...], int]], alignment: int) -> tuple[Tensor, ...]:
        """Sorts the tensors by position. Checks that they are aligned and contiguous and end within the file."""
        origin = -(-self._at // alignment) * alignment
        placed: list[Tensor] = []
        names: set[str] = set()
        expected = origin
        for name, kind, shape, offset in sorted(found, key=lambda one: one[3]):
            self._within = f"tensor {_printable(name)}"
            size = kind.nbytes
            for side in shape:
                size *= side
            size //= kind.values
            if name in names:
                self._refuse("is there twice", AGAIN)
            if origin + offset != expected:
                self._refuse(
                    f"lies at offset {offset}, {expected - origin} expected: tensors overlap or leave gaps", AGAIN
                )
            if expected + size > self._size:
                self._refuse(f"ends beyond the end of the file ({self._size} bytes, {expected + size} expected)", AGAIN)
            names.add(name)
            placed.append(Tensor(name, kind, shape, expected, size))
            expected = -(-(expected + size) // alignment) * alignment
        return tuple(placed)


def _alignment(file: Path, metadata: dict[str, Value]) -> int:
    found = metadata.get("general.alignment", 32)
    if isinstance(found, bool) or not isinstance(found, int) or not 8 <= found <= MAX_ALIGNMENT or found & (found - 1):
        raise BadFile(file, f"general.alignment: must be a power of two from 8 to {MAX_ALIGNMENT}", AGAIN)
    return found


def _printable(name: str) -> str:
    """Returns a name from the file, escaped and shortened for one line of an error text."""
    return name if name and name.isprintable() and len(name) <= 80 else repr(name[:80])
