"""Grammars, regexes and schemas that nobody would write: deep, wide, repeated, in all of Unicode, and cut short."""

from __future__ import annotations

import json
import random
from typing import Any

LETTERS = "abcxyz019_- \"'/\\|()[]{}*+?.,:;^$#%&<>~@!=\n\té漢字😀\u202e\u0000\ud7ff\uffff"
_RULES = 'start: {} "{}"\n'


class Strange:
    """Draws constraints from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> dict[str, Any]:
        """Fields of a `Constraint`."""
        kind = self._random.choice(("regex", "grammar", "grammar", "json_schema", "json_schema", "choice"))
        text: Any
        if kind == "choice":
            count = self._random.choice((1, 3, 50, 1024))
            return {"choice": {"options": [self._word(self._random.randint(1, 40)) for _ in range(count)]}}
        text = {"regex": self.regex, "grammar": self.grammar, "json_schema": self.schema}[kind]()
        return {kind: self._spoiled(text)[:262_000]}

    def regex(self) -> str:
        chance = self._random
        match chance.randrange(6):
            case 0:
                depth = chance.choice((5, 60, 99, 101, 300, 3000))
                return "(" * depth + "a" + self._count() + (")" + self._count()) * depth
            case 1:
                return "".join(
                    f"({self._word(2)}{self._count()}){self._count()}" for _ in range(chance.choice((2, 30, 900)))
                )
            case 2:
                return "|".join(self._escaped(chance.randint(1, 12)) for _ in range(chance.choice((3, 400, 8000))))
            case 3:
                inner = "[a-c]"
                for _ in range(chance.choice((2, 4, 6))):
                    inner = f"({inner}{{{chance.randint(0, 3)},{chance.choice((3, 9, 40, 99))}}})"
                return inner + str(chance.random())
            case 4:
                return self._escaped(chance.choice((10, 5000, 60_000, 70_000)))
            case _:
                pieces = (
                    ".*",
                    "(?s).",
                    r"\p{L}",
                    r"[^\W_]",
                    r"\x{1F600}",
                    "(a|b)*a(a|b){12}",
                    "[^x]{50}",
                    "(?i)k",
                    "$",
                    r"\b",
                )
                return "".join(chance.choice(pieces) + self._count() for _ in range(chance.choice((3, 20, 200))))

    def grammar(self) -> str:
        chance, count = self._random, self._random.choice((1, 20, 500, 1100, 2500, 9000))
        match chance.randrange(6):
            case 0:
                upper = chance.choice("rR")
                rules = [f"{upper}{n}: {self._around(f'{upper}{n + 1}')}" for n in range(count)]
                return "\n".join([f"start: {upper}0", *rules, f'{upper}{count}: "x"'])
            case 1:
                rules = [f"r{n} ::= {self._around(f'r{n + 1}')}" for n in range(count)]
                return "\n".join(["root ::= r0", *rules, f'r{count} ::= [^"\\]] | "y"'])
            case 2:
                names = [f"n{n}" for n in range(min(count, 600))]
                rules = [f"{one}: {' | '.join(chance.choices(names, k=3))} | /{self._escaped(3)}/" for one in names]
                return "\n".join(["start: n0", *rules])
            case 3:
                depth = chance.choice((3, 29, 99, 101, 5000))
                opened, closed = chance.choice(("()", "[]"))
                return f'start: {opened * depth}"a"{(closed + self._count()) * depth}'
            case 4:
                return f"start: {' | '.join(json.dumps(self._word(4)) for _ in range(min(count, 3000)))}"
            case _:
                inline = chance.choice(
                    (f"%json {self.schema()[:3000]}", "%regex {}", '%lark { start: "a" }', "<[1-2]>", "@x")
                )
                return f"start: {inline} T~3..{chance.choice((4, 4000))}\nT: /{self.regex()[:2000]}/"

    def schema(self) -> str:
        chance, count = self._random, self._random.choice((2, 30, 330, 350, 1500, 5000))
        made: Any
        match chance.randrange(7):
            case 0:
                made = {f"d{n}": self._holder({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
                made = {"$ref": "#/$defs/d0", "$defs": {**made, f"d{count}": {"type": "null"}}}
            case 1:
                depth = chance.choice((4, 25, 45, 130, 3000))
                head, tail = json.dumps(self._holder({"x": "HERE"})).split('{"x": "HERE"}')
                return head * depth + '{"type": "null"}' + tail * depth
            case 2:
                below = {"type": chance.choice(("string", "integer", "null"))}
                made = {"type": "object", "properties": {self._word(6) + str(n): below for n in range(count)}}
                if chance.random() < 0.5:
                    made["required"] = [*made["properties"]]
            case 3:
                made = {"enum": [self._word(chance.randint(0, 30)) for _ in range(count)]}
            case 4:
                low = chance.choice((0, 1, 1000, 10**6))
                made = {"type": "string", "minLength": low, "maxLength": low + chance.choice((0, 7, 10**5))}
            case 5:
                made = {"type": "array", "items": self._leaf(), "minItems": count, "maxItems": 10**9}
            case _:
                made = {chance.choice(("anyOf", "allOf", "oneOf")): [self._leaf() for _ in range(min(count, 400))]}
        return json.dumps(made, ensure_ascii=chance.random() < 0.5)

    def _holder(self, inner: dict[str, Any]) -> dict[str, Any]:
        return self._random.choice(
            (
                {"type": "object", "properties": {"x": inner}, "required": ["x"]},
                {"type": "array", "items": inner},
                {"anyOf": [inner, {"type": "integer"}]},
                {"allOf": [inner]},
                {"type": "object", "patternProperties": {"^a": inner}},
            )
        )

    def _leaf(self) -> dict[str, Any]:
        chance = self._random
        return chance.choice(
            (
                {"type": "number", "minimum": -(10 ** chance.choice((1, 20, 300))), "multipleOf": 0.001},
                {"type": "string", "pattern": self.regex()[:200]},
                {"type": "string", "format": chance.choice(("date-time", "uuid", "email", "no-such"))},
                {"const": self._word(20)},
                {"$ref": "#"},
                {"not": {}},
                {"type": ["null", "string"], "maxLength": chance.randint(0, 9999)},
            )
        )

    def _around(self, name: str) -> str:
        return self._random.choice((name, f'"a" {name} "b"', f"({name})", f'{name} | "c"', f"{name}{self._count()}"))

    def _count(self) -> str:
        chance = self._random
        return chance.choice(
            ("", "", "*", "+", "?", f"{{{chance.randint(0, 40)}}}", f"{{1,{chance.choice((2, 99, 10**6))}}}")
        )

    def _word(self, length: int) -> str:
        return "".join(self._random.choices(LETTERS, k=length))

    def _escaped(self, length: int) -> str:
        return "".join("\\" + one if one in "/\\|()[]{}*+?.^$#&~-" else one for one in self._word(length))

    def _spoiled(self, text: str) -> str:
        """One in five is cut, doubled or changed somewhere."""
        chance = self._random
        if not text or chance.random() > 0.2:
            return text
        at = chance.randrange(len(text))
        return chance.choice((text[:at], text + text[at:], text[:at] + self._word(1) + text[at + 1 :]))
