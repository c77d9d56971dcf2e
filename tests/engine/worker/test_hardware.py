"""What follows from the machine: device, type of number, threads. Every kind of CPU is played by its flags."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import Unsupported
from engine.worker.hardware import (
    HIDE,
    CpuFeatures,
    batch_tokens,
    cpu_features,
    most_sequences,
    operations_of,
    pick_dtype,
    pick_ranks,
    pick_threads,
    with_pages,
)

CPU = torch.device("cpu")
PLAIN = CpuFeatures(frozenset({"fpu", "avx512f", "avx512_vnni"}))
NATIVE = CpuFeatures(frozenset({"fpu", "avx512f", "avx512_bf16"}))


def test_one_core_is_left_to_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (16, 15)):
        monkeypatch.setattr("engine.worker.hardware.usable_cores", lambda cores=cores: cores)
        assert pick_threads(None) == expected
    assert pick_threads(7) == 7


@pytest.mark.parametrize(("cpu", "native"), [(PLAIN, torch.float32), (NATIVE, torch.bfloat16)])
def test_dtype_auto_follows_the_checkpoint_where_the_machine_can(cpu: CpuFeatures, native: torch.dtype) -> None:
    assert pick_dtype("auto", "float32", CPU, cpu) == torch.float32
    assert pick_dtype("auto", None, CPU, cpu) == torch.float32
    assert pick_dtype("float16", "bfloat16", CPU, cpu) == torch.float16
    assert pick_dtype("bfloat16", "float32", CPU, cpu) == torch.bfloat16
    assert pick_dtype("auto", "bfloat16", CPU, cpu) == native
    assert pick_dtype("auto", "float16", CPU, cpu, quantized=True) == native


@pytest.mark.parametrize(
    ("line", "bf16"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_tile amx_bf16", True),
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("Features\t: bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("model name\t: bf16", False),
    ],
)
def test_flags_are_those_of_cpuinfo(line: str, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIDE, raising=False)
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\n{line}\n")
    assert cpu_features(info).bf16 is bf16
    assert cpu_features(tmp_path / "absent") == CpuFeatures(frozenset())


def test_sequences_are_as_many_as_have_pages() -> None:
    assert most_sequences(CPU) == 64
    assert most_sequences(torch.device("cuda")) == 512
    for pages, sequences in ((1 << 20, 256), (4096, 256), (4095, 128), (2047, 64), (300, 16), (1, 16)):
        assert with_pages(256, pages) == sequences


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "weights", "tokens"),
    [
        ((9, 0), 132, 440_000_000, 8192),  # H100, the layers of Qwen3-0.6B
        ((9, 0), 132, 6_980_000_000, 8192),  # Mistral-7B's: 57 ms for each 2,048
        ((9, 0), 132, 14_000_000_000, 4096),
        ((8, 0), 108, 6_980_000_000, 2048),  # A100
        ((8, 9), 58, 440_000_000, 8192),  # L4
        ((8, 9), 58, 70_000_000_000, 2048),  # more than a quarter of a second, but one pass there is
        ((7, 5), 40, 440_000_000, 8192),
    ],
)
def test_prompt_tokens_of_a_step_follow_from_gpu_and_model(
    capability: tuple[int, int], multiprocessors: int, weights: int, tokens: int
) -> None:
    assert batch_tokens(weights, operations_of(capability, multiprocessors)) == tokens


def test_flags_can_be_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx512f avx512_bf16 amx_bf16 avx512_vnni\n")
    monkeypatch.setenv(HIDE, "avx512_bf16, amx_bf16,avx512_vnni")
    assert cpu_features(info) == CpuFeatures(frozenset({"fpu", "avx512f"}))
    assert not cpu_features(info).bf16
    monkeypatch.setenv(HIDE, "avx512")  # whole names only
    assert cpu_features(info).bf16


def test_a_model_is_split_over_as_many_gpus_as_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_ranks("auto", gpu, lambda ranks: ranks != 3) == 4
    assert pick_ranks("auto", gpu, lambda ranks: ranks < 4) == 3
    assert pick_ranks("auto", gpu, lambda ranks: False) == 1
    assert pick_ranks(2, gpu, lambda ranks: False) == 2
    with pytest.raises(Unsupported, match="4 GPUs are visible"):
        pick_ranks(5, gpu, lambda ranks: True)


def test_a_cpu_splits_only_what_is_asked_for() -> None:
    assert pick_ranks("auto", CPU, lambda ranks: True) == 1
    assert pick_ranks(5, CPU, lambda ranks: False) == 5
