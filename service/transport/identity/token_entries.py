"""Reads the entries of a tokens file.

The file is YAML, a list of them:

    - tenant: acme                      # letters, digits, . _ -
      sha256: "9f86d081884c7d65…"       # of the token, hexadecimal: printf %s "$TOKEN" | sha256sum
      rights: [generate]                # view, generate, admin
      expires: 2027-01-01T00:00:00Z     # may be left out
    - tenant: acme
      san: "URI:spiffe://acme/batch"    # instead of sha256: a name of the client's certificate; URI:, DNS: or email:
      rights: [generate]
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import yaml

from service.config.settings import BadSettings
from service.transport.call.auth import Caller, Right, Rights, alternative_name
from service.transport.port.files import NoFile, read_file

T = TypeVar("T")

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"(URI|DNS|email):([!-~]{1,2048})")
_TEXT = "tag:yaml.org,2002:str"
_TIME = "tag:yaml.org,2002:timestamp"
_DEPTH = 3  # a list of mappings of lists
_MAX_BYTES = 4 << 20  # some 30,000 entries
_BURST = 0.0005  # seconds of reading, after which everybody else has a turn
_PAUSE = 0.0005  # seconds


@dataclass(frozen=True, slots=True)
class TokenEntry:
    caller: Caller
    expires: float | None  # Unix time in seconds
    digest: bytes  # SHA-256 of the token, or of the certificate's name
    number: int  # of the entry in its file, from 1


@dataclass(frozen=True, slots=True)
class Entries:
    tokens: Mapping[bytes, TokenEntry] = field(default_factory=dict)  # by digest
    names: Mapping[str, TokenEntry] = field(default_factory=dict)  # by alternative name

    def __iter__(self) -> Iterator[TokenEntry]:
        yield from self.tokens.values()
        yield from self.names.values()

    def __len__(self) -> int:
        return len(self.tokens) + len(self.names)


def read_entries(path: Path) -> Entries:
    """Gives way to other threads meanwhile. Raises BadSettings, which names the entry and never contains a hash."""
    where = f"auth.tokens-file: {path}"
    tokens: dict[bytes, TokenEntry] = {}
    names: dict[str, TokenEntry] = {}
    try:
        text = read_file(path, _MAX_BYTES).decode("utf-8")
        for number, item in enumerate(give_way(_items(text)), start=1):
            read = _EntryReader(f"{where}: entry {number}", number)
            name, entry = read.entry(item)
            known = tokens.setdefault(entry.digest, entry) if name is None else names.setdefault(name, entry)
            if known is not entry:
                raise BadSettings(f"{read.where} has the same {'sha256' if name is None else 'san'} as {known.number}")
    except NoFile as error:
        raise BadSettings(f"{where} {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"{where} cannot be read: {type(error).__name__}") from None
    except _NoList:
        raise BadSettings(f"{where} is not a list of entries") from None
    except (yaml.YAMLError, ValueError):  # ValueError: a letter that YAML does not allow, if the C reader is missing
        raise BadSettings(f"{where} is not YAML") from None
    return Entries(tokens, names)


def give_way(items: Iterator[T]) -> Iterator[T]:
    """Pauses between items: a computing thread otherwise makes others wait 5 ms for each turn."""
    since = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - since > _BURST:
            time.sleep(_PAUSE)
            since = time.monotonic()


class _NoList(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Time:
    """A time as written; YAML's own reader would lose a missing zone."""

    text: str


def _items(text: str) -> Iterator[object]:
    """Yields lists, mappings, texts and times; None for every other value. Goes from event to event, since the
    library's reader would block other threads. Raises YAMLError or _NoList."""
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    resolve: Callable[..., str] = yaml.resolver.Resolver().resolve

    def value(event: yaml.Event, depth: int) -> object:
        if isinstance(event, yaml.ScalarEvent):
            tag = event.tag or resolve(yaml.ScalarNode, event.value, event.implicit)
            return event.value if tag == _TEXT else _Time(event.value) if tag == _TIME else None
        if depth == _DEPTH or isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("neither aliases nor deeper levels are read")
        if isinstance(event, yaml.SequenceStartEvent):
            return list(until(yaml.SequenceEndEvent, depth + 1))
        items = list(until(yaml.MappingEndEvent, depth + 1))
        pairs = {key if isinstance(key, str) else None: item for key, item in zip(items[::2], items[1::2], strict=True)}
        if 2 * len(pairs) != len(items):
            raise yaml.YAMLError("a key stands there twice")
        return pairs

    def until(end: type[yaml.Event], depth: int) -> Iterator[object]:
        while not isinstance(event := next(events), end):
            yield value(event, depth)

    first = next(event for event in events if not isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent))
    if not isinstance(first, yaml.SequenceStartEvent):
        value(first, 0) if not isinstance(first, yaml.StreamEndEvent) else None  # or it is no YAML at all
        raise _NoList
    yield from until(yaml.SequenceEndEvent, 1)
    if not all(isinstance(event, yaml.DocumentEndEvent | yaml.StreamEndEvent) for event in events):
        raise yaml.YAMLError("there is a second document")


_KNOWN = {right.value: right for right in Right}


class _EntryReader:
    def __init__(self, where: str, number: int) -> None:
        self.where = where
        self._number = number

    def entry(self, item: object) -> tuple[str | None, TokenEntry]:
        """The name is the certificate's; None where the entry has a hash."""
        if not isinstance(item, dict) or set(item) - {"expires"} not in (
            {"tenant", "rights", "sha256"},
            {"tenant", "rights", "san"},
        ):
            raise self._bad(" does not have exactly tenant, rights, one of sha256 and san, and perhaps expires")
        tenant = item["tenant"]
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise self._bad(
                ": tenant is not a text of 1 to 64 letters, digits, dots, hyphens or underscores; "
                "put quotes around what looks like a number or a date"
            )
        name = self._name(item["san"]) if "san" in item else None
        digest = self._digest(item["sha256"]) if name is None else hashlib.sha256(name.encode()).digest()
        caller = Caller(tenant, self._rights(item["rights"]), hashlib.sha256(b"caller" + digest).hexdigest()[:16])
        expires = self._time(item["expires"]) if "expires" in item else None
        return name, TokenEntry(caller, expires, digest, self._number)

    def _digest(self, value: object) -> bytes:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self._bad(": sha256 is not a string of 64 hexadecimal digits")
        return bytes.fromhex(value)

    def _name(self, value: object) -> str:
        found = _NAME.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise self._bad(": san is not a text such as URI:spiffe://…, DNS:… or email:…")
        return alternative_name(found[1], found[2])

    def _rights(self, value: object) -> Rights:
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one in _KNOWN for one in value):
            raise self._bad(f": rights are not a list of {', '.join(_KNOWN)}")
        return frozenset(_KNOWN[one] for one in value)

    def _time(self, value: object) -> float:
        text = value.text if isinstance(value, _Time) else value
        try:
            moment = datetime.fromisoformat(text if isinstance(text, str) else "")
            if moment.tzinfo is not None:
                return moment.astimezone(UTC).timestamp()
        except (ValueError, OverflowError):
            pass
        raise self._bad(": expires is not a time with its zone, such as 2027-01-01T00:00:00Z")

    def _bad(self, problem: str) -> BadSettings:
        return BadSettings(self.where + problem)
