"""Tensors of a file that `torch.save` wrote: a zip archive of a description and of plain numbers, which are mapped."""

from __future__ import annotations

import math
import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

import torch

from quant.checkpoint.errors import AGAIN, BadFile
from quant.checkpoint.regular import open_regular
from quant.torch_program import ProgramRefused, View, read_program

_DTYPES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DESCRIPTION_BYTES: Final = 64 << 20  # of 100,000 tensors it has a tenth of that
_WRAPPERS: Final = ("state_dict", "model", "module")  # what trainers put around the weights
_LOCAL: Final = struct.Struct("<26xHH")  # of a member's own header: lengths of its name and of what else it says


class TorchFile:
    """`tensor` gives a view of the file that is good until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as opened:
                self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                if not zipfile.is_zipfile(opened):
                    raise BadFile(path, _no_archive(opened), "load it with the torch that wrote it, and save it again")
                self._members, description = _archive(path, opened)
            self.views = _state_dict(read_program(description))
        except ProgramRefused as refused:
            raise BadFile(path, str(refused), "take weights from who made the model, as safetensors") from None
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise BadFile(path, f"cannot be read ({error})", AGAIN) from error
        if not self.views:
            raise BadFile(path, "holds no tensors by name", "give the file of the model's weights")
        self._places = {name: self._place(name, view) for name, view in self.views.items()}

    def nbytes(self, name: str) -> int:
        """Returns the size as it will be written: of its own elements alone."""
        return math.prod(self.views[name].shape) * self._places[name][0].itemsize

    def tensor(self, name: str) -> torch.Tensor:
        view, (dtype, start) = self.views[name], self._places[name]
        if not math.prod(view.shape):
            return torch.empty(view.shape, dtype=dtype)
        flat = torch.frombuffer(self._bytes, dtype=dtype, count=view.storage.count, offset=start)
        return flat.as_strided(view.shape, view.strides, view.offset)

    def forget(self) -> None:
        """Gives back the memory of what was read so far. It can be read again."""
        self._bytes.madvise(mmap.MADV_DONTNEED)

    def _place(self, name: str, view: View) -> tuple[torch.dtype, int]:
        """Its numbers' type, and where its storage begins in the file. Raises BadFile."""
        dtype = _DTYPES[view.storage.kind]
        start, size = self._members.get(view.storage.key, (0, -1))
        last = view.offset + sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True))
        count = math.prod(view.shape)
        beyond = count > view.storage.count or (count > 0 and last >= view.storage.count)
        if beyond or size < view.storage.count * dtype.itemsize or start + size > len(self._bytes):
            raise BadFile(self.path, f"the numbers of {name[:80]!r} are not all there", AGAIN)
        return dtype, start


def _archive(path: Path, opened: BinaryIO) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Members with numbers, by key: where each begins and its size. And the description."""
    with zipfile.ZipFile(opened) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if any(name.startswith("code/") for name in entries):
            raise BadFile(path, "is a program (TorchScript), not weights", "give the file of the model's weights")
        described = entries.get("data.pkl")
        if described is None or described.file_size > _DESCRIPTION_BYTES:
            raise BadFile(path, "has no description of tensors, or a giant one", "give the file of the model's weights")
        if "byteorder" in entries and archive.read(entries["byteorder"])[:6] != b"little":
            raise BadFile(path, "was written on a machine of another byte order", "save it on one like this")
        program = archive.read(described)
    members = {}
    for name, entry in entries.items():
        if name.startswith("data/") and entry.compress_type == zipfile.ZIP_STORED:
            opened.seek(entry.header_offset)
            header = opened.read(_LOCAL.size)
            if len(header) == _LOCAL.size:
                start = entry.header_offset + _LOCAL.size + sum(_LOCAL.unpack(header))
                members[name.removeprefix("data/")] = (start, entry.file_size)
    return members, program


def _no_archive(opened: BinaryIO) -> str:
    """Describes a file that is no archive. A pickle is named by what it imports. Raises ProgramRefused."""
    opened.seek(0)
    head = opened.read(_DESCRIPTION_BYTES)
    if head.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file itself"
    if head[:1] in (b"\x80", b"c", b"("):
        read_program(head)
    return "is not what torch has written since 1.6"


def _state_dict(described: object) -> Mapping[str, View]:
    """The tensors by name, of the dict itself or of the one within that trainers write."""
    if not isinstance(described, dict):
        return {}
    found = {name: value for name, value in described.items() if isinstance(name, str) and isinstance(value, View)}
    if found:
        return found
    return next((inner for name in _WRAPPERS if (inner := _state_dict(described.get(name)))), {})
