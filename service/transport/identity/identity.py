"""Admits callers as the settings require: by tokens, by client certificates, or all."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterator, Mapping

import grpc

from service.config.settings import BadSettings, Settings
from service.transport.call.auth import ALL_RIGHTS, CALLER_RIGHTS, NoTokens
from service.transport.call.rpc import Guard
from service.transport.identity.token_file import TokenFile
from service.transport.port.tls import Certificates

_log = logging.getLogger(__name__)


class Identity:
    """Both tokens and certificates are read again when their files change."""

    def __init__(self, settings: Settings) -> None:
        self._certificates = None if settings.tls.cert is None else Certificates(settings.tls)
        self._tokens = None if settings.auth.tokens_file is None else TokenFile(settings.auth.tokens_file)
        _tell_exposure(settings)
        # A client certificate without a tokens file proves that the caller is known, but not who: such callers may not
        # change what others are served with.
        self._everybody = NoTokens(ALL_RIGHTS if settings.tls.client_ca is None else CALLER_RIGHTS)

    @property
    def guard(self) -> Guard:
        return self._everybody if self._tokens is None else self._tokens

    def credentials(self) -> grpc.ServerCredentials | None:
        """None where the port is plaintext."""
        return None if self._certificates is None else self._certificates.credentials()

    @property
    def certificates(self) -> Certificates | None:
        return self._certificates

    def reload(self) -> None:
        if self._tokens is None:
            _log.info("there is no tokens file to be read again")
        for one in (self._tokens, self._certificates):
            if one is not None:
                one.reload()

    @property
    def expiries(self) -> Mapping[str, float]:
        """Unix time in seconds of our certificate's end and our callers' authority's."""
        return {} if self._certificates is None else self._certificates.expiries

    @property
    def failures(self) -> Mapping[str, int]:
        files = {"tokens": self._tokens, "certificates": self._certificates}
        return {name: one.failures for name, one in files.items() if one is not None}


def refuse_strangers(settings: Settings) -> None:
    """Raises BadSettings where other machines could call without identifying themselves and no setting permits that."""
    if settings.insecure or not _strangers(settings):
        return
    for name, address in _open_ports(settings):
        raise BadSettings(
            f"{name}: anybody who reaches {address} could call: give callers tokens (--auth.tokens-file) or "
            "certificates (--tls.client-ca), or allow it with --insecure"
        )


def closed_console(settings: Settings) -> str:
    """Empty where the console is open. --insecure does not open it: the console changes switches, and opening a port
    for scrapers does not imply that."""
    if not _strangers(settings) or _loopback("metrics-listen", settings.metrics_listen):
        return ""
    return (
        "the console is closed: this port is open to others than this machine's programs, and callers need not "
        "identify themselves (auth.tokens-file, tls.client-ca)"
    )


def _strangers(settings: Settings) -> bool:
    return settings.auth.tokens_file is None and settings.tls.client_ca is None


def _open_ports(settings: Settings) -> Iterator[tuple[str, str]]:
    yield from _open_port("listen", settings.listen)
    yield from _open_port("admin-listen", settings.admin_listen)


def _open_port(name: str, address: str) -> Iterator[tuple[str, str]]:
    if not _loopback(name, address):
        yield name, address


def _tell_exposure(settings: Settings) -> None:
    open_ports = [*_open_ports(settings)]
    if settings.console.enabled and settings.metrics_listen and not closed_console(settings):
        open_ports += _open_port("metrics-listen", settings.metrics_listen)
    for name, address in open_ports:
        if _strangers(settings):
            _log.warning("%s: anybody who reaches %s may call (--insecure)", name, address)
        elif settings.tls.cert is None:
            _log.warning("%s: tokens come to %s in plain text: set tls.cert, or end TLS in front of it", name, address)


def _loopback(name: str, address: str) -> bool:
    try:
        found = socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadSettings(f"{name}: the host of {address} cannot be resolved: {error.strerror}") from None
    return all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)
