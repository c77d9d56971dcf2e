"""Who gets in, as the settings say: tokens, client certificates, or everybody."""

from __future__ import annotations

import ipaddress
import socket

from service.config.settings import BadSettings, Settings
from service.transport.auth import ALL_RIGHTS, CALLER_RIGHTS, NoTokens
from service.transport.rpc import Guard
from service.transport.token_file import TokenFile


def guard_of(settings: Settings) -> Guard:
    """Raises BadSettings. Without a tokens file a client certificate says that somebody is known, but not who: such
    callers may not change what others are served with."""
    if settings.auth.tokens_file is not None:
        return TokenFile(settings.auth.tokens_file)
    return NoTokens(ALL_RIGHTS if settings.tls.client_ca is None else CALLER_RIGHTS)


def refuse_strangers(settings: Settings) -> None:
    """Raises BadSettings where others than this machine's own programs could call without saying who they are, and
    nobody has said that they may."""
    if settings.insecure or settings.auth.tokens_file is not None or settings.tls.client_ca is not None:
        return
    for name, address in (("listen", settings.listen), ("admin-listen", settings.admin_listen)):
        if not _loopback(address):
            raise BadSettings(
                f"{name}: anybody who reaches {address} could call: give callers tokens (--auth.tokens-file) or "
                "certificates (--tls.client-ca), or allow it with --insecure"
            )


def _loopback(address: str) -> bool:
    """Whether only this machine reaches it. What cannot be resolved is left to whoever listens there."""
    try:
        found = socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)
