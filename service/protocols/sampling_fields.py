"""Reads and bounds the generation options that all protocols share, under the protocol's own names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.api import SamplingParams
from service.core.errors import InvalidRequest, Violation
from service.core.model import GREEDY_BELOW
from service.core.request import ConstraintText, ModelFacts, Stops, TokenPrompt
from service.core.validation import Violations, too_long

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CONSTRAINT = 256 * 2**10  # bytes
MAX_OPTIONS = 1024  # of a choice
MAX_ANSWERS = 16  # of one prompt; each takes an admission slot
_LEAST_PENALTY = 0.009999999776482582  # 0.01 as a float; dividing logits by less overflows them
_SEEDS = 1 << 64
_MOST_TOP_K = (1 << 31) - 1
_BOUNDS = (  # options of sampling: lowest, highest, and whether it must lie above the lowest
    ("temperature", 0, 100, False),
    ("top_k", 0, _MOST_TOP_K, False),
    ("top_p", 0, 1, True),
    ("min_p", 0, 1, False),
    ("repetition_penalty", _LEAST_PENALTY, 100, False),
    ("presence_penalty", -2, 2, False),
    ("frequency_penalty", -2, 2, False),
)
_REQUEST_ID = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """None: the model's default; for the seed, a fresh one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)


class StopFields(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int | None = None  # None: as many as the context leaves
    fitted: bool = False  # as in Stops
    min_tokens: int = 0
    strings: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include: bool = False


def read_sampling(fields: SamplingFields | None, facts: ModelFacts, found: Violations, prefix: str) -> SamplingParams:
    """`prefix` is put before the names of fields."""
    seed = secrets.randbits(63) if fields is None or fields.seed is None else fields.seed % _SEEDS
    if fields is None:
        return replace(facts.defaults, seed=seed)
    resolved: dict[str, Any] = {}
    for name, low, high, above in _BOUNDS:
        value = getattr(fields, name)
        if value is not None:
            resolved[name] = value
            found.number(prefix + name, value, low, high, above=above)
    if fields.temperature is not None and fields.temperature < GREEDY_BELOW:
        resolved["temperature"] = 0.0
    if fields.logit_bias:
        resolved["logit_bias"] = _logit_bias(fields.logit_bias, facts, found, f"{prefix}logit_bias")
    return replace(facts.defaults, seed=seed, **resolved)


def _logit_bias(
    given: Mapping[int, float], facts: ModelFacts, found: Violations, field: str
) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_LOGIT_BIAS:
        found.add(field, f"must have at most {MAX_LOGIT_BIAS} entries")
        return ()
    bias = sorted(given.items())
    for token_id, value in bias:
        if not 0 <= token_id < facts.vocab_size:
            found.add(f"{field}[{token_id}]", f"must name a token id from 0 to {facts.vocab_size - 1}")
        found.number(f"{field}[{token_id}]", value, -100, 100)
    return tuple(bias)


def read_stops(
    fields: StopFields,
    facts: ModelFacts,
    found: Violations,
    prefix: str,
    strings: str = "stop",
    *,
    scored: bool = False,
) -> Stops:
    """`strings` is the protocol's name of the field. `scored`: the prompt's log-probabilities are wanted, so that an
    answer of no tokens makes sense."""
    if fields.max_tokens is not None:
        found.number(f"{prefix}max_tokens", fields.max_tokens, 0 if scored else 1, None)
    found.number(f"{prefix}min_tokens", fields.min_tokens, 0, None)
    if fields.max_tokens is not None and (0 if scored else 1) <= fields.max_tokens < fields.min_tokens:
        found.add(f"{prefix}min_tokens", "must be at most max_tokens")
    _check_stop_strings(fields.strings, found, prefix + strings)
    own = () if fields.ignore_eos else facts.eos_token_ids
    token_ids: tuple[int, ...] = ()
    if len(fields.token_ids) > MAX_STOP_TOKENS:
        found.add(f"{prefix}stop_token_ids", f"must be at most {MAX_STOP_TOKENS}")
    elif found.token_ids(f"{prefix}stop_token_ids", fields.token_ids, facts.vocab_size):
        token_ids = tuple(dict.fromkeys((*fields.token_ids, *own)))
    return Stops(
        max_tokens=fields.max_tokens,
        min_tokens=fields.min_tokens,
        fitted=fields.fitted,
        strings=tuple(dict.fromkeys(fields.strings)) if len(fields.strings) <= MAX_STOP_STRINGS else (),
        token_ids=token_ids,
        include=fields.include,
    )


def _check_stop_strings(strings: Sequence[str], found: Violations, field: str) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        found.add(field, f"must be at most {MAX_STOP_STRINGS}")
        return
    for index, string in enumerate(strings):
        if len(string) > MAX_STOP_BYTES or not 1 <= len(string.encode()) <= MAX_STOP_BYTES:
            found.add(f"{field}[{index}]", f"must have 1 to {MAX_STOP_BYTES} bytes")


def read_token_ids(ids: Sequence[int], facts: ModelFacts, found: Violations, field: str) -> TokenPrompt:
    if not ids:
        found.add(field, "must not be empty")
    elif len(ids) >= facts.max_context:
        found.add(field, too_long(len(ids), facts.max_context))
    elif found.token_ids(field, given := tuple(ids[:]), facts.vocab_size):  # a slice of protobuf's is a list: quick
        return TokenPrompt(given)
    return TokenPrompt(())


def read_constraint(kind: str, texts: Sequence[str], found: Violations, field: str) -> ConstraintText:
    """Checks sizes only; whether the constraint can be used is found after admission."""
    if kind == "choice" and (not 1 <= len(texts) <= MAX_OPTIONS or not all(texts)):
        found.add(field, f"must be 1 to {MAX_OPTIONS} texts, none of them empty")
    if sum(map(len, texts)) > MAX_CONSTRAINT or sum(len(text.encode()) for text in texts) > MAX_CONSTRAINT:
        found.add(field, f"is larger than {MAX_CONSTRAINT} bytes")
        texts = ()
    return ConstraintText(kind, tuple(texts), field)


def read_logprobs(given: int | None, found: Violations, field: str) -> int | None:
    if given is not None:
        found.number(field, given, 0, MAX_LOGPROBS)
    return given


def read_answers(given: int, max_tokens: int | None, found: Violations, field: str) -> int:
    found.number(field, given, 1, MAX_ANSWERS)
    if given > 1 and max_tokens == 0:
        found.add(field, "must be 1 where max_tokens is 0")
    return given


def read_request_id(given: str, found: Violations, field: str = "request_id") -> str:
    if not given:
        return secrets.token_hex(12)
    if not _REQUEST_ID.fullmatch(given):
        found.add(field, "must be at most 128 bytes of printable ASCII, without a space at either end")
    return given


@contextmanager
def fields_called(names: Mapping[str, str]) -> Iterator[None]:
    """Renames whippet.v1's fields to the protocol's own `names` in violations raised within."""
    try:
        yield
    except InvalidRequest as error:
        found = tuple(Violation(names.get(one.field, one.field), one.description) for one in error.violations)
        raise InvalidRequest(found) from None
