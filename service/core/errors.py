"""Lists the front's errors as its callers see them. `status` maps each to a gRPC status.

ServiceError
├── InvalidRequest      every violation is named
├── UnknownModel
├── UnknownRequest      no live request of that name
├── DuplicateRequest    a live request of this tenant has that name
├── Unimplemented       this build or model lacks the option
├── Overloaded          a limit is reached: try again later
├── Draining            try another server, or later
├── ShuttingDown        no operator can undo that
├── CacheUnavailable    the caches' store does not answer an operator
├── Unauthenticated
├── PermissionDenied
├── StreamStalled       the reader took no message for too long
├── MessageStalled      the caller's own message did not come
└── AnswerTooLarge      the answer does not fit into one message
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Violation:
    field: str  # its path, "sampling.top_p" for one; empty for the message itself
    description: str


class Reason(StrEnum):
    """The `reason` of a refusal's google.rpc.ErrorInfo; `ErrorReason` of the contract explains each."""

    # A limit is reached.
    QUEUE_FULL = "QUEUE_FULL"
    QUEUED_TOKENS = "QUEUED_TOKENS"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    LIVE_REQUESTS = "LIVE_REQUESTS"
    TENANT_QUOTA = "TENANT_QUOTA"
    TENANT_TOKENS = "TENANT_TOKENS"
    TEXT_QUEUE = "TEXT_QUEUE"
    MESSAGES = "MESSAGES"
    PROFILE_RUNNING = "PROFILE_RUNNING"
    ANSWER_TOO_LARGE = "ANSWER_TOO_LARGE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    # The server, or a part of it, is not there.
    DRAINING = "DRAINING"
    ENGINE_UNAVAILABLE = "ENGINE_UNAVAILABLE"
    CACHE_UNAVAILABLE = "CACHE_UNAVAILABLE"
    STOPPING = "STOPPING"
    # Who calls.
    TOKEN_MISSING = "TOKEN_MISSING"
    TOKEN_MALFORMED = "TOKEN_MALFORMED"
    TOKEN_UNKNOWN = "TOKEN_UNKNOWN"
    TOKEN_EXPIRED = "TOKEN_EXPIRED"
    CERTIFICATE_UNKNOWN = "CERTIFICATE_UNKNOWN"
    CERTIFICATE_AMBIGUOUS = "CERTIFICATE_AMBIGUOUS"
    CERTIFICATE_EXPIRED = "CERTIFICATE_EXPIRED"
    RIGHT_MISSING = "RIGHT_MISSING"
    # The request.
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    UNIMPLEMENTED_OPTION = "UNIMPLEMENTED_OPTION"
    REQUEST_ABORTED = "REQUEST_ABORTED"
    QUARANTINED = "QUARANTINED"
    # The connection.
    STREAM_STALLED = "STREAM_STALLED"
    MESSAGE_STALLED = "MESSAGE_STALLED"
    CONSTRAINT_UNMET = "CONSTRAINT_UNMET"
    # The server's own faults.
    ENGINE_FAILED = "ENGINE_FAILED"
    INTERNAL = "INTERNAL"


class ServiceError(Exception):
    """The text is meant for the caller."""


class InvalidRequest(ServiceError):
    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" if v.field else v.description for v in violations))
        self.violations = violations


class UnknownModel(ServiceError):
    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"no such model is served here: {name[:128]!r}; {served!r} is")
        self.name = name


class UnknownRequest(ServiceError):
    def __init__(self, request_id: str) -> None:
        super().__init__("no such request is live")
        self.request_id = request_id


class DuplicateRequest(ServiceError):
    def __init__(self, request_id: str) -> None:
        super().__init__("a live request has this request_id")
        self.request_id = request_id


class Unimplemented(ServiceError):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


# A hint no longer than so many seconds has so many steps in each of them.
_STEPS = ((0.1, 1000), (1.0, 100), (10.0, 20), (math.inf, 4))


class Overloaded(ServiceError):
    """`retry_after` is rounded to steps of some per cent, so that the few statuses can be kept."""

    def __init__(self, message: str, reason: Reason, retry_after: float) -> None:
        super().__init__(message)
        self.reason = reason
        steps = next(steps for longest, steps in _STEPS if retry_after <= longest)
        self.retry_after = max(1, round(retry_after * steps)) / steps  # seconds


class Draining(ServiceError):
    def __init__(self, retry_after: float) -> None:
        super().__init__("the server is draining")
        self.retry_after = retry_after  # seconds


class ShuttingDown(ServiceError):
    def __init__(self) -> None:
        super().__init__("the server is stopping: a drain by a signal is for good")


class CacheUnavailable(ServiceError):
    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class Unauthenticated(ServiceError):
    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class PermissionDenied(ServiceError):
    def __init__(self, rights: tuple[str, ...]) -> None:
        super().__init__(f"the caller lacks the right to {' or '.join(rights)}")
        self.rights = rights  # any of which would do


class StreamStalled(ServiceError):
    pass


class MessageStalled(ServiceError):
    pass


class AnswerTooLarge(ServiceError):
    pass
