"""Loads the server's certificate and the authority of its callers, and reads them again when their files change.
Existing connections keep what they began with."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from service.config.settings import BadSettings, TlsOptions
from service.transport.call.http2 import Identification, credentials
from service.transport.port.files import FileWatch, NoFile, read_file

_MAX_BYTES = 1 << 20
_CURVES = ("secp256r1", "secp384r1", "secp521r1")  # that gRPC speaks
_SOON = 7 * 86_400.0  # seconds before a certificate expires, from which on a line says so
_SHARE = 0.25  # of its life
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    key: bytes  # PEM
    chain: bytes  # PEM, our own certificate first
    client_ca: bytes | None  # PEM
    begins: float  # Unix time in seconds; the latest of the chain
    expires: float  # the earliest of the chain
    ca_expires: float | None  # the earliest of the callers' authorities

    def valid(self, now: float) -> bool:
        return self.begins <= now < self.expires

    def expires_soon(self, now: float) -> bool:
        """Within a week, or in the last quarter of a shorter life."""
        return self.expires - now < min(_SOON, _SHARE * (self.expires - self.begins))

    @property
    def identification(self) -> Identification:
        return Identification(self.key, self.chain, self.client_ca)


class Certificates:
    """Replaces the pair in force as a whole, and not by one that does not fit together, cannot be read, or is not valid
    while the old one is."""

    def __init__(self, tls: TlsOptions, clock: Callable[[], float] = time.time) -> None:
        """Raises BadSettings. An expired pair is served and logged: callers check it themselves."""
        self._tls = tls
        self._clock = clock
        self._subscribers: list[Callable[[], object]] = []
        self._context: tuple[Identification, ssl.SSLContext] | None = None
        paths = [path for path in (tls.cert, tls.key, tls.client_ca) if path is not None]
        self._watch = FileWatch("certificates", paths, self._read_again, self._remind)
        self._pair = read_pair(tls)
        self._watch.start()

    @property
    def expiries(self) -> Mapping[str, float]:
        """Unix time in seconds of each file's first certificate."""
        pair = self._pair
        return {"cert": pair.expires} | ({} if pair.ca_expires is None else {"client-ca": pair.ca_expires})

    def current(self) -> Identification:
        return self._pair.identification

    def subscribe(self, on_news: Callable[[], object]) -> None:
        """Calls `on_news` in any thread when `current` has changed."""
        self._subscribers.append(on_news)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of one port, which check for changes at every new connection."""
        return credentials(self.current)

    def context(self) -> ssl.SSLContext:
        """For a new connection of a port that is not gRPC's."""
        identification = self.current()
        if self._context is None or self._context[0] != identification:
            self._context = identification, _context(identification)
        return self._context[1]

    @property
    def failures(self) -> int:
        return self._watch.failures

    def reload(self) -> None:
        self._watch.ask()

    def _read_again(self) -> None:
        pair, now = read_pair(self._tls), self._clock()
        if self._pair.valid(now) and not pair.valid(now):
            raise BadSettings(f"tls.cert: {self._tls.cert} is valid from {_date(pair.begins)} to {_date(pair.expires)}")
        self._pair = pair
        for on_news in self._subscribers:
            on_news()
        _log.info("certificates read again: valid until %s", _date(pair.expires))

    def _remind(self) -> None:
        now, pair = self._clock(), self._pair
        if not pair.valid(now):
            _log.error("tls.cert is valid from %s to %s, not now", _date(pair.begins), _date(pair.expires))
        elif pair.expires_soon(now):
            _log.warning("tls.cert expires at %s", _date(pair.expires))


def _context(identification: Identification) -> ssl.SSLContext:
    """Writes the pair to memory files, since Python reads certificates and keys from files alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pem = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(pem, identification.key + b"\n" + identification.chain)
        context.load_cert_chain(f"/proc/self/fd/{pem}")
    finally:
        os.close(pem)
    if identification.client_ca is not None:
        context.load_verify_locations(cadata=identification.client_ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def read_pair(tls: TlsOptions) -> Pair:
    """Checks the pair, since gRPC accepts any and then cannot be reached. Raises BadSettings."""
    assert tls.cert is not None
    assert tls.key is not None
    chain = _pem(tls.cert, "tls.cert")
    certificates = _certificates(chain, f"tls.cert: {tls.cert}")
    key = _pem(tls.key, "tls.key")
    _check_key(key, certificates[0], f"tls.key: {tls.key}")
    client_ca, authorities = None, []
    if tls.client_ca is not None:
        client_ca = _pem(tls.client_ca, "tls.client-ca")
        authorities = _certificates(client_ca, f"tls.client-ca: {tls.client_ca}")
    return Pair(
        key,
        chain,
        client_ca,
        begins=max(one.not_valid_before_utc.timestamp() for one in certificates),
        expires=min(one.not_valid_after_utc.timestamp() for one in certificates),
        ca_expires=min((one.not_valid_after_utc.timestamp() for one in authorities), default=None),
    )


def _certificates(pem: bytes, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise BadSettings(f"{where} holds no certificate that can be read") from None


def _check_key(pem: bytes, certificate: x509.Certificate, where: str) -> None:
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it wants a password
        raise BadSettings(f"{where} holds no key that can be read without a password") from None
    if not isinstance(key, rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) or (
        isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name not in _CURVES
    ):
        raise BadSettings(f"{where} is neither an RSA nor an Ed25519 key, nor one of the curves P-256, P-384 and P-521")
    try:
        fits = key.public_key() == certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        fits = False
    if not fits:
        raise BadSettings(f"{where} is not the key of tls.cert")


def _pem(path: Path, name: str) -> bytes:
    try:
        data = read_file(path, _MAX_BYTES)
    except NoFile as error:
        raise BadSettings(f"{name}: {path} {error}") from None
    except OSError as error:
        raise BadSettings(f"{name}: {path} cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise BadSettings(f"{name}: {path} is not PEM")
    return data


def _date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()
