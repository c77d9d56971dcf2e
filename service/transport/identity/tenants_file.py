"""Reads the tenants file: YAML, a mapping of tenants to what they may use.

acme: {tokens-per-minute: 600000, burst: 1200000, requests: 64, priority: normal, metrics: true}
default: {tokens-per-minute: 60000}   # every tenant without an entry, each for itself
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from service.config.settings import BadSettings
from service.core.admission.quotas import Quotas
from service.core.admission.tenants import PRIORITIES, TenantPolicies, TenantPolicy
from service.core.answers.caches import AnswerCaches
from service.transport.identity.token_entries import give_way
from service.transport.port.files import FileWatch, NoFile, read_file

OTHERS = "default"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_TOKENS = 10**12
_MOST_REQUESTS = 10**6
_MAX_BYTES = 4 << 20
_DEPTH = 2  # a mapping of mappings
_log = logging.getLogger(__name__)
_NAMES = ("tokens-per-minute", "burst", "requests", "priority", "metrics")


class TenantsFile:
    """Replaces its policies as a whole when the file changes; an unreadable file leaves them in force."""

    def __init__(self, path: Path, count: Callable[[str], None]) -> None:
        """Raises BadSettings. Later readings are counted as `read` or `invalid`."""
        self._path = path
        self._count = count
        watch = FileWatch("tenants", [path], self._read_again, lambda: None)
        self._policies = read_tenants(path)
        self._watch = watch
        watch.start()

    def policies(self) -> TenantPolicies:
        return self._policies

    def reload(self) -> None:
        self._watch.ask()

    def _read_again(self) -> None:
        outcome = "invalid"
        try:
            self._policies = read_tenants(self._path)
            outcome = "read"
        finally:
            self._count(outcome)
        _log.info("tenants read again: %d entries", len(self._policies.named))


def read_tenants(path: Path) -> TenantPolicies:
    """Raises BadSettings, which names the entry."""
    where = f"auth.tenants-file: {path}"
    try:
        tree = _tree(read_file(path, _MAX_BYTES).decode("utf-8"))
    except NoFile as error:
        raise BadSettings(f"{where} {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"{where} cannot be read: {type(error).__name__}") from None
    except (yaml.YAMLError, ValueError):  # ValueError: a letter that YAML does not allow, if the C reader is missing
        raise BadSettings(f"{where} is not YAML") from None
    if not isinstance(tree, dict):
        raise BadSettings(f"{where} is not a mapping of tenants")
    named: dict[str, TenantPolicy] = {}
    for number, (tenant, entry) in enumerate(tree.items(), start=1):
        if tenant is None or not _TENANT.fullmatch(tenant):
            raise BadSettings(
                f"{where}: entry {number}: a tenant is 1 to 64 letters, digits, dots, hyphens or underscores; "
                "put quotes around what looks like a number or a date"
            )
        named[tenant] = _policy(entry, f"{where}: {tenant}")
    return TenantPolicies(named, named.get(OTHERS, TenantPolicy()))


def _tree(text: str) -> object:
    """Parses mappings, texts, whole numbers and truth values; None for every other value. Goes from event to event,
    since the library's reader would block other threads. Raises YAMLError."""
    events = give_way(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    resolve: Callable[..., str] = yaml.resolver.Resolver().resolve

    def value(event: yaml.Event, depth: int) -> object:
        if isinstance(event, yaml.ScalarEvent):
            tag = event.tag or resolve(yaml.ScalarNode, event.value, event.implicit)
            return _scalar(tag.rpartition(":")[2], event.value)
        if depth == _DEPTH or not isinstance(event, yaml.MappingStartEvent):
            raise yaml.YAMLError("neither lists nor aliases nor deeper levels are read")
        pairs: dict[str | None, object] = {}
        while not isinstance(first := next(events), yaml.MappingEndEvent):
            key = value(first, depth + 1)
            key = key if isinstance(key, str) else None
            if key in pairs:
                raise yaml.YAMLError("a key stands there twice")
            pairs[key] = value(next(events), depth + 1)
        return pairs

    for event in events:
        if not isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent | yaml.StreamEndEvent):
            return value(event, 0)
    return None


def _scalar(tag: str, text: str) -> str | int | bool | None:
    if tag == "str":
        return text
    if tag == "int" and len(text) <= 20 and text.replace("_", "").isdecimal():
        return int(text)
    if tag == "bool":
        return text.lower() in ("true", "yes", "on")
    return None


def _policy(entry: object, where: str) -> TenantPolicy:
    if not isinstance(entry, dict) or not set(entry) <= set(_NAMES):
        raise BadSettings(f"{where} is not a mapping of {', '.join(_NAMES)}")
    tokens, burst = _count(entry, "tokens-per-minute", _MOST_TOKENS, where), _count(entry, "burst", _MOST_TOKENS, where)
    if burst is not None and tokens is None:
        raise BadSettings(f"{where}: burst needs tokens-per-minute")
    priority, metrics = entry.get("priority", "interactive"), entry.get("metrics", False)
    if not isinstance(priority, str) or priority not in PRIORITIES:
        raise BadSettings(f"{where}: priority is none of {', '.join(PRIORITIES)}")
    if not isinstance(metrics, bool):
        raise BadSettings(f"{where}: metrics is neither true nor false")
    return TenantPolicy(
        tokens_per_minute=tokens,
        burst=burst,
        requests=_count(entry, "requests", _MOST_REQUESTS, where),
        priority=PRIORITIES[priority],
        metrics=metrics,
    )


def _count(entry: Mapping[str | None, object], name: str, most: int, where: str) -> int | None:
    if name not in entry:
        return None
    value = entry[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise BadSettings(f"{where}: {name} is not a whole number from 1 to {most}")
    return value


def quotas_of(path: Path | None, caches: AnswerCaches, refusals: Counter[str]) -> Quotas:
    if path is None:
        return Quotas(refusals=refusals)
    file = TenantsFile(path, lambda outcome: caches.counters.count("tenants_file", outcome))
    return Quotas(file, caches.buckets(), refusals=refusals)
