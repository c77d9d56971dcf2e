"""Reads one call as most models write it, by characters: {"name": "f", "arguments": {…}}."""

from __future__ import annotations

import json

from service.core.parsing.json_text import JsonStep, JsonValue

_BLANK = " \t\n\r"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_KNOWN = _ARGUMENTS | {"name", "type", "id"}


class CallObject:
    """Reads from the opening brace on. Arguments that precede the name are withheld until it is there."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: list[str] = []
        self.begun = False  # there is a name, and an object of arguments has begun
        self._wants = "brace"
        self._key = ""
        self._value: JsonValue | None = None
        self._text: list[str] = []  # of the key or value that is read
        self._seen = False  # arguments

    def step(self, char: str) -> JsonStep:
        if self._value is not None:
            return self._in_value(self._value, char)
        if char in _BLANK:
            return JsonStep.MORE
        wants = self._wants
        if wants == "brace" and char == "{":
            self._wants = "key"
        elif wants == "key" and char == '"':
            self._begin(char)
        elif wants == "colon" and char == ":":
            self._wants = "value"
        elif wants == "value":
            return self._begin(char)
        elif wants == "comma" and char == ",":
            self._wants = "key"
        elif wants == "comma" and char == "}":
            return self._over()
        else:
            return JsonStep.WRONG
        return JsonStep.MORE

    def _begin(self, char: str) -> JsonStep:
        if self._wants == "value" and (self._key in _ARGUMENTS) != (char == "{"):
            return JsonStep.WRONG  # nothing else is an object, and arguments are nothing else
        self._value, self._text = JsonValue(), []
        if self._key in _ARGUMENTS:
            self._seen, self._text = True, self.arguments
        return self._in_value(self._value, char)

    def _in_value(self, value: JsonValue, char: str) -> JsonStep:
        step = value.step(char)
        if step is JsonStep.WRONG:
            return step
        if step is not JsonStep.BEYOND:
            self._text.append(char)
        self.begun = self._seen and bool(self.name)
        if step is JsonStep.MORE:
            return step
        self._value = None
        if not self._take():
            return JsonStep.WRONG
        self.begun = self._seen and bool(self.name)
        return self.step(char) if step is JsonStep.BEYOND else JsonStep.MORE

    def _take(self) -> bool:
        if self._wants == "key":
            self._key = json.loads("".join(self._text))
            self._wants = "colon"
            return self._key in _KNOWN and not (self._key in _ARGUMENTS and self._seen)
        if self._key == "name":
            name = json.loads("".join(self._text))
            if self.name or not isinstance(name, str) or not name:
                return False
            self.name = name
        self._key, self._wants = "", "comma"
        return True

    def _over(self) -> JsonStep:
        if not self.name:
            return JsonStep.WRONG
        if not self._seen:
            self._seen, self.begun = True, True
            self.arguments.append("{}")
        return JsonStep.LAST
