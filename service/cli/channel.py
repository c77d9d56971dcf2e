"""Connects clients to a server: address, credentials, and its refusals in one line. docs/operations/README.md lists the
exit codes."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

MAX_MESSAGE_BYTES = 16 * 2**20
DATA = "127.0.0.1:50051"
ADMIN = "127.0.0.1:50052"
USAGE = 2  # exit codes
NO_ANSWER = 3
INTERRUPTED = 130
LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")
_ADDRESS = re.compile(r"(\[[^][/]+\]|[^][:/\s]+)(?::([0-9]{1,5}))?")
_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:")  # of gRPC's names, which are left as they are


class UsageError(Exception):
    """One line, never with a secret in it."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    address: str
    token: str | None
    ca: Path | None
    cert: Path | None
    key: Path | None

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--address", default=DATA, metavar="HOST[:PORT]", help="default: %(default)s")
        cls._add_credentials(parser, DATA)

    @classmethod
    def add_operator_flags(
        cls, parser: argparse.ArgumentParser, default: str = ADMIN, port: str = "the admin port"
    ) -> None:
        """The address is the command's first word."""
        parser.add_argument(
            "address", nargs="?", default=default, metavar="HOST[:PORT]", help=f"{port}; default: %(default)s"
        )
        cls._add_credentials(parser, default)

    @classmethod
    def _add_credentials(cls, parser: argparse.ArgumentParser, default: str) -> None:
        parser.set_defaults(port=default.rpartition(":")[2])
        parser.add_argument("--token", metavar="TOKEN|@FILE", help="bearer token; @FILE keeps it off the process list")
        parser.add_argument("--tls-ca", type=Path, metavar="PEM", help="use TLS, trust this authority")
        parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="show this certificate")
        parser.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")

    @classmethod
    def of(cls, flags: argparse.Namespace) -> ServerAddress:
        if (flags.tls_cert is None) != (flags.tls_key is None):
            raise UsageError("--tls-cert and --tls-key go together")
        if flags.tls_cert is not None and flags.tls_ca is None:
            raise UsageError("--tls-cert needs --tls-ca")
        return cls(
            _with_port(flags.address, flags.port), _token(flags.token), flags.tls_ca, flags.tls_cert, flags.tls_key
        )

    def channel(self) -> grpc.Channel:
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_reconnect_backoff_ms", 1000)]
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


def _with_port(address: str, port: str) -> str:
    if address.startswith(_SCHEMES):
        return address
    with contextlib.suppress(ValueError):
        return f"[{ipaddress.IPv6Address(address)}]:{port}"
    parts = _ADDRESS.fullmatch(address)
    if parts is None or int(parts[2] or port) > 65535:
        raise UsageError(f"{address}: an address is HOST or HOST:PORT")
    return f"{parts[1]}:{parts[2] or port}"


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


def probe_code(error: grpc.RpcError) -> int:
    """One code for a server that does not answer."""
    silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return NO_ANSWER if cast(grpc.Call, error).code() in silent else exit_code(error)


def explain(error: grpc.RpcError, address: str) -> str:
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


def wrong_fields(error: grpc.RpcError) -> frozenset[str]:
    fields: set[str] = set()
    for detail in _details(cast(grpc.Call, error)):
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields.update(wrong.field for wrong in bad.field_violations)
    return frozenset(fields)


def _details(call: grpc.Call) -> list[status_pb2.google_dot_protobuf_dot_any__pb2.Any]:
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status()
            status.ParseFromString(value)
            return list(status.details)
    return []


@contextlib.contextmanager
def cancelled_at_ctrl_c(call: grpc.Call) -> Iterator[threading.Event]:
    """Yields an event that is set at ctrl-C by a handler: an exception raised inside grpc is lost now and then. Another
    thread cancels the call, since this one may hold its lock."""
    happened = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        happened.set()
        threading.Thread(target=call.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield happened
    finally:
        signal.signal(signal.SIGINT, before)


def complain(line: str, code: int) -> int:
    sys.stderr.write(f"whippet: {line}\n")
    return code
