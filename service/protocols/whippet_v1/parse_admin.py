"""Converts an operator's messages to plain data: every violation found before any is reported."""

from __future__ import annotations

import re

from cache.api import EntryKind
from service.core.answers.flush import Flush
from service.core.operations.profiling import LONGEST
from service.core.request import Origin
from service.core.validation import Violations
from service.pb.whippet.v1 import admin_pb2

_ANSWER_MARGIN = 0.2  # seconds before a deadline in which the answer still arrives
_PROFILE = 10.0  # seconds
_MAX_TENANT = 64  # characters
_ENTRY_ID = re.compile(r"[0-9a-f]{8,128}")
_KINDS = {
    admin_pb2.CACHE_KIND_UNSPECIFIED: (),
    admin_pb2.CACHE_KIND_RESPONSE: (EntryKind.RESPONSE,),
    admin_pb2.CACHE_KIND_SEMANTIC: (EntryKind.SEMANTIC,),
    admin_pb2.CACHE_KIND_PREFIX: (EntryKind.BLOCK,),
}


def read_switch(message: admin_pb2.SetOptimizationRequest) -> tuple[str, bool]:
    found = Violations()
    if not message.name:
        found.add("name", "must not be empty")
    if not message.HasField("enabled"):
        found.add("enabled", "must be set")
    found.raise_any()
    return message.name, message.enabled


def read_drain(message: admin_pb2.DrainRequest, origin: Origin) -> float | None:
    """Seconds to wait; None: forever."""
    if not message.HasField("timeout"):
        return None if origin.deadline is None else max(0.0, origin.deadline - origin.arrived_at - _ANSWER_MARGIN)
    found = Violations()
    within = found.duration("timeout", message.timeout.seconds, message.timeout.nanos, None)
    found.raise_any()
    return within


def read_profile(message: admin_pb2.ProfileRequest) -> float:
    if not message.HasField("duration"):
        return _PROFILE
    found = Violations()
    seconds = found.duration("duration", message.duration.seconds, message.duration.nanos, LONGEST, above=True)
    found.raise_any()
    return seconds


def read_flush(message: admin_pb2.FlushCacheRequest) -> Flush:
    found = Violations()
    if message.kind not in admin_pb2.CacheKind.values():
        found.add("kind", "is no known kind of cache")
    if message.entry_id and not _ENTRY_ID.fullmatch(message.entry_id):
        found.add("entry_id", "is not the id of an entry")
    if len(message.tenant) > _MAX_TENANT:
        found.add("tenant", f"must have at most {_MAX_TENANT} characters")
    if message.kind == admin_pb2.CACHE_KIND_PREFIX and message.entry_id:
        found.add("entry_id", "names an answer: leave it out with this kind")
    found.raise_any()
    return Flush(message.tenant, _KINDS[message.kind], message.entry_id)
