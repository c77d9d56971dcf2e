"""Provides a client of Whippet: `AsyncClient` for asyncio, `Client` for threads, and the errors that they raise."""

from whippet_client.aio import AsyncClient, AsyncStream
from whippet_client.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Violation,
    WhippetError,
)
from whippet_client.requests import Message, Options, Prompt
from whippet_client.sync import Client, Stream

__all__ = [
    "Aborted",
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "Message",
    "NotFound",
    "Options",
    "PermissionDenied",
    "Prompt",
    "ResourceExhausted",
    "Stream",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Violation",
    "WhippetError",
]
