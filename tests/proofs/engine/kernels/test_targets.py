"""All kernels compile for every GPU from compute capability 8.0 to 12.0, and their blocks fit it. Of one model for a
target each source is compiled once for a format of weights and of pages, where it asks for most; with EVERY_KERNEL=1 as
often as both models ask for it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from engine.execution.registry import EXECUTORS
from engine.kernels.build import SLOW, SOURCES, Kernel, Source, WantedKernels, compile_with_nvrtc, source_text
from engine.kernels.gpu import SERVERS, SHARED, GpuShape, gpu_of
from engine.kernels.targets import OF_WARPGROUPS, TARGETS
from engine.loading.formats import read_folder
from engine.settings import EngineSettings, KvDtype
from engine.worker.required_kernels import KernelQuery, models_of_shapes

MODELS = Path(__file__).resolve().parents[4] / "bench" / "models"
EVERY = bool(os.environ.get("EVERY_KERNEL"))
# These take seconds and have no code of their own for a target: tests/engine/kernels compiles them for two others.
ONCE = ("sm_120",)
# Models, their pages, and whether a draft model guesses. 8.6 and 8.9 have the same limits, so that they share both.
PLAIN: tuple[str, KvDtype, bool] = ("qwen3-0.6b", "auto", False)
PACKED: tuple[str, KvDtype, bool] = ("mistral-7b-awq", "fp8", True)
CASES = {
    "sm_80": [PACKED],
    "sm_86": [PLAIN],
    "sm_89": [PACKED],
    "sm_90a": [PLAIN],
    "sm_100": [PACKED],
    "sm_120": [PLAIN, PACKED],
}
TWO_PASSES = ("two_pass_head", "two_pass_top")  # what a block asks for does not fit every GPU
RESERVED = 1024  # bytes that a cubin from 9.0 on counts as its own, and that no block may ask for


class Sized(WantedKernels):
    """Keeps how many bytes of shared memory each entry was asked for with."""

    def __init__(self, gpu: GpuShape) -> None:
        super().__init__(gpu)
        self.shared: dict[Source, dict[str, int]] = {}

    def kernel(self, name: str, entry: str, defines: Mapping[str, int], shared: int = 0) -> Kernel:
        entries = self.shared.setdefault((name, tuple(sorted(defines.items()))), {})
        entries[entry] = max(entries.get(entry, 0), shared)
        return super().kernel(name, entry, defines, shared)


def asked(gpu: GpuShape, model: str, kept: KvDtype, drafted: bool) -> dict[Source, dict[str, int]]:
    wanted = Sized(gpu)
    draft = read_folder(MODELS / PLAIN[0], "auto") if drafted else None
    settings = EngineSettings(model=model, kv_dtype=kept, max_context=4096, max_sequences=64)
    query = KernelQuery(*read_folder(MODELS / model, "auto"), gpu, draft=draft)
    with torch.inference_mode():
        for parts in models_of_shapes(settings, query, wanted):
            for entry in EXECUTORS:
                assert entry.why_not(parts) is None
                if entry.ask is not None:
                    entry.ask(parts)
    return wanted.shared


def largest(target: str, found: dict[Source, dict[str, int]]) -> dict[Source, dict[str, int]]:
    """Returns the largest of each kind."""
    most: dict[tuple[str, int, int], tuple[int, int, Source]] = {}
    for source, entries in found.items():
        name, defines = source[0], dict(source[1])
        if name in (*SLOW, *TWO_PASSES) and target not in ONCE and name not in OF_WARPGROUPS:
            continue
        kind = name, defines.get("OP_FORMAT", 0), defines.get("OP_KV_BYTES", 0)
        size = max(entries.values()), defines.get("OP_BATCH", 0), source
        most[kind] = max(most.get(kind, size), size)
    return {source: found[source] for *_, source in most.values()}


def static_bytes(code: bytes) -> Iterator[tuple[str, int]]:
    """What entries declare of shared memory, by the sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, table + index * size) for index in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        name = code[start : code.index(b"\0", start)].decode()
        if name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            yield name.removeprefix(".nv.shared."), header[5]


def test_every_target_has_a_model() -> None:
    assert tuple(CASES) == TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit(target: str) -> None:
    digits = target.removeprefix("sm_").removesuffix("a")
    capability = int(digits[:-1]), int(digits[-1])
    gpu = gpu_of(capability, SERVERS[capability][0], SHARED[capability])
    wanted = {case: asked(gpu, *case) for case in (PLAIN, PACKED)}
    sources = {name for found in wanted.values() for name, _ in found}
    every = {path.stem for path in SOURCES.glob("*.cu")} - {"exchange_sum"}  # which split models alone ask for
    instead = {"prefill_attention"} if gpu.warpgroups else set(OF_WARPGROUPS)
    assert every - set(TWO_PASSES) - instead <= sources <= every - instead
    reserved = RESERVED if capability >= (9, 0) else 0
    compiled: dict[Source, dict[str, int]] = {}
    for case in wanted if EVERY else CASES[target]:
        compiled |= wanted[case] if EVERY else largest(target, wanted[case])
    for (name, defines), entries in compiled.items():
        code = compile_with_nvrtc(source_text(f"{name}.cu"), f"{name}.cu", dict(defines), target)
        assert code.startswith(b"\x7fELF"), name
        own = dict(static_bytes(code))
        for entry, shared in entries.items():
            assert shared + max(0, own.get(entry, 0) - reserved) <= gpu.shared, (name, entry)
