"""Holds the one table from exceptions to gRPC statuses, and their google.rpc details."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from engine import errors as engine_errors
from service.core import errors
from service.core.errors import Reason

DOMAIN = "whippet"

# HTTP/2 clients commonly refuse more than 8 KiB of trailers. Details travel in base64, the message percent-encoded.
_MAX_DETAIL_BYTES = 3072
_MAX_MESSAGE_BYTES = 512
_KEPT = 512  # refusals; one message has at most 471 different hints below a minute

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class ResourceTypes:
    model: str
    request: str


@dataclass(frozen=True, slots=True)
class RpcFailure:
    code: grpc.StatusCode
    message: str
    trailers: Trailers
    reason: str  # of ErrorInfo; empty where it has none


def failure_of(error: Exception, resources: ResourceTypes | None) -> RpcFailure:
    """An exception outside the table is INTERNAL and reveals nothing of its cause. Without `resources`, a missing
    resource is not named."""
    if type(error) is errors.Overloaded:
        return _overload(str(error), error.reason, error.retry_after)
    for kind in type(error).__mro__:
        entry = _TABLE.get(kind)
        if entry is not None:
            code, details = entry
            found = [] if resources is None else _resource(error, resources)
            return _failure(code, str(error) or code.name, found + details(error))
    return _failure(grpc.StatusCode.INTERNAL, "internal error", [_info(Reason.INTERNAL)])


@lru_cache(_KEPT)
def _overload(message: str, reason: Reason, retry_after: float) -> RpcFailure:
    """Cached, because a flood has thousands a second, and allocations kept from it would hold on to the memory around
    them."""
    code, details = _TABLE[errors.Overloaded]
    return _failure(code, message, details(errors.Overloaded(message, reason, retry_after)))


def _failure(code: grpc.StatusCode, message: str, details: list[Message]) -> RpcFailure:
    message = message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    trailers: list[tuple[str, str | bytes]] = []
    if details:
        number: int = code.value[0]
        status = status_pb2.Status(code=number, message=message, details=[_pack(d) for d in details])
        trailers.append(("grpc-status-details-bin", status.SerializeToString()))
    for detail in details:
        if isinstance(detail, error_details_pb2.RetryInfo):
            trailers.append(("grpc-retry-pushback-ms", str(detail.retry_delay.ToMilliseconds())))
    reason = next((detail.reason for detail in details if isinstance(detail, error_details_pb2.ErrorInfo)), "")
    return RpcFailure(code, message, tuple(trailers), reason)


def _pack(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


def _info(reason: Reason, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(math.ceil(seconds * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _bad_request(error: errors.InvalidRequest) -> list[Message]:
    detail = error_details_pb2.BadRequest()
    for violation in error.violations:
        detail.field_violations.add(field=violation.field, description=violation.description)
        if detail.ByteSize() > _MAX_DETAIL_BYTES:
            del detail.field_violations[-1]
            detail.field_violations.add(description="and more")
            break
    return [detail]


def _resource(error: Exception, types: ResourceTypes) -> list[Message]:
    if isinstance(error, errors.UnknownModel):
        return [error_details_pb2.ResourceInfo(resource_type=types.model, resource_name=error.name[:128])]
    if isinstance(error, errors.UnknownRequest):
        return [error_details_pb2.ResourceInfo(resource_type=types.request, resource_name=error.request_id[:128])]
    return []


def _duplicate(error: errors.DuplicateRequest) -> list[Message]:
    return [_info(Reason.REQUEST_ID_IN_USE, request_id=error.request_id)]


def _unimplemented(error: errors.Unimplemented) -> list[Message]:
    return [_info(Reason.UNIMPLEMENTED_OPTION, field=error.field)]


def _overloaded(error: errors.Overloaded) -> list[Message]:
    return [_info(error.reason), _retry(error.retry_after)]


def _draining(error: errors.Draining) -> list[Message]:
    return [_info(Reason.DRAINING), _retry(error.retry_after)]


def _cache_unavailable(error: errors.CacheUnavailable) -> list[Message]:
    return [_info(Reason.CACHE_UNAVAILABLE), _retry(error.retry_after)]


def _engine_unavailable(error: engine_errors.EngineUnavailable) -> list[Message]:
    return [_info(Reason.ENGINE_UNAVAILABLE), _retry(error.retry_after)]


def _unauthenticated(error: errors.Unauthenticated) -> list[Message]:
    return [_info(error.reason)]


def _denied(error: errors.PermissionDenied) -> list[Message]:
    return [_info(Reason.RIGHT_MISSING, rights=",".join(error.rights))]


def _only(reason: Reason) -> Callable[[Exception], list[Message]]:
    return lambda error: [_info(reason)]


def _nothing(error: Exception) -> list[Message]:
    return []


_C = grpc.StatusCode
# Each function is only ever given the exception that it stands beside.
_TABLE: dict[type, tuple[grpc.StatusCode, Callable[..., list[Message]]]] = {
    errors.InvalidRequest: (_C.INVALID_ARGUMENT, _bad_request),
    errors.UnknownModel: (_C.NOT_FOUND, _nothing),
    errors.UnknownRequest: (_C.NOT_FOUND, _nothing),
    errors.DuplicateRequest: (_C.ALREADY_EXISTS, _duplicate),
    errors.Unimplemented: (_C.UNIMPLEMENTED, _unimplemented),
    errors.Overloaded: (_C.RESOURCE_EXHAUSTED, _overloaded),
    errors.Draining: (_C.UNAVAILABLE, _draining),
    errors.ShuttingDown: (_C.FAILED_PRECONDITION, _only(Reason.STOPPING)),
    errors.CacheUnavailable: (_C.UNAVAILABLE, _cache_unavailable),
    errors.Unauthenticated: (_C.UNAUTHENTICATED, _unauthenticated),
    errors.PermissionDenied: (_C.PERMISSION_DENIED, _denied),
    errors.StreamStalled: (_C.ABORTED, _only(Reason.STREAM_STALLED)),
    errors.MessageStalled: (_C.ABORTED, _only(Reason.MESSAGE_STALLED)),
    errors.AnswerTooLarge: (_C.RESOURCE_EXHAUSTED, _only(Reason.ANSWER_TOO_LARGE)),
    engine_errors.Unsupported: (_C.UNIMPLEMENTED, _only(Reason.UNIMPLEMENTED_OPTION)),
    engine_errors.EngineUnavailable: (_C.UNAVAILABLE, _engine_unavailable),
    engine_errors.EngineFailed: (_C.INTERNAL, _only(Reason.ENGINE_FAILED)),
    engine_errors.OutOfMemory: (_C.RESOURCE_EXHAUSTED, _only(Reason.OUT_OF_MEMORY)),
    engine_errors.ConstraintTooCostly: (_C.FAILED_PRECONDITION, _only(Reason.CONSTRAINT_UNMET)),
    engine_errors.ConstraintUnmet: (_C.FAILED_PRECONDITION, _only(Reason.CONSTRAINT_UNMET)),
    engine_errors.Quarantined: (_C.FAILED_PRECONDITION, _only(Reason.QUARANTINED)),
    engine_errors.DeadlineExceeded: (_C.DEADLINE_EXCEEDED, _nothing),
    engine_errors.Aborted: (_C.ABORTED, _only(Reason.REQUEST_ABORTED)),
}
