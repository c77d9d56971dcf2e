"""Configures the connection to a server: credentials, retries, load balancing, keepalive."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

Token = str | Callable[[], str]
ChannelOption = tuple[str, int | str]

_LONGEST_ANSWER = 16 * 2**20  # bytes; a server sends no larger message
_LARGEST_PROMPT = 4 * 2**20  # bytes, that are kept to be sent again; a server takes no larger message by default
_SCHEME = re.compile(r"dns:///|dns:|ipv4:|ipv6:")
MOST_ATTEMPTS = 5  # that gRPC makes, whatever is asked for


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a server, and the client's credentials."""

    address: str  # HOST:PORT, or as gRPC names targets; `dns:///NAME:PORT` for all addresses of a name
    token: Token | None  # a function is called for each call
    ca: Path | str | None  # PEM, the authority to trust
    cert: Path | str | None  # PEM, our certificate
    key: Path | str | None  # PEM, its private key
    tls: bool  # with the system's authorities, where `ca` is not given
    insecure: bool  # a token may go unencrypted to another machine
    attempts: int

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if not 1 <= self.attempts <= MOST_ATTEMPTS:
            raise ValueError(f"attempts is 1 to {MOST_ATTEMPTS}")
        if self.token is not None and not (self.encrypted or self.local or self.insecure):
            raise ValueError("a token would travel unencrypted: give tls=True or ca=…, or say insecure=True")

    @property
    def encrypted(self) -> bool:
        return self.tls or self.ca is not None or self.cert is not None

    @property
    def local(self) -> bool:
        """Whether the address is certainly this machine."""
        host = _SCHEME.sub("", self.address, count=1).rpartition(":")[0].strip("[]")
        if host == "localhost" or self.address.startswith("unix:"):
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns None for plaintext. Raises OSError where a file cannot be read."""
        if not self.encrypted:
            return None
        ca, key, cert = (None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        token = self.token() if callable(self.token) else self.token
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def options(self, further: Sequence[ChannelOption]) -> list[ChannelOption]:
        """Returns the channel's options; where one is given twice, the later counts."""
        return [
            ("grpc.service_config", json.dumps(service_config(self.attempts))),
            ("grpc.max_receive_message_length", _LONGEST_ANSWER),
            ("grpc.per_rpc_retry_buffer_size", _LARGEST_PROMPT),
            # Notices a server whose machine went away, also while no token comes. A server takes a ping every 10 s.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_reconnect_backoff_ms", 5_000),
            ("grpc.enable_http_proxy", 0 if self.local else 1),
            *further,
        ]


def service_config(attempts: int) -> dict[str, object]:
    """Retries UNAVAILABLE after the server's hint, or else with backoff. gRPC does so only until the first message of
    an answer arrives: no token ever comes twice."""
    methods: dict[str, object] = {
        "name": [{"service": "whippet.v1.GenerationService"}, {"service": "whippet.v1.ModelService"}]
    }
    if attempts > 1:
        methods["retryPolicy"] = {
            "maxAttempts": attempts,
            "initialBackoff": "0.2s",
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
    return {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [methods]}
