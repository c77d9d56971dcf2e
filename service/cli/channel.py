"""How a client reaches a server: address, credentials, and its refusals in one line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2

MAX_MESSAGE_BYTES = 16 * 2**20
LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")


class UsageError(Exception):
    """The command line cannot be used. One line, never with a secret in it."""


@dataclass(frozen=True, slots=True)
class Server:
    """Address and credentials."""

    address: str
    token: str | None
    ca: Path | None
    cert: Path | None
    key: Path | None

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="default: %(default)s")
        parser.add_argument("--token", metavar="TOKEN|@FILE", help="bearer token; @FILE keeps it off the process list")
        parser.add_argument("--tls-ca", type=Path, metavar="PEM", help="use TLS, trust this authority")
        parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="show this certificate")
        parser.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")

    @classmethod
    def of(cls, flags: argparse.Namespace) -> Server:
        """Raises UsageError."""
        if (flags.tls_cert is None) != (flags.tls_key is None):
            raise UsageError("--tls-cert and --tls-key go together")
        if flags.tls_cert is not None and flags.tls_ca is None:
            raise UsageError("--tls-cert needs --tls-ca")
        return cls(flags.address, _token(flags.token), flags.tls_ca, flags.tls_cert, flags.tls_key)

    def channel(self) -> grpc.Channel:
        """Raises UsageError."""
        options: list[tuple[str, int]] = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        if self.address.startswith(LOOPBACK):
            options.append(("grpc.enable_http_proxy", 0))
        if self.ca is None:
            return grpc.insecure_channel(self.address, options)
        pair = [_read(path) if path is not None else None for path in (self.key, self.cert)]
        credentials = grpc.ssl_channel_credentials(_read(self.ca), *pair)
        return grpc.secure_channel(self.address, credentials, options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


def _token(given: str | None) -> str | None:
    token = _read(Path(given[1:])).decode("utf-8", "replace").strip() if given and given.startswith("@") else given
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise UsageError("--token: a token is printable ASCII")
    return token


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def exit_code(error: grpc.RpcError) -> int:
    """64 and the gRPC code, as grpcurl has it."""
    number: int = cast(grpc.Call, error).code().value[0]
    return 64 + number


def explain(error: grpc.RpcError, address: str) -> str:
    """One line: the code, the server's message, the fields that are wrong, when to try again."""
    call = cast(grpc.Call, error)
    message = call.details() or "no reason given"
    details = _details(call)
    if not details and call.code() is grpc.StatusCode.UNAVAILABLE:
        message = f"no answer from {address} ({message})"
    parts = [f"{call.code().name}: {message}"]
    for detail in details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            parts += [
                f"{wrong.field}: {wrong.description}"
                for wrong in bad.field_violations
                if wrong.description not in message
            ]
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            parts.append(f"try again in {retry.retry_delay.ToTimedelta().total_seconds():g} s")
    return " ".join("; ".join(parts).split())


def _details(call: grpc.Call) -> list[status_pb2.google_dot_protobuf_dot_any__pb2.Any]:
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status()
            status.ParseFromString(value)
            return list(status.details)
    return []
