"""Runs the sentence encoder in C (`encoder.c`), compiled once where an embedder is made. Used by one thread."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

Array = npt.NDArray[Any]
Vector = npt.NDArray[np.float32]

SOURCE = Path(__file__).with_name("encoder.c")
LIBRARY = "encoder.so"
WEIGHTS = "encoder.safetensors"
NEEDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma")  # as /proc/cpuinfo calls them
HIDE = "CPU_HIDE_FEATURES"  # environment variable, for tests: flags of /proc/cpuinfo that count as absent
PATIENCE = 120.0  # seconds for the compiler
LINE = 64  # bytes of a cache line, which weights are aligned to
LINEARS = ("mix", "out", "up", "down")
LINEAR_PARTS = ("weight", "scale", "bias", "total")
NORM_PARTS = ("norm1_scale", "norm1_bias", "norm2_scale", "norm2_bias")
WHOLE_PARTS = ("words", "word_scale", "places", "norm_scale", "norm_bias")


class NotNative(RuntimeError):
    pass


class _EncoderLinear(ctypes.Structure):
    _fields_: ClassVar[Any] = [(part, ctypes.c_void_p) for part in LINEAR_PARTS]


class _EncoderLayer(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, _EncoderLinear) for name in LINEARS),
        *((part, ctypes.c_void_p) for part in NORM_PARTS),
    ]


class _Encoder(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, ctypes.c_int32) for name in ("layers", "heads", "width", "wide")),
        ("epsilon", ctypes.c_float),
        *((part, ctypes.c_void_p) for part in WHOLE_PARTS),
        ("layer", ctypes.c_void_p),
    ]


def hidden() -> frozenset[str]:
    """Flags of `NEEDS` that the environment treats as absent."""
    return frozenset(NEEDS) & frozenset(os.environ.get(HIDE, "").replace(",", " ").split())


def lacking() -> str:
    """Needed flags that this machine's processor lacks; empty where it has all."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"{sys.platform} on {platform.machine()}"
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "/proc/cpuinfo"
    has = next((set(line.split()) for line in described.splitlines() if line.startswith("flags")), set[str]())
    return ", ".join(name for name in NEEDS if name not in has - hidden())


