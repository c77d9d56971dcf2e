"""Defines the one settings tree. A leaf's type, default, help (with the unit) and bounds stand in its field and nowhere
else; the settings of engine and caches are mounted from their own `settings` modules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict
from pydantic.dataclasses import dataclass as validated

from cache.api import CacheOptions
from engine.settings import (
    EngineOptions,
    EngineSettings,
    ExecutionSwitches,
    FakeSettings,
    LogFormat,
    LogLevel,
    ModelOptions,
    PrefixSwitches,
    SchedulerOptions,
    setting,
)

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+):(\d{1,5})")


class BadSettings(Exception):
    """One line that names each setting and what is wrong with it."""


def _address(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65_535:
        raise ValueError("write HOST:PORT, [ADDRESS]:PORT for IPv6")
    return address


def _endpoint(endpoint: str | None) -> str | None:
    scheme, _, address = (endpoint or "http://collector:4317").partition("://")
    if scheme not in ("http", "https"):
        raise ValueError("write http://HOST:PORT or https://HOST:PORT")
    _address(address)
    return endpoint


Address = Annotated[str, AfterValidator(_address)]
EndpointOrNone = Annotated[str | None, AfterValidator(_endpoint)]
AddressOrNone = Annotated[str, AfterValidator(lambda address: address and _address(address))]


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    queued_requests: int = setting(256, "generations beyond those that run at once", ge=0)
    queued_prompt_tokens: int = setting(1_048_576, "prompt tokens of requests without a first token", ge=1)
    queue_timeout: float | None = setting(
        None, "seconds without a first token until a request is refused; unset: its deadline's", gt=0, le=86_400
    )
    tenant_requests: int | None = setting(None, "live requests of one tenant; unset: no limit", ge=1)
    live_requests: int = setting(4096, "requests in all, those that a cache answers or that read along included", ge=1)

    connections: int = setting(512, "connections of the data port; fewer where descriptors are short", ge=1)
    connection_age: float | None = setting(
        None, "seconds until a client is asked to connect anew, streams go on; unset: never", ge=0.1, le=2_000_000
    )
    connection_calls: int = setting(256, "calls of one connection at once", ge=1, le=65_536)
    message_bytes: int = setting(4_194_304, "the largest message of a caller", ge=65_536, le=1 << 30)
    live_message_bytes: int = setting(268_435_456, "messages that are read (half of it) or answered (half)", ge=1 << 20)

    def __post_init__(self) -> None:
        if self.live_message_bytes < 4 * self.message_bytes:
            raise ValueError("live-message-bytes must be at least four times message-bytes")
        if self.live_requests <= self.queued_requests:
            raise ValueError("live-requests must be more than queued-requests")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    fronts: int = setting(
        1, "processes that speak gRPC on the data port; more than 1: relays, beside the one that decides", ge=1, le=64
    )
    hang_timeout: float = setting(
        10.0, "seconds without a sign of life after which relay and front give each other up", ge=0.5, le=86_400
    )


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    vllm_engine: bool = setting(True, "vllm.grpc.engine, for gateways that speak to vLLM")
    open_inference: bool = setting(True, "inference, KServe's open inference protocol")


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    enabled: bool = setting(True, "the page at / of the metrics port; beyond this machine for known callers alone")
    hosts: str = setting("", "host names that lead to it, commas between; addresses and localhost always do")


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    buffer_bytes: int = setting(262_144, "what may wait for a reader before its sequence pauses", ge=4096)
    stall_timeout: float = setting(
        30.0, "seconds without a message taken until a stream is ended", gt=0, le=86_400, allow_inf_nan=False
    )


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    delay: float = setting(
        0.0,
        "seconds that health reports NOT_SERVING while requests are still admitted; longer than balancers look",
        ge=0,
        le=3600,
    )
    timeout: float = setting(30.0, "seconds that live requests get from then on, after SIGTERM", ge=0, le=86_400)


@dataclass(frozen=True, kw_only=True)
class AuthOptions:
    tokens_file: Path | None = setting(None, "YAML of {tenant, rights, sha256 or san, expires}; unset: all may all")
    tenants_file: Path | None = setting(None, "YAML of what each tenant may use; unset: no quotas")


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The certificate of the data and admin ports. The health port stays plaintext."""

    cert: Path | None = setting(None, "certificate chain, PEM")
    key: Path | None = setting(None, "private key, PEM")
    client_ca: Path | None = setting(None, "callers must show a certificate that this one signed, PEM")

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("client-ca needs cert and key")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    tool_format: Literal["auto", "none", "hermes", "llama", "mistral"] = setting(
        "auto", "how calls of tools are written; auto: by the template and the tokens of the model"
    )
    reasoning_format: Literal["auto", "none", "think"] = setting(
        "auto", "how reasoning is written; auto: by the tokens of the model"
    )


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    endpoint: EndpointOrNone = setting(None, "collector of OTLP over gRPC, http://HOST:PORT or https://…; unset: none")
    ca_file: Path | None = setting(None, "authority of an https endpoint, PEM; unset: public ones")
    sample: float = setting(0.01, "share of calls traced where the caller does not decide", ge=0, le=1)

    def __post_init__(self) -> None:
        if self.ca_file is not None and not (self.endpoint or "").startswith("https:"):
            raise ValueError("ca-file needs an https endpoint")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    format: LogFormat = setting("text", "of a line: text, or one JSON object")
    tenants: bool = setting(False, "lines of calls name the tenant")


