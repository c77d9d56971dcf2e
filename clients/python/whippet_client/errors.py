"""Defines the errors of calls, one class for each gRPC code, with the server's details parsed."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is wrong."""

    field: str  # its path, "sampling.top_p" for one; empty for the message itself
    description: str


class WhippetError(Exception):
    """A call failed. Its text is the server's, or gRPC's where no server answered."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        retry_after: float | None = None,
        violations: tuple[Violation, ...] = (),
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason  # as `ErrorReason` has it, without its prefix; empty where the server gave none
        self.retry_after = retry_after  # seconds; None: the server did not say that coming back would help
        self.violations = violations  # of InvalidArgument
        self.metadata = metadata or {}  # of google.rpc.ErrorInfo

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.code.name}{reason}: {super().__str__()}"


class InvalidArgument(WhippetError):
    """Fields are wrong: `violations` names all of them."""


class NotFound(WhippetError):
    """The server has no such model."""


class AlreadyExists(WhippetError):
    """A live request has this `request_id`."""


class Unauthenticated(WhippetError):
    """The server does not know who calls."""


class PermissionDenied(WhippetError):
    """The caller lacks the right to make the call."""


class ResourceExhausted(WhippetError):
    """A limit is reached. With `retry_after`, retry then; without, the request is too large for this server."""


class Unavailable(WhippetError):
    """No server answered, or none that accepts requests, after all retries."""


class FailedPrecondition(WhippetError):
    """The call cannot succeed now. Retrying is useless."""


class Unimplemented(WhippetError):
    """This server or model lacks the option."""


class DeadlineExceeded(WhippetError):
    """The call's `timeout` has passed."""


class Aborted(WhippetError):
    """An operator ended the request, or its messages were not read for too long."""


class Cancelled(WhippetError):
    """The call was cancelled, and not by this client's `cancel`."""


class Internal(WhippetError):
    """The server failed to handle the call."""


_CLASSES: dict[grpc.StatusCode, type[WhippetError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: Internal,
}


def error_of(failed: grpc.Call) -> WhippetError:
    """Converts a call that has ended, synchronous or not."""
    code = failed.code()
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    retry_after = None
    for detail in _status(failed).details:
        detail.Unpack(info) or detail.Unpack(bad)
        if detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    violations = tuple(Violation(one.field, one.description) for one in bad.field_violations)
    kind = _CLASSES.get(code, WhippetError)
    return kind(code, failed.details() or "", info.reason, retry_after, violations, dict(info.metadata))


def _status(failed: grpc.Call) -> status_pb2.Status:
    """Parses the trailers. A proxy between server and client may have changed them."""
    for key, value in failed.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
