"""JSON schemas as callers send them, made from a seed: of the kinds that collections of real schemas are full of.

Each is sound by itself and bounded, so that an answer to it ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "city", "age", "tags", "kind", "size", "notes", "email", "price", "parent", "created_at", "a b")
_WORDS = ("red", "green", "blue", "small", "large", "on", "off", "a/b", 'quo"te', "café", "", "N/A", "x y", "\\")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^[a-z]+(-[a-z]+){0,2}$", "^v[0-9]+\\.[0-9]+$", "^(yes|no|maybe)$", "^.{3,5}$")


class Schemas:
    """Makes them. The same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._leaves: tuple[Callable[[], Schema], ...] = (
            self._string,
            self._pattern,
            self._format,
            self._integer,
            self._number,
            self._enum,
            self._const,
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
        )

    def schema(self) -> Schema:
        """An object at the top, as nearly all are."""
        if self._random.random() < 0.06:
            return self._recursive()
        if self._random.random() < 0.2:
            return self._referring()
        return self._object(self._random.randint(1, 3))

    def _any(self, depth: int) -> Schema:
        if depth <= 0:
            return self._random.choice(self._leaves)()
        return self._random.choice((self._object, self._array, self._union, lambda _: self._any(0)))(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        if self._random.random() < 0.2:
            parts = [self._any(depth - 1) for _ in range(self._random.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + 2}

    def _union(self, depth: int) -> Schema:
        if self._random.random() < 0.3:
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 99}
        return {"anyOf": [self._any(depth - 1), self._any(0), {"type": "null"}]}

    def _string(self) -> Schema:
        least = self._random.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 12)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._random.choice(_PATTERNS), "maxLength": 24}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._random.choice(_FORMATS)}

    def _integer(self) -> Schema:
        least = self._random.randint(-50, 50)
        bounds = {"minimum": least, "maximum": least + self._random.randint(0, 500)}
        if self._random.random() < 0.2:
            return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 12}
        return {"type": "integer", **bounds}

    def _number(self) -> Schema:
        if self._random.random() < 0.3:
            return {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10}
        return {"type": "number", "minimum": 0, "maximum": self._random.choice((1, 100, 1e4))}

    def _enum(self) -> Schema:
        values: list[Any] = self._random.sample(_WORDS, self._random.randint(1, 5))
        return {"enum": values + self._random.choice(([], [None], [1, 2.5], [True]))}

    def _const(self) -> Schema:
        return {"const": self._random.choice(("fixed", 7, None, False, {"v": [1, "x"]}, ["a", "b"]))}

    def _referring(self) -> Schema:
        """Definitions that are used more than once."""
        place = self._random.choice(("$defs", "definitions"))
        return {
            "type": "object",
            "properties": {
                "from": {"$ref": f"#/{place}/point"},
                "to": {"$ref": f"#/{place}/point"},
                "label": self._any(1),
            },
            "required": ["from", "to"],
            "additionalProperties": False,
            place: {"point": self._object(1)},
        }

    def _recursive(self) -> Schema:
        """A list that links to itself."""
        return {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": self._any(0),
                        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            },
        }


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """So many."""
    made = Schemas(seed)
    return [made.schema() for _ in range(count)]
