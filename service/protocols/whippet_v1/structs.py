"""Converts google.protobuf.Struct to JSON values: whole numbers without a point, keys in a fixed order, since templates
print tools, and a Struct's map has another order in every process."""

from __future__ import annotations

import math
from collections.abc import Iterable

from google.protobuf.struct_pb2 import ListValue, Struct, Value

MAX_VALUES = 8192  # of one request; three microseconds each
MAX_DEPTH = 30  # protobuf itself takes 100 messages in each other, three of which make a level
_WHOLE = 2.0**53  # beyond it, a double does not say which whole number was meant
_FIRST = (
    *("type", "function", "name", "description", "enum", "parameters", "properties", "items", "required"),
    *("additionalProperties", "strict"),
)
_RANK = {key: rank for rank, key in enumerate(_FIRST)}
_LAST = len(_FIRST)

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class StructTooLarge(Exception):
    """The text is safe to send to the caller."""


class StructReader:
    """Reads the Structs of one request, which share the bound on values."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def read(self, struct: Struct) -> dict[str, Json]:
        return self._object(struct, MAX_DEPTH, False)

    def _object(self, struct: Struct, depth: int, properties: bool) -> dict[str, Json]:
        """`properties`: its keys are names of a schema's properties, not keywords."""
        fields = struct.fields
        self._take(len(fields), depth)
        keys = sorted(fields) if properties else sorted(fields, key=lambda key: (_RANK.get(key, _LAST), key))
        made = {key: self._value(fields[key], depth - 1, key == "properties" and not properties) for key in keys}
        members, required = made.get("properties"), made.get("required")
        if isinstance(members, dict) and isinstance(required, list):
            made["properties"] = _in_order(members, required)
        return made

    def _list(self, values: ListValue, depth: int) -> list[Json]:
        self._take(len(values.values), depth)
        return [self._value(value, depth - 1, False) for value in values.values]

    def _value(self, value: Value, depth: int, properties: bool) -> Json:
        match value.WhichOneof("kind"):
            case "string_value":
                return value.string_value
            case "number_value":
                return _number(value.number_value)
            case "bool_value":
                return value.bool_value
            case "struct_value":
                return self._object(value.struct_value, depth, properties)
            case "list_value":
                return self._list(value.list_value, depth)
            case _:
                return None

    def _take(self, count: int, depth: int) -> None:
        self._left -= count
        if self._left < 0:
            raise StructTooLarge(f"must have at most {MAX_VALUES} values; larger tools can be sent as tools_json")
        if depth <= 0 and count:
            raise StructTooLarge(f"must be at most {MAX_DEPTH} levels deep")


def _number(value: float) -> int | float:
    if not math.isfinite(value):
        raise StructTooLarge("must have no number that JSON does not have")
    return int(value) if value.is_integer() and abs(value) <= _WHOLE else value


def _in_order(members: dict[str, Json], required: Iterable[Json]) -> dict[str, Json]:
    first = {key: members[key] for key in required if isinstance(key, str) and key in members}
    return first | members
