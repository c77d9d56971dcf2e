"""Certificates for tests: authorities, and what they have signed."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))  # names of a server
_DAY = datetime.timedelta(days=1)


def private_key(curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(curve or ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    hidden: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        hidden = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)


class Authority:
    """Signs certificates, and has one that it signed itself."""

    def __init__(self, name: str) -> None:
        self._key = private_key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self._certificate(self._name, self._key, (), (-1.0, 2.0), authority=True)

    def sign(
        self,
        *names: x509.GeneralName,
        key: ec.EllipticCurvePrivateKey | None = None,
        days: tuple[float, float] = (-1.0, 2.0),
    ) -> tuple[bytes, bytes]:
        """Key and certificate as PEM, for these alternative names, valid between these days from now."""
        key = key or private_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
        return key_pem(key), self._certificate(subject, key, names, days)

    def _certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: tuple[x509.GeneralName, ...],
        days: tuple[float, float],
        authority: bool = False,
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * _DAY)
            .not_valid_after(now + days[1] * _DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


def write_pair(folder: Path, name: str, pair: tuple[bytes, bytes]) -> None:
    """As NAME.key and NAME.pem, each put in place of what was there."""
    for suffix, pem in zip(("key", "pem"), pair, strict=True):
        (folder / f"{name}.new").write_bytes(pem)
        (folder / f"{name}.new").replace(folder / f"{name}.{suffix}")
