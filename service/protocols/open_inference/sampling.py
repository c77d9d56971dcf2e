"""Reads sampling parameters as Triton's vLLM backend takes them: a JSON object in a tensor, or the request's
parameters. Numbers may be texts."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from service.core.errors import Unimplemented
from service.core.request import ConstraintText
from service.core.validation import Violations
from service.pb.inference import grpc_service_pb2 as pb
from service.protocols.sampling_fields import SamplingFields, StopFields, read_constraint

_MOST_JSON = 65_536  # bytes
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLE = ("top_k", "seed", "max_tokens", "min_tokens")
_CONSTRAINTS = ("structured_outputs", "guided_decoding")
_KINDS = {one: one for one in ("json_object", "regex", "choice", "grammar")} | {"json": "json_schema"}
_KNOWN = {
    *_NUMBERS,
    *_WHOLE,
    *_CONSTRAINTS,
    "ignore_eos",
    "include_stop_str_in_output",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "n",
    "skip_special_tokens",
}


def from_json(data: bytes, found: Violations, field: str) -> Mapping[str, Any]:
    """Empty where the data is no object."""
    value: Any = None
    if len(data) <= _MOST_JSON:
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(data or b"{}")
            json.dumps(parsed, ensure_ascii=False).encode()  # JSON can spell half a character, which no text has
            value = parsed
    if not isinstance(value, dict):
        found.add(field, f"must be a JSON object of at most {_MOST_JSON} bytes")
        return {}
    return value


def from_parameters(parameters: Mapping[str, pb.InferParameter]) -> Mapping[str, Any]:
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], choice) if choice else None for name, choice in chosen.items()}


class Parameters:
    """Reports wrong values to `found` and counts them as not set. Raises Unimplemented for unknown ones."""

    def __init__(self, values: Mapping[str, Any], found: Violations, prefix: str) -> None:
        self._values = values
        self._found = found
        self._prefix = prefix
        for name in values:
            if name not in _KNOWN:
                raise Unimplemented(prefix + name[:64], f"{prefix}{name[:64]}: this server does not serve it")

    @property
    def answers(self) -> int:
        n = self._whole("n")
        return 1 if n is None else n

    @property
    def skip_special(self) -> bool:
        return self._truth("skip_special_tokens", True)

    @property
    def seeded(self) -> bool:
        return self._values.get("seed") is not None

    def sampling(self) -> SamplingFields:
        top_k = self._whole("top_k")
        return SamplingFields(
            top_k=0 if top_k == -1 else top_k,  # as vLLM says that it is off
            seed=self._whole("seed"),
            logit_bias=self._bias(),
            **{name: self._number(name) for name in _NUMBERS},
        )

    def stops(self) -> StopFields:
        stop = self._values.get("stop")
        return StopFields(
            max_tokens=self._whole("max_tokens"),
            fitted=True,
            min_tokens=self._whole("min_tokens") or 0,
            strings=[stop] if isinstance(stop, str) else self._list("stop", str),
            token_ids=self._list("stop_token_ids", int),
            ignore_eos=self._truth("ignore_eos"),
            include=self._truth("include_stop_str_in_output"),
        )

    def constraint(self) -> ConstraintText | None:
        """Reads `structured_outputs` (formerly `guided_decoding`): an object, or its JSON text."""
        name = next((name for name in _CONSTRAINTS if self._values.get(name) is not None), None)
        if name is None:
            return None
        given, field = self._values[name], self._prefix + name
        if isinstance(given, str):
            given = from_json(given.encode(), self._found, field)
        structured = {key: value for key, value in given.items() if value} if isinstance(given, dict) else {}
        kind, value = next(iter(structured.items()), ("", None))
        for other in structured:
            if other not in _KINDS:
                raise Unimplemented(f"{field}.{other[:64]}", f"{field}.{other[:64]}: this server does not serve it")
        if kind == "json":
            value = value if isinstance(value, str) else json.dumps(value)
        texts = [] if kind == "json_object" else value if kind == "choice" else [value]
        if len(structured) != 1 or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            self._found.add(field, "must be an object with one of json, json_object, regex, choice and grammar")
            return None
        return read_constraint(_KINDS[kind], texts, self._found, f"{field}.{kind}")

    def _number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        try:
            return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            return math.nan  # which is nowhere in bounds

    def _whole(self, name: str) -> int | None:
        value = self._number(name)
        if value is None:
            return None
        given = self._values[name]
        if isinstance(given, int) and not isinstance(given, bool):
            return given
        if not value.is_integer():
            self._found.add(self._prefix + name, "must be a whole number")
            return None
        return int(given) if isinstance(given, str) and given.strip().lstrip("-").isdecimal() else int(value)

    def _truth(self, name: str, unset: bool = False) -> bool:
        value = self._values.get(name, unset)
        if value not in (True, False, "true", "false", "True", "False"):
            self._found.add(self._prefix + name, "must be true or false")
        return value in (True, "true", "True")

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
            self._found.add(self._prefix + name, "must be a list")
            return []
        return value

    def _bias(self) -> Mapping[int, float]:
        value = self._values.get("logit_bias")
        try:
            return {} if value is None else {int(token_id): float(bias) for token_id, bias in value.items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            self._found.add(f"{self._prefix}logit_bias", "must be an object of numbers by token ids")
            return {}
