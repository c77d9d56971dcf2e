"""What the engine process is told at its start, every value resolved and validated by whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PAGE_SIZE = 16  # tokens in a key-value page

EngineKind = Literal["model", "fake"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DecoderChoice = Literal["auto", "graph", "eager"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSettings:
    """The engine that needs no torch and no weights: deterministic ids, for tests and for measuring the front."""

    vocab_size: int = 256
    max_context: int = 4096
    total_pages: int = 4096
    step_time: float = 0.0  # seconds a step takes
    tokens_per_step: int = 1  # ids a sequence gets in a step
    faults: bool = False  # whether the prompts listed in engine.fake break things


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings:
    """Which keys and values are used again, and where they are kept beyond the device."""

    enabled: bool = True  # optimizations.prefix_cache
    shared: bool = True  # optimizations.prefix_redis; without a redis_url there is nothing it could do
    redis_url: str | None = None  # None: on the device alone
    redis_password_file: str | None = None
    redis_ca_file: str | None = None
    key_file: str | None = None  # of names and values; needed with redis_url
    ttl: float = 3600.0  # seconds
    chunk_bytes: int = 1 << 20  # aimed at, of one value
    min_tokens: int = 128  # shorter prefixes are computed rather than fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything the engine process needs to know."""

    model: str  # the folder
    kind: EngineKind = "model"
    device: Device = "auto"
    dtype: Dtype = "auto"
    decoder: DecoderChoice = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"  # auto: as the folder has its weights; int8: plain ones become eight bits
    max_sequences: int = 16  # sequences that run at once
    max_batch_tokens: int = 512  # prompt tokens a step may take, decode rows not counted
    max_context: int | None = None  # tokens; None: the model's own
    kv_bytes: int | None = None  # page pool; None: a share of the device's free memory
    threads: int | None = None  # torch's, on a CPU; None: all cores but the one that the front needs
    seed: int = 0  # of dummy weights
    batching: bool = True  # optimizations.batching
    prefix: PrefixSettings = PrefixSettings()
    graphs: bool = True  # optimizations.graphs
    fused_kernels: bool = True  # optimizations.fused_kernels
    fake: FakeSettings = FakeSettings()