@dataclass(frozen=True, kw_only=True)
class AnswerSwitches:
    """Neither changes greedy output."""

    response_cache: bool = setting(True, "answer identical questions once")
    semantic_cache: bool = setting(True, "look for questions that mean the same, as set by cache.semantic.mode")


# Fields are those of the bases from the last one to the first: this is the order of `--help`.
@dataclass(frozen=True, kw_only=True)
class OptimizationOptions(PrefixSwitches, AnswerSwitches, ExecutionSwitches):
    pass


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    model: str | None = setting(None, "the model: a folder as Hugging Face lays it out, or a GGUF file")
    model_digest: str | None = setting(
        None, "what the folder must have, as `whippet doctor --digest` prints it", pattern=r"^sha256:[0-9a-f]{64}$"
    )
    model_name: str | None = setting(
        None, "what requests call it; unset: the folder's name, or the file's without .gguf", min_length=1
    )
    chat_template: Path | None = setting(None, "Jinja file; unset: the chat template that the model comes with")
    engine: EngineOptions = field(default_factory=EngineOptions)


@validated(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings(ModelOptions, ServedOptions):
    config: Path | None = setting(None, "YAML file with this same tree, or a folder of such files")
    listen: Address = setting("127.0.0.1:50051", "data port")
    admin_listen: Address = setting("127.0.0.1:50052", "admin port")
    health_listen: Address = setting("127.0.0.1:50053", "health alone, plaintext")
    metrics_listen: AddressOrNone = setting(
        "127.0.0.1:9090", "Prometheus metrics over HTTP, and the console; empty: none"
    )
    insecure: bool = setting(False, "anybody may call, beyond this machine too, where there are no tokens")
    log_level: LogLevel = setting("info", "of both processes")
    cache_dir: Path | None = setting(
        None, "folder of compiled code and the exported embedder; unset: ~/.cache/whippet, or in $XDG_CACHE_HOME"
    )
    prebuilt_dir: Path | None = setting(
        None, "folder that `whippet prebuild` made, looked at before cache-dir and never written"
    )
    log: LogOptions = LogOptions()
    server: ServerOptions = ServerOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    limits: LimitOptions = LimitOptions()
    protocols: ProtocolOptions = ProtocolOptions()
    console: ConsoleOptions = ConsoleOptions()
    stream: StreamOptions = StreamOptions()
    chat: ChatSettings = ChatSettings()
    drain: DrainOptions = DrainOptions()
    auth: AuthOptions = AuthOptions()
    tls: TlsOptions = TlsOptions()
    cache: CacheOptions = field(default_factory=CacheOptions)
    optimizations: OptimizationOptions = OptimizationOptions()
    traces: TraceOptions = TraceOptions()
    fake: FakeSettings = FakeSettings()

    def __post_init__(self) -> None:
        if self.model is None and self.engine.kind == "model":
            raise ValueError("--model is needed: a folder, or a GGUF file")
        if self.model is None and self.model_digest is not None:
            raise ValueError("model-digest needs a model")
        if self.model is None and self.chat_template is not None:
            raise ValueError("chat-template needs a model")
        if self.engine.ranks_elsewhere:
            self._check_ranks()

    def _check_ranks(self) -> None:
        elsewhere = self.engine.ranks_elsewhere
        if self.tensor_parallel == "auto" or self.tensor_parallel <= elsewhere:
            raise ValueError("engine.ranks-elsewhere must be less than tensor-parallel, which is a number then")
        if self.engine.ranks_listen is None or self.engine.ranks_secret_file is None:
            raise ValueError("engine.ranks-elsewhere needs engine.ranks-listen and engine.ranks-secret-file")
        _address(self.engine.ranks_listen)

    @property
    def served_name(self) -> str:
        """What requests may put into their field `model`."""
        if self.model_name is not None:
            return self.model_name
        if self.model is None:
            return "fake"
        path = Path(self.model)
        return path.stem if path.suffix.lower() == ".gguf" else path.resolve().name

    def engine_settings(self, vocab_size: int | None = None) -> EngineSettings:
        """`vocab_size` is the tokenizer's, for a fake engine that must use its ids."""
        return EngineSettings(
            model=self.model or "",
            model_digest=self.model_digest,
            log_level=self.log_level,
            log_format=self.log.format,
            shared_tier=self.cache.blocks(),
            fake=self.fake if vocab_size is None else replace(self.fake, vocab_size=vocab_size),
            **_fields(EngineOptions, self.engine),
            **_fields(ModelOptions, self),
            **_fields(SchedulerOptions, self.scheduler),
            **_fields(ExecutionSwitches, self.optimizations),
            **_fields(PrefixSwitches, self.optimizations),
        )


def _fields(of: Any, values: object) -> dict[str, Any]:
    return {one.name: getattr(values, one.name) for one in fields(of)}
