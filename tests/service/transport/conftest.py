"""Certificates that several files of tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.certificates import HERE, Authority, key_pem, private_key, write_pair


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server's and a client's pair, a client's from another CA, and what is none. Not to be written."""
    folder = tmp_path_factory.mktemp("tls")
    authorities = {name: Authority(name) for name in ("ca", "other")}
    for name, authority in authorities.items():
        (folder / f"{name}.pem").write_bytes(authority.pem)
    server = private_key()
    for name, by, key in (("server", "ca", server), ("client", "ca", None), ("stranger", "other", None)):
        write_pair(folder, name, authorities[by].sign(*HERE, key=key))
    (folder / "locked.key").write_bytes(key_pem(server, b"secret"))
    (folder / "garbled.pem").write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    return folder
