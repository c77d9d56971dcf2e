"""Defines every setting of the engine once: name, type, default, bounds and help. No torch.

An `…Options` or `…Switches` class, what a user may set, is mounted into the server's settings tree. `EngineSettings` is
what the engine process gets at its start: all of them, resolved and validated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from cache.api import BlockSettings

PAGE_SIZE = 16  # tokens in a key-value page
CPU_SEQUENCES, CUDA_SEQUENCES = 64, 512  # that run at once, unless the settings say
CPU_BATCH_TOKENS = 512  # prompt tokens of a step, likewise: what keeps the device busy, no more
CUDA_BATCH_TOKENS = (2048, 8192)  # at least and at most: what GPU and model manage in a quarter of a second

EngineKind = Literal["model", "fake"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DecoderChoice = Literal["auto", "graph", "portable", "eager"]
LoadFormat = Literal["auto", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Quantization = Literal["auto", "int8"]
KvDtype = Literal["auto", "fp8"]
TensorParallel = Literal["auto"] | int


def setting(default: object, help: str = "", **bounds: object) -> Any:
    """`help` names the unit; the tree's validation reads `bounds`, except `needs`, the switch without which this
    setting does nothing."""
    return field(default=default, metadata={"description": help, **bounds})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    kind: EngineKind = setting("model", "`fake` serves made-up tokens without weights")
    hang_timeout: float = setting(
        60.0,
        "seconds without a sign of life after which the engine process is replaced; more than any step takes",
        ge=0.5,
        le=86_400,
    )
    give_up: float = setting(
        600.0,
        "seconds of failing restarts after which liveness fails, so that the whole server is started again; 0: never",
        ge=0,
        le=86_400,
    )
    ranks_elsewhere: int = setting(
        0, "how many of the processes of tensor-parallel other hosts start, by `whippet rank`", ge=0, le=63
    )
    ranks_listen: str | None = setting(
        None, "where ranks of other hosts are awaited, HOST:PORT of a private network; needed with ranks-elsewhere"
    )
    ranks_secret_file: str | None = setting(
        None, "file with the secret that ranks of other hosts prove to know; needed with ranks-elsewhere"
    )
    record_steps: bool = setting(
        False, "keep the last steps and write them to a file on a fault; they hold prompts' token ids"
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    device: Device = setting("auto", "what computes; auto: a GPU where one is usable")
    dtype: Dtype = setting("auto", "of arithmetic; auto: the weights' own on a GPU, on a CPU as its units have it")
    decoder: DecoderChoice = setting("auto", "the best executor that is allowed; auto: any that this machine can use")
    load_format: LoadFormat = setting("auto", "`dummy` makes random weights from config.json alone")
    quantization: Quantization = setting(
        "auto", "`int8` quantizes plain weights while loading; auto: as the folder has them"
    )
    kv_dtype: KvDtype = setting(
        "auto", "of keys and values in their pages: `fp8` takes half the memory, for a little accuracy; auto: dtype's"
    )
    tensor_parallel: TensorParallel = setting(
        1, "processes that share every layer, 1 to 64; auto: as many GPUs as are of use", ge=1, le=64
    )
    seed: int = setting(0, "of dummy weights", ge=0)
    draft_model: str | None = setting(
        None, "folder of a smaller model with the same tokenizer, which drafts what the model will answer"
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    max_sequences: int | None = setting(
        None, "sequences that run at once; unset: 64 on a CPU, on a GPU 512 or what its memory is for", ge=1, le=1024
    )
    max_batch_tokens: int | None = setting(
        None,
        "prompt tokens that a step may take; unset: 512 on a CPU, on a GPU 2048 to 8192, by what it manages of this"
        " model in a quarter of a second",
        ge=16,
        le=1_048_576,
    )
    target_tpot: float | None = setting(
        None,
        "milliseconds between two tokens of a stream that are aimed at, by how many sequences run at once and how many"
        " prompt tokens are fed beside them; unset: as many as there may be",
        gt=0,
        le=60_000,
    )
    max_context: int | None = setting(None, "prompt and answer, in tokens; unset: the model's own", ge=16)
    kv_bytes: int | None = setting(None, "key-value pages; unset: a share of free memory", ge=1 << 16)
    threads: int | None = setting(
        None, "of a CPU; unset: one less than the cores that affinity and container allow", ge=1, le=1024
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionSwitches:
    """None of them changes greedy output."""

    batching: bool = setting(True, "run several sequences in one step")
    graphs: bool = setting(True, "launch whole steps on a GPU at once; off, kernel by kernel", needs="fused_kernels")
    fused_kernels: bool = setting(True, "decode with kernels of our own where they fit the GPU or CPU")
    speculation: bool = setting(True, "verify several guessed tokens in one step where that is faster")
    two_pass_head: bool = setting(
        True, "read half of a large head's bytes a step, for a copy of half its size", needs="fused_kernels"
    )


@dataclass(frozen=True, kw_only=True)
class PrefixSwitches:
    """Neither of them changes greedy output."""

    prefix_cache: bool = setting(True, "compute what prompts begin with once")
    prefix_redis: bool = setting(
        True, "keep it in Redis too, given cache.redis-url and cache.key-file", needs="prefix_cache"
    )


@dataclass(frozen=True, kw_only=True)
class FakeSettings:
    """The engine of `--engine fake`: deterministic ids, for tests and for measuring the front."""

    vocab_size: int = setting(256, "used where no --model gives a tokenizer", ge=2, le=1_048_576)
    max_context: int = setting(4096, "prompt and answer, in tokens", ge=16)
    total_pages: int = setting(4096, "of 16 tokens", ge=1)
    step_time: float = setting(0.0, "seconds a step takes", ge=0, le=60)
    tokens_per_step: int = setting(1, "that a sequence gets", ge=1, le=1024)
    faults: bool = setting(False, "obey prompts that break things, for tests")
    stamps: bool = setting(False, "log-probabilities carry the time when an id was made, for measuring the front")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(PrefixSwitches, ExecutionSwitches, SchedulerOptions, ModelOptions, EngineOptions):
    model: str  # the folder; empty for a fake that speaks bytes
    model_digest: str | None = None  # that the folder must have, as `quant.checkpoint.digest.of_model` writes it
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    shared_tier: BlockSettings | None = None  # None: keys and values stay on the device
    fake: FakeSettings = FakeSettings()


def switches_of(settings: EngineSettings) -> dict[str, bool]:
    names = [one.name for kind in (ExecutionSwitches, PrefixSwitches) for one in fields(kind)]
    return {name: getattr(settings, name) for name in names}
