"""The console of a server, asked as its page asks."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

HEADERS = {"X-Whippet-Console": "1"}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


def browse(
    address: str,
    path: str,
    body: object = None,
    *,
    token: str = "",
    headers: Mapping[str, str] = HEADERS,
    connection: http.client.HTTPConnection | None = None,
) -> Answer:
    """One request: POST where there is a body."""
    sent = dict(headers)
    if token:
        sent["Authorization"] = f"Bearer {token}"
    if body is not None:
        sent.setdefault("Content-Type", "application/json")
    one = connection or http.client.HTTPConnection(address, timeout=60)
    one.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), sent)
    answer = one.getresponse()
    found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    one.close()
    return found


def question(text: str, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"chat": {"messages": [{"role": "user", "content": text}]}, "stopping": {"max_tokens": tokens}, **fields}
