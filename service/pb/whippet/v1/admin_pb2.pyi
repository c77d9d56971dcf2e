import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_RESTARTING: _ClassVar[EngineState]
    ENGINE_STATE_STOPPED: _ClassVar[EngineState]

class CacheKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_KIND_UNSPECIFIED: _ClassVar[CacheKind]
    CACHE_KIND_RESPONSE: _ClassVar[CacheKind]
    CACHE_KIND_SEMANTIC: _ClassVar[CacheKind]
    CACHE_KIND_PREFIX: _ClassVar[CacheKind]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_RESTARTING: EngineState
ENGINE_STATE_STOPPED: EngineState
CACHE_KIND_UNSPECIFIED: CacheKind
CACHE_KIND_RESPONSE: CacheKind
CACHE_KIND_SEMANTIC: CacheKind
CACHE_KIND_PREFIX: CacheKind

class AbortGenerationRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortGenerationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("state", "running", "waiting", "paused", "used_pages", "total_pages", "page_size", "steps", "generated_tokens", "preemptions", "restarts", "cache_counts", "cache_breakers", "live_requests", "looking_requests", "queued_requests", "queue_limit", "max_sequences", "kept_pages", "prompt_tokens", "cached_tokens", "ended_calls", "refused_requests", "seconds", "version", "model", "runs_on", "uptime", "front_bytes", "front_cpu", "device_used_bytes", "device_bytes", "draft_proposed", "draft_accepted")
    class CacheCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CacheBreakersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class EndedCallsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusedRequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Distribution
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Distribution, _Mapping]] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BREAKERS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOOKING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KEPT_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_CALLS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNS_ON_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    FRONT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRONT_CPU_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    running: int
    waiting: int
    paused: int
    used_pages: int
    total_pages: int
    page_size: int
    steps: int
    generated_tokens: int
    preemptions: int
    restarts: int
    cache_counts: _containers.ScalarMap[str, int]
    cache_breakers: _containers.ScalarMap[str, str]
    live_requests: int
    looking_requests: int
    queued_requests: int
    queue_limit: int
    max_sequences: int
    kept_pages: int
    prompt_tokens: int
    cached_tokens: int
    ended_calls: _containers.ScalarMap[str, int]
    refused_requests: _containers.ScalarMap[str, int]
    seconds: _containers.MessageMap[str, Distribution]
    version: str
    model: str
    runs_on: str
    uptime: _duration_pb2.Duration
    front_bytes: int
    front_cpu: _duration_pb2.Duration
    device_used_bytes: int
    device_bytes: int
    draft_proposed: int
    draft_accepted: int
    def __init__(self, state: _Optional[_Union[EngineState, str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., paused: _Optional[int] = ..., used_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., steps: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., restarts: _Optional[int] = ..., cache_counts: _Optional[_Mapping[str, int]] = ..., cache_breakers: _Optional[_Mapping[str, str]] = ..., live_requests: _Optional[int] = ..., looking_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., queue_limit: _Optional[int] = ..., max_sequences: _Optional[int] = ..., kept_pages: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., ended_calls: _Optional[_Mapping[str, int]] = ..., refused_requests: _Optional[_Mapping[str, int]] = ..., seconds: _Optional[_Mapping[str, Distribution]] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., runs_on: _Optional[str] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., front_bytes: _Optional[int] = ..., front_cpu: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., device_used_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., draft_proposed: _Optional[int] = ..., draft_accepted: _Optional[int] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("borders", "counts", "total")
    BORDERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    borders: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total: float
    def __init__(self, borders: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., total: _Optional[float] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("tenant", "kind", "entry_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    kind: CacheKind
    entry_id: str
    def __init__(self, tenant: _Optional[str] = ..., kind: _Optional[_Union[CacheKind, str]] = ..., entry_id: _Optional[str] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: int
    def __init__(self, entries: _Optional[int] = ...) -> None: ...

class ListOptimizationsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Optimization(_message.Message):
    __slots__ = ("name", "enabled", "description", "why_not", "effective")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    enabled: bool
    description: str
    why_not: str
    effective: bool
    def __init__(self, name: _Optional[str] = ..., enabled: bool = ..., description: _Optional[str] = ..., why_not: _Optional[str] = ..., effective: bool = ...) -> None: ...

class ListOptimizationsResponse(_message.Message):
    __slots__ = ("optimizations",)
    OPTIMIZATIONS_FIELD_NUMBER: _ClassVar[int]
    optimizations: _containers.RepeatedCompositeFieldContainer[Optimization]
    def __init__(self, optimizations: _Optional[_Iterable[_Union[Optimization, _Mapping]]] = ...) -> None: ...

class SetOptimizationRequest(_message.Message):
    __slots__ = ("name", "enabled")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    name: str
    enabled: bool
    def __init__(self, name: _Optional[str] = ..., enabled: bool = ...) -> None: ...

class SetOptimizationResponse(_message.Message):
    __slots__ = ("optimization",)
    OPTIMIZATION_FIELD_NUMBER: _ClassVar[int]
    optimization: Optimization
    def __init__(self, optimization: _Optional[_Union[Optimization, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("remaining", "admitting")
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    ADMITTING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    admitting: bool
    def __init__(self, remaining: _Optional[int] = ..., admitting: bool = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("duration",)
    DURATION_FIELD_NUMBER: _ClassVar[int]
    duration: _duration_pb2.Duration
    def __init__(self, duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ProcessProfile(_message.Message):
    __slots__ = ("process", "stacks", "why_not")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    process: str
    stacks: str
    why_not: str
    def __init__(self, process: _Optional[str] = ..., stacks: _Optional[str] = ..., why_not: _Optional[str] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessProfile]
    def __init__(self, processes: _Optional[_Iterable[_Union[ProcessProfile, _Mapping]]] = ...) -> None: ...
