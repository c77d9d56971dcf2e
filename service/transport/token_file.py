"""Bearer tokens against a file of hashes.

The file is YAML, a list of entries:

    - tenant: acme                # letters, digits, . _ -
      sha256: "9f86d081884c7d65…" # of the token, hexadecimal: printf %s "$TOKEN" | sha256sum
      rights: [generate]          # generate, admin

It is read again when it changes. If it has become unreadable, the old entries stay in force.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import yaml

from service.config.settings import BadSettings
from service.core.errors import PermissionDenied, Unauthenticated
from service.transport.auth import Caller, Metadata, Right, bearer

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_TEXT = "tag:yaml.org,2002:str"
_DEPTH = 3  # a list of mappings of lists
_CHECK_INTERVAL = 1.0  # seconds between checks of the file's modification time
_MAX_BYTES = 4 << 20  # some 30,000 entries
_log = logging.getLogger(__name__)


class TokenFile:
    """The tokens of one file, in a table that is replaced as a whole. A thread reads the file again, so that no caller
    waits for that or meets what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._callers = read_tokens(path)
        self._asked = threading.Event()
        threading.Thread(target=self._follow, name="tokens", daemon=True).start()

    def authorize(self, metadata: Metadata, right: Right) -> Caller:
        """The caller, who has `right`. Raises Unauthenticated or PermissionDenied."""
        # What is looked up is a digest, so that how long it takes says nothing of any token.
        caller = self._callers.get(hashlib.sha256(bearer(metadata)).digest())
        if caller is None:
            raise Unauthenticated("the token is not known")
        if right not in caller.rights:
            raise PermissionDenied(f"the token lacks the right to {right}")
        return caller

    def tenants(self) -> frozenset[str]:
        """All that have a token."""
        return frozenset(caller.tenant for caller in self._callers.values())

    def reload(self) -> None:
        """Soon, whether or not it looks changed."""
        self._asked.set()

    def _follow(self) -> None:
        while True:
            asked = self._asked.wait(_CHECK_INTERVAL)
            self._asked.clear()
            stamp = _stamp(self._path)
            if asked or stamp != self._stamp:
                self._stamp = stamp
                self._read_again()

    def _read_again(self) -> None:
        try:
            self._callers = read_tokens(self._path)
            _log.info("tokens read again: %d entries", len(self._callers))
        except BadSettings as error:
            _log.error("the old tokens stay in force: %s", error)


def read_tokens(path: Path) -> dict[bytes, Caller]:
    """Digest of a token → whom it stands for. Raises BadSettings, which names the entry and never contains a hash."""
    where = f"auth.tokens-file: {path}"
    try:
        entries = _tree(_text(path, where))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"{where} cannot be read: {type(error).__name__}") from None
    except (yaml.YAMLError, ValueError):  # ValueError: a letter that YAML does not allow, if the C reader is missing
        raise BadSettings(f"{where} is not YAML") from None
    if not isinstance(entries, list):
        raise BadSettings(f"{where} is not a list of entries")
    return dict(_entry(entry, f"{where}: entry {number}") for number, entry in enumerate(entries, start=1))


def _text(path: Path, where: str) -> str:
    """Raises BadSettings, OSError, UnicodeDecodeError. Does not wait for a writer, as a FIFO would."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BadSettings(f"{where} is no file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise BadSettings(f"{where} is larger than {_MAX_BYTES >> 20} MiB")
    return data.decode("utf-8")


def _tree(text: str) -> object:
    """The first document: its lists, mappings and texts; None for every other value, such as a number or a date.

    Goes from event to event, so that other threads run in between; the library's own reader would keep them from it for
    as long as the file is. Raises YAMLError.
    """
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    resolve: Callable[..., str] = yaml.resolver.Resolver().resolve

    def until(end: type[yaml.Event], depth: int) -> list[object]:
        items = []
        while not isinstance(event := next(events), end):
            items.append(value(event, depth))
        return items

    def value(event: yaml.Event, depth: int) -> object:
        if isinstance(event, yaml.ScalarEvent):
            tag = event.tag or resolve(yaml.ScalarNode, event.value, event.implicit)
            return event.value if tag == _TEXT else None
        if depth == _DEPTH or isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("neither aliases nor deeper levels are read")
        if isinstance(event, yaml.SequenceStartEvent):
            return until(yaml.SequenceEndEvent, depth + 1)
        items = until(yaml.MappingEndEvent, depth + 1)
        return {key if isinstance(key, str) else None: item for key, item in zip(items[::2], items[1::2], strict=True)}

    for event in events:
        if not isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent | yaml.StreamEndEvent):
            return value(event, 0)
    return None


def _entry(entry: object, where: str) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict) or set(entry) != {"tenant", "sha256", "rights"}:
        raise BadSettings(f"{where} does not have exactly tenant, sha256 and rights")
    tenant, digest, rights = entry["tenant"], entry["sha256"], entry["rights"]
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise BadSettings(
            f"{where}: tenant is not a text of 1 to 64 letters, digits, dots, hyphens or underscores; "
            "put quotes around what looks like a number or a date"
        )
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise BadSettings(f"{where}: sha256 is not a string of 64 hexadecimal digits")
    known = [right.value for right in Right]
    if not isinstance(rights, list) or not rights or not all(right in known for right in rights):
        raise BadSettings(f"{where}: rights are not a list of {', '.join(known)}")
    token = bytes.fromhex(digest)
    name = hashlib.sha256(b"caller" + token).hexdigest()[:16]
    return token, Caller(tenant, frozenset(Right(right) for right in rights), name)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
