"""The one settings tree: what a server can be told, and the values it has where it is told nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from engine.settings import (
    DecoderChoice,
    Device,
    Dtype,
    EngineKind,
    EngineSettings,
    FakeSettings,
    LoadFormat,
    Quantization,
)
from service.config.cache_options import CacheOptions
from service.config.group import Group, Seconds

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+):(\d{1,5})")


class BadSettings(Exception):
    """The settings cannot be used. One line, names each setting and what is wrong with it."""


class SchedulerOptions(Group):
    """How the engine shares itself out."""

    max_sequences: int = Field(default=16, ge=1, le=1024, description="sequences that run at once")
    max_batch_tokens: int = Field(default=512, ge=16, le=1_048_576, description="prompt tokens that a step may take")
    max_context: int | None = Field(
        default=None, ge=16, description="prompt and answer, in tokens; unset: the model's own"
    )
    kv_bytes: int | None = Field(default=None, ge=1 << 16, description="key-value pages; unset: a share of free memory")
    threads: int | None = Field(default=None, ge=1, le=1024, description="of a CPU; unset: all cores but one")


class LimitOptions(Group):
    """How much work may wait."""

    queued_requests: int = Field(default=256, ge=0, description="generations beyond those that run at once")
    queued_prompt_tokens: int = Field(
        default=1_048_576, ge=1, description="prompt tokens of requests without a first token"
    )
    tenant_requests: int | None = Field(default=None, ge=1, description="live requests of one tenant; unset: no limit")
    live_requests: int = Field(
        default=4096, ge=1, description="requests in all, those that a cache answers or that read along included"
    )

    @model_validator(mode="after")
    def _room_for_all(self) -> LimitOptions:
        if self.live_requests <= self.queued_requests:
            raise ValueError("live-requests must be more than queued-requests")
        return self


class StreamOptions(Group):
    """What a reader that is slow may cost."""

    buffer_bytes: int = Field(
        default=262_144, ge=4096, description="what may wait for a reader before its sequence pauses"
    )
    stall_timeout: Seconds = Field(default=30.0, description="seconds without a message taken until a stream is ended")


class DrainOptions(Group):
    """How the server stops."""

    timeout: float = Field(default=30.0, ge=0, le=86_400, description="seconds that live requests get after SIGTERM")


class AuthOptions(Group):
    """Who may call."""

    tokens_file: Path | None = Field(
        default=None, description="YAML of {tenant, sha256, rights}; unset: everyone may all"
    )


class TlsOptions(Group):
    """The certificate of the data and admin ports. The health port stays plaintext."""

    cert: Path | None = Field(default=None, description="certificate chain, PEM")
    key: Path | None = Field(default=None, description="private key, PEM")
    client_ca: Path | None = Field(
        default=None, description="callers must show a certificate that this one signed, PEM"
    )

    @model_validator(mode="after")
    def _pair(self) -> TlsOptions:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("client-ca needs cert and key")
        return self


class OptimizationOptions(Group):
    """The switches. None of them changes greedy output."""

    batching: bool = Field(default=True, description="run several sequences in one step")
    graphs: bool = Field(default=True, description="launch whole steps on a card at once; off, kernel by kernel")
    fused_kernels: bool = Field(default=True, description="decode with kernels of our own where they fit the card")
    response_cache: bool = Field(default=True, description="answer identical questions once")
    semantic_cache: bool = Field(
        default=True, description="look for questions that mean the same, as cache.semantic.mode says"
    )
    prefix_cache: bool = Field(default=True, description="compute what prompts begin with once")
    prefix_redis: bool = Field(
        default=True, description="keep it in Redis too, given cache.redis-url and cache.key-file"
    )


class FakeOptions(Group):
    """The engine without weights, `--engine fake`."""

    vocab_size: int = Field(default=256, ge=2, le=1_048_576, description="used where no --model gives a tokenizer")
    max_context: int = Field(default=4096, ge=16)
    total_pages: int = Field(default=4096, ge=1)
    step_time: float = Field(default=0.0, ge=0, le=60, description="seconds a step takes")
    tokens_per_step: int = Field(default=1, ge=1, le=1024)
    faults: bool = Field(default=False, description="obey prompts that break things, for tests")


class Settings(BaseSettings):
    """The tree."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str | None = Field(default=None, description="folder of the model, as Hugging Face lays it out")
    model_name: str | None = Field(
        default=None, min_length=1, description="what requests call it; unset: the folder's name"
    )
    engine: EngineKind = Field(default="model", description="`fake` serves made-up tokens without weights")
    device: Device = "auto"
    dtype: Dtype = "auto"
    decoder: DecoderChoice = "auto"
    load_format: LoadFormat = Field(default="auto", description="`dummy` makes random weights from config.json alone")
    quantization: Quantization = Field(
        default="auto", description="`int8` quantizes plain weights while loading; auto: as the folder has them"
    )
    seed: int = Field(default=0, ge=0, description="of dummy weights")
    config: Path | None = Field(default=None, description="YAML file with this same tree")
    listen: str = Field(default="127.0.0.1:50051", description="data port")
    admin_listen: str = Field(default="127.0.0.1:50052", description="admin port")
    health_listen: str = Field(default="127.0.0.1:50053", description="health alone, plaintext")
    metrics_listen: str = Field(default="127.0.0.1:9090", description="Prometheus metrics over plain HTTP; empty: none")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    scheduler: SchedulerOptions = SchedulerOptions()
    limits: LimitOptions = LimitOptions()
    stream: StreamOptions = StreamOptions()
    drain: DrainOptions = DrainOptions()
    auth: AuthOptions = AuthOptions()
    tls: TlsOptions = TlsOptions()
    cache: CacheOptions = CacheOptions()
    optimizations: OptimizationOptions = OptimizationOptions()
    fake: FakeOptions = FakeOptions()

    @field_validator("listen", "admin_listen", "health_listen", "metrics_listen")
    @classmethod
    def _address(cls, address: str, info: ValidationInfo) -> str:
        if not address and info.field_name == "metrics_listen":
            return address
        match = _ADDRESS.fullmatch(address)
        if match is None or int(match[2]) > 65_535:
            raise ValueError("write HOST:PORT, [ADDRESS]:PORT for IPv6")
        return address

    @model_validator(mode="after")
    def _needs_model(self) -> Settings:
        if self.model is None and self.engine == "model":
            raise ValueError("--model FOLDER is needed")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`service.config.sources` alone says where values come from."""
        return (init_settings,)

    @property
    def served_name(self) -> str:
        """What requests may put into their field `model`."""
        if self.model_name is not None:
            return self.model_name
        return "fake" if self.model is None else Path(self.model).resolve().name

    def engine_settings(self, vocab_size: int | None = None) -> EngineSettings:
        """The engine's share. `vocab_size` is the tokenizer's, for a fake engine that must speak its ids."""
        fake = self.fake.model_dump()
        if vocab_size is not None:
            fake["vocab_size"] = vocab_size
        return EngineSettings(
            model=self.model or "",
            kind=self.engine,
            device=self.device,
            dtype=self.dtype,
            decoder=self.decoder,
            load_format=self.load_format,
            quantization=self.quantization,
            max_sequences=self.scheduler.max_sequences,
            max_batch_tokens=self.scheduler.max_batch_tokens,
            max_context=self.scheduler.max_context,
            kv_bytes=self.scheduler.kv_bytes,
            threads=self.scheduler.threads,
            seed=self.seed,
            batching=self.optimizations.batching,
            prefix=self.cache.prefix_settings(self.optimizations.prefix_cache, self.optimizations.prefix_redis),
            graphs=self.optimizations.graphs,
            fused_kernels=self.optimizations.fused_kernels,
            fake=FakeSettings(**fake),
        )