def compile_encoder(target: Path) -> None:
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (named,) if named else ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NotNative(f"no C compiler: {named}" if named else "no C compiler")
    options = ("-O3", "-std=gnu11", "-mtune=native", *(f"-m{name.replace('_', '')}" for name in NEEDS))
    command = [compiler, *options, "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
    environment = {**os.environ, "TMPDIR": str(target.parent)}  # where it may write in any case
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotNative(f"{compiler}: {error}") from None
    if done.returncode != 0:
        raise NotNative(f"{compiler}: {next(iter(done.stderr.strip().splitlines()), 'failed')}")


def _linear(weight: Array, bias: Array, factor: Array | None = None) -> dict[str, Array]:
    """Packs one scale a channel; blocks of 64 channels, within them four inputs of a channel side by side."""
    channels, inputs = weight.shape
    if channels % 64 or inputs % 64:
        raise NotNative(f"a product of {inputs} by {channels}")
    scale = np.maximum(np.abs(weight).max(1), 1e-12) / 127
    rounded = np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int8)
    if factor is not None:
        scale, bias = scale * factor, bias * factor
    return {
        "weight": np.ascontiguousarray(rounded.reshape(channels // 64, 64, inputs // 4, 4).transpose(0, 2, 1, 3)),
        "scale": scale.astype(np.float32),
        "bias": bias.astype(np.float32),
        "total": rounded.sum(1, dtype=np.int64).astype(np.float32),
    }


def _layer(weights: Mapping[str, Array], heads: int) -> dict[str, Array]:
    def take(part: str, *names: str) -> Array:
        return np.concatenate([weights[f"{name}.{part}"] for name in names])

    queries = [f"attention.self.{name}" for name in ("query", "key", "value")]
    width = weights["attention.self.query.bias"].size
    factor = np.ones(3 * width, np.float32)
    factor[:width] = (width // heads) ** -0.5  # attention's scale, folded into the queries' weights
    linears = {
        "mix": _linear(take("weight", *queries), take("bias", *queries), factor),
        "out": _linear(take("weight", "attention.output.dense"), take("bias", "attention.output.dense")),
        "up": _linear(take("weight", "intermediate.dense"), take("bias", "intermediate.dense")),
        "down": _linear(take("weight", "output.dense"), take("bias", "output.dense")),
    }
    norms = [
        weights[f"{name}.LayerNorm.{part}"] for name in ("attention.output", "output") for part in ("weight", "bias")
    ]
    found = {f"{name}.{part}": value for name, parts in linears.items() for part, value in parts.items()}
    return found | {name: value.astype(np.float32) for name, value in zip(NORM_PARTS, norms, strict=True)}


def write_weights(target: Path, weights: Mapping[str, Array], layers: int, heads: int, epsilon: float) -> None:
    """Writes eight bits, in the order of `encoder.c`. Raises NotNative."""
    words = weights["embeddings.word_embeddings.weight"]
    if words.shape[1] // heads not in (32, 64):
        raise NotNative(f"heads of {words.shape[1] // heads}")
    scale = np.maximum(np.abs(words).max(1), 1e-12) / 127
    kinds = weights["embeddings.token_type_embeddings.weight"][0]
    tensors: dict[str, Array] = {
        "words": np.rint(words / scale[:, None]).astype(np.int8),
        "word_scale": scale.astype(np.float32),
        "places": (weights["embeddings.position_embeddings.weight"] + kinds).astype(np.float32),
        "norm_scale": weights["embeddings.LayerNorm.weight"].astype(np.float32),
        "norm_bias": weights["embeddings.LayerNorm.bias"].astype(np.float32),
    }
    for number in range(layers):
        prefix = f"encoder.layer.{number}."
        mine = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        tensors |= {f"{number}.{name}": value for name, value in _layer(mine, heads).items()}
    about = {"layers": str(layers), "heads": str(heads), "epsilon": repr(epsilon)}
    save_file(tensors, target, about)


class NativeEncoder:
    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, Array] = {}
        with safe_open(folder / WEIGHTS, "numpy") as file:
            about = file.metadata()
            for name in file.keys():  # noqa: SIM118 -- no mapping
                self._tensors[name] = _aligned(file.get_tensor(name))
        layers, heads = int(about["layers"]), int(about["heads"])
        self._words, self._width = self._tensors["words"].shape
        self._places = len(self._tensors["places"])
        self._layers = (_EncoderLayer * layers)(*map(self._layer, range(layers)))
        self._encoder = _Encoder(
            *(layers, heads, self._width, self._tensors["0.up.bias"].size, float(about["epsilon"])),
            *map(self._at, WHOLE_PARTS),
            ctypes.addressof(self._layers),
        )
        self.library = folder / LIBRARY
        library = ctypes.CDLL(str(self.library))
        self._run: Any = library.encode
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._run.restype = None
        library.room.argtypes, library.room.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_size_t
        room = int(library.room(ctypes.addressof(self._encoder), self._places))
        self._work = _aligned(np.empty(room, np.uint8))

    def __call__(self, ids: Sequence[int]) -> Vector:
        """Raises ValueError for no tokens, too many, or unknown ones."""
        given = np.array(ids, np.int32)
        if not 0 < given.size <= self._places or given.min() < 0 or given.max() >= self._words:
            raise ValueError(f"{given.size} tokens, of {self._places} at most and all below {self._words}")
        vector: Vector = np.empty(self._width, np.float32)
        encoder = ctypes.addressof(self._encoder)
        self._run(encoder, given.ctypes.data, given.size, self._work.ctypes.data, vector.ctypes.data)
        return vector

    def _at(self, name: str) -> int:
        return int(self._tensors[name].ctypes.data)

    def _layer(self, number: int) -> _EncoderLayer:
        linears = [_EncoderLinear(*(self._at(f"{number}.{name}.{part}") for part in LINEAR_PARTS)) for name in LINEARS]
        return _EncoderLayer(*linears, *(self._at(f"{number}.{part}") for part in NORM_PARTS))


def _aligned(value: Array) -> Array:
    """Returns a copy that begins on a cache line."""
    raw = np.empty(value.nbytes + LINE, np.uint8)
    begin = -raw.ctypes.data % LINE
    copy = raw[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy
