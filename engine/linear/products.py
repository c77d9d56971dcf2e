"""Loads the products of `products.c` and the walk of `walk.c` as one library: compiled ahead or at the first start for
the processor's units, kept beside the kernels' machine code, called with the addresses of tensors."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from engine.kernels.build import default_cache, prebuilt_folder
from engine.kernels.keeping import keep

_HERE: Final = Path(__file__).parent
SOURCES: Final = (_HERE / "products.c", _HERE / "walk.c")
_READ: Final = (_HERE / "tiles.h", *SOURCES)
TYPES: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # of a scale
PATIENCE: Final = 120.0  # seconds for the compiler
SHARE: Final = 1 << 17  # products that a thread should have: some 10 µs, less does not pay for waking it
_WIDE: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_NARROW: Final = ("avx2", "fma")
# Units that a library is made for, best first. Elsewhere than on x86 it has what the compiler takes for granted.
LEVELS: Final = ((*_WIDE, *_NARROW), _NARROW, ()) if platform.machine() == "x86_64" else ((),)
_log = logging.getLogger(__name__)
_pointer = ctypes.c_void_p
_long = ctypes.c_long


class NoProducts(Exception):
    """The text is the reason in one line."""


class _Product(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *(("x", _pointer), ("y", _pointer)),
        *(("rows", _long), ("inputs", _long), ("outputs", _long), ("stride", _long)),
        ("threads", ctypes.c_int),
    ]


class Int4(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *(("q", _pointer), ("scale", _pointer), ("zero", _pointer), ("minimum", _pointer)),
        *(("group", _long), ("type", ctypes.c_int)),
    ]


class Int8(ctypes.Structure):
    _fields_: ClassVar[Any] = [("q", _pointer), ("scale", _pointer)]


class PlainMatrix(ctypes.Structure):
    _fields_: ClassVar[Any] = [("w", _pointer), ("type", ctypes.c_int)]


class CpuProducts:
    """x float32 [rows, inputs], contiguous → a new float32 [rows, outputs]. A row's result is the same bits whatever
    rows stand beside it. Uses as many threads as torch at most."""

    def __init__(self, library: Path, walkers: int = 1) -> None:
        self.library: Any = ctypes.CDLL(str(library))
        self.block = int(self.library.outputs_a_block())  # outputs that lie together
        self.walkers = walkers

    def int4(
        self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, shape: tuple[int, int, int]
    ) -> torch.Tensor:
        """q uint8 [blocks, inputs, block / 2]; scale, zero [blocks, groups, block]; `zero` holds uint8 zero points, or
        minima in the scale's type. shape: outputs, inputs, inputs a group."""
        outputs, inputs, group = shape
        points, minima = (zero.data_ptr(), None) if zero.dtype == torch.uint8 else (None, zero.data_ptr())
        weight = Int4(q.data_ptr(), scale.data_ptr(), points, minima, group, TYPES[scale.dtype])
        y, product = self._product(x, outputs)
        room = x.new_empty(x.shape[0], inputs // group)
        self.library.multiply4(ctypes.byref(product), ctypes.byref(weight), _pointer(room.data_ptr()))
        return y

    def int8(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, outputs: int) -> torch.Tensor:
        """q int8 [blocks, inputs, block], scale float32 [blocks · block]."""
        y, product = self._product(x, outputs)
        weight = Int8(q.data_ptr(), scale.data_ptr())
        self.library.multiply8(ctypes.byref(product), ctypes.byref(weight))
        return y

    def plain(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """weight bfloat16 or float16 [outputs, inputs], contiguous."""
        y, product = self._product(x, weight.shape[0])
        held = PlainMatrix(weight.data_ptr(), TYPES[weight.dtype])
        half = weight.dtype == torch.float16
        multiply = self.library.multiply_float16 if half else self.library.multiply_bfloat16
        multiply(ctypes.byref(product), ctypes.byref(held))
        return y

    def _product(self, x: torch.Tensor, outputs: int) -> tuple[torch.Tensor, _Product]:
        y = x.new_empty(x.shape[0], outputs)
        threads = max(1, min(torch.get_num_threads(), x.numel() * outputs // SHARE))
        return y, _Product(x.data_ptr(), y.data_ptr(), *x.shape, outputs, outputs, threads)


def open_products(flags: Collection[str], folder: Path | None = None, walkers: int = 1) -> CpuProducts:
    """`flags` are named as in /proc/cpuinfo. Compiled ahead, or kept in `folder`, or compiled now. Raises
    NoProducts."""
    units = next(level for level in LEVELS if all(unit in flags for unit in level))
    ahead = prebuilt_folder() if folder is None else None
    if ahead is not None:
        try:
            return CpuProducts(ahead / _file(units), walkers)
        except OSError as error:
            _log.warning("products of narrow weights are compiled here: %s", error)
    return _open(units, folder or default_cache(), walkers)


def build_ahead(folder: Path) -> tuple[Path, ...]:
    """Compiles every level into an existing folder. Raises NoProducts."""
    with _room(folder) as room:
        return tuple(_keep(_compile(units, room), folder / _file(units)) for units in LEVELS)


def _open(units: tuple[str, ...], folder: Path, walkers: int) -> CpuProducts:
    kept = folder / _file(units)
    try:
        if kept.is_file():
            return CpuProducts(kept, walkers)
        with _room(folder) as room:
            return CpuProducts(_keep(_compile(units, room), kept), walkers)
    except OSError as error:
        raise NoProducts(f"the library cannot be used: {error}") from error


def _options(units: tuple[str, ...]) -> tuple[str, ...]:
    return ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", *(f"-m{unit}" for unit in units))


def _file(units: tuple[str, ...]) -> str:
    """Not named by the compiler: where it was made ahead there may be none."""
    read = b"".join(one.read_bytes() for one in _READ)
    made_from = "\0".join((platform.machine(), *_options(units))).encode() + read
    return f"products-{hashlib.sha256(made_from).hexdigest()[:32]}.so"


def _room(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Lies where the result is kept, since no other may be writable. Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder)
    except OSError:
        return tempfile.TemporaryDirectory()


def _compiler() -> str:
    named = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, (named,) if named else ("cc", "gcc", "clang"))), None)
    if found is None:
        raise NoProducts(f"no C compiler: {named}" if named else "no C compiler")
    return found


def _compile(units: tuple[str, ...], room: str) -> Path:
    compiler, fresh = _compiler(), Path(room) / "products.so"
    failure, environment = "", {**os.environ, "TMPDIR": room}
    for threads in (("-fopenmp",), ()):
        command = [compiler, *_options(units), *map(str, SOURCES), "-o", str(fresh), *threads]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NoProducts(f"{compiler} took more than {PATIENCE:.0f} s") from error
        if done.returncode == 0:
            return fresh
        failure = next(iter(done.stderr.strip().splitlines()), "failed")
    raise NoProducts(f"{compiler}: {failure}")


def _keep(fresh: Path, kept: Path) -> Path:
    """Where the library cannot be kept it serves this process alone."""
    try:
        keep(kept, fresh.read_bytes(), 0o755)
    except OSError:
        return fresh
    return kept
