from whippet_client.pb.whippet.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "weight_format", "dtype", "device", "decoder", "objections", "draft_model", "limits", "default_sampling", "weights_digest", "tokenizer_digest", "chat", "eos_token_ids", "proposers", "kv_dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    OBJECTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    weight_format: str
    dtype: str
    device: str
    decoder: str
    objections: _containers.RepeatedCompositeFieldContainer[DecoderObjection]
    draft_model: str
    limits: ModelLimits
    default_sampling: _generation_pb2.SamplingOptions
    weights_digest: str
    tokenizer_digest: str
    chat: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    proposers: _containers.RepeatedCompositeFieldContainer[Proposer]
    kv_dtype: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., weight_format: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., decoder: _Optional[str] = ..., objections: _Optional[_Iterable[_Union[DecoderObjection, _Mapping]]] = ..., draft_model: _Optional[str] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., default_sampling: _Optional[_Union[_generation_pb2.SamplingOptions, _Mapping]] = ..., weights_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., chat: bool = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., proposers: _Optional[_Iterable[_Union[Proposer, _Mapping]]] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class DecoderObjection(_message.Message):
    __slots__ = ("decoder", "reason")
    DECODER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    decoder: str
    reason: str
    def __init__(self, decoder: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Proposer(_message.Message):
    __slots__ = ("name", "why_not")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    why_not: str
    def __init__(self, name: _Optional[str] = ..., why_not: _Optional[str] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("max_context_tokens", "vocab_size", "max_sequences", "max_logprobs", "max_answers")
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    max_context_tokens: int
    vocab_size: int
    max_sequences: int
    max_logprobs: int
    max_answers: int
    def __init__(self, max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_answers: _Optional[int] = ...) -> None: ...
