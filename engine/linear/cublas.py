"""Calls cuBLASLt by its C interface: lists its algorithms for a product with plain weights, and runs one of them. torch
takes the first of the list; only timing finds the fastest (`chosen.py`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

_BF16, _FLOAT32, _COMPUTE_FLOAT32 = 14, 0, 68  # of cudaDataType, cublasComputeType
_TRANSPOSE_A, _WORKSPACE_BYTES = 3, 1  # attributes of a product, of a preference
_TRANSPOSED = 1
_MOST_WORKSPACE = 32 << 20  # bytes, for products whose columns several blocks share: what torch gives it as well


class CublasError(Exception):
    pass


class _Algorithm(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 8),)


class _AlgorithmFound(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class CublasProduct:
    """out [tokens, rows] = x [tokens, columns] · W [rows, columns]ᵀ, all bfloat16 and contiguous."""

    tokens: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class PreparedProduct:
    """Algorithms begin with the library's own choice. Descriptions last as long as the process."""

    product: Any
    weights: Any
    x: Any
    out: Any
    algorithms: tuple[bytes, ...]


class Cublas:
    def __init__(self, device: torch.device) -> None:
        try:
            self._library: Any = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        except OSError as failure:
            raise CublasError(str(failure)) from failure
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(_MOST_WORKSPACE, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    @property
    def name(self) -> str:
        get = self._library.cublasLtGetVersion
        get.restype = ctypes.c_size_t
        gpu = torch.cuda.get_device_name(self._workspace.device)
        return f"{''.join(letter if letter.isalnum() else '-' for letter in gpu.lower())}-{get()}.json"

    def prepare(self, wanted: CublasProduct, most: int) -> PreparedProduct:
        """Raises CublasError where there is no algorithm."""
        # To the library a matrix by rows is its transpose by columns: outᵀ = W · xᵀ.
        product, preference = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(product), _COMPUTE_FLOAT32, _FLOAT32)
        transposed = ctypes.c_int32(_TRANSPOSED)
        size = ctypes.c_size_t(ctypes.sizeof(transposed))
        self._call("cublasLtMatmulDescSetAttribute", product, _TRANSPOSE_A, ctypes.byref(transposed), size)
        weights, x = self._layout(wanted.columns, wanted.rows), self._layout(wanted.columns, wanted.tokens)
        out = self._layout(wanted.rows, wanted.tokens)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        room = ctypes.c_uint64(_MOST_WORKSPACE)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", preference, _WORKSPACE_BYTES, ctypes.byref(room), ctypes.c_size_t(8)
        )
        found, count = (_AlgorithmFound * most)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle, product, weights, x, out, out, preference, most, found, ctypes.byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        usable = tuple(bytes(one.algorithm) for one in found[: count.value] if one.status == 0)
        if not usable:
            raise CublasError(f"no algorithm for {wanted}")
        return PreparedProduct(product, weights, x, out, usable)

    def fits(self, how: PreparedProduct, algorithm: bytes) -> bool:
        found, tried = _AlgorithmFound(), _Algorithm.from_buffer_copy(algorithm)
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, how.product, how.weights, how.x, how.out, how.out, ctypes.byref(tried), ctypes.byref(found)
        )
        return bool(status == 0 and found.workspace <= _MOST_WORKSPACE)

    def multiply(
        self, how: PreparedProduct, algorithm: bytes, weights: torch.Tensor, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Enqueues on torch's current stream; products on two streams at a time would be wrong."""
        self._call(
            "cublasLtMatmul",
            self._handle, how.product, ctypes.byref(self._one), _pointer(weights), how.weights, _pointer(x), how.x,
            ctypes.byref(self._zero), _pointer(out), how.out, _pointer(out), how.out,
            ctypes.byref(_Algorithm.from_buffer_copy(algorithm)), _pointer(self._workspace),
            ctypes.c_size_t(_MOST_WORKSPACE), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        self._call("cublasLtMatrixLayoutCreate", ctypes.byref(made), _BF16, *sizes)
        return made

    def _call(self, name: str, *values: object) -> None:
        status = getattr(self._library, name)(*values)
        if status:
            raise CublasError(f"{name}: status {status}")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
