"""Routes the console's paths, and refuses requests before any work is done for them.

Another site can make a browser send requests here, but not with a header of ours, and a host name of its own (DNS
rebinding) shows. So each request must carry HEADER, come from our own origin, and name a host that is ours.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib import resources

import grpc

from service.core.errors import ServiceError
from service.protocols.console.calls import JSON, ROUTES, SAFE, ConsoleCalls, ConsoleCredentials, failure, refusal
from service.protocols.console.state import ConsoleState
from service.protocols.seam import UseCases
from service.transport.call.auth import ALL_RIGHTS
from service.transport.call.rpc import Guard
from service.transport.call.status import failure_of
from service.transport.port.http1 import Exchange, RequestHead, RequestRefused

HEADER = "x-whippet-console"
STATE = "/api/state"
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console.css": ("console.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]{1,253})(:\d{1,5})?")


class Console:
    def __init__(
        self,
        cases: UseCases,
        guard: Guard,
        handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]],
        hosts: Collection[str] = (),
        *,
        closed: str = "",
        secure: bool = False,
    ) -> None:
        """`hosts`: names of the page beside addresses and localhost. `closed`: why the console is closed, if it is.
        `secure`: it is served over TLS alone."""
        self._guard = guard
        self._calls = ConsoleCalls(handlers)
        self._state = ConsoleState(cases)
        self._hosts = frozenset(name.lower() for name in hosts)
        self._closed = closed
        self._secure = secure
        folder = resources.files(__package__).joinpath("static")
        self._files = {path: (kind, folder.joinpath(name).read_bytes()) for path, (name, kind) in _FILES.items()}

    async def answer(self, exchange: Exchange) -> None:
        request = exchange.request
        self._check_connection(exchange)
        if request.path in self._files:
            _check_method(request, "GET", "HEAD")
            kind, body = self._files[request.path]
            exchange.respond(kind, body, SAFE, bodiless=request.method == "HEAD")
        elif request.path == STATE:
            _check_method(request, "GET")
            _check_script(request)
            self._show_state(exchange)
        elif (route := ROUTES.get(request.path)) is not None:
            _check_method(request, "POST")
            _check_script(request)
            if request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
                raise RequestRefused(415, f"send {JSON}")
            await self._calls.run(exchange, route)
        else:
            raise RequestRefused(404, "there are / and /metrics")

    def _show_state(self, exchange: Exchange) -> None:
        try:
            rights = self._guard.authorize(ConsoleCredentials(exchange), ALL_RIGHTS).rights
        except ServiceError as error:
            found = failure_of(error, None)
            exchange.writer.write(refusal(found.code, failure(found.code, found.message, found.trailers)))
            return
        exchange.respond(JSON, self._state.json(rights), SAFE)
        exchange.again = partial(self._state_again, ConsoleCredentials(exchange))

    def _state_again(self, who: ConsoleCredentials) -> bytes | None:
        """Answers a page that polls, whose rights are checked again."""
        try:
            return self._state.response(self._guard.authorize(who, ALL_RIGHTS).rights)
        except ServiceError:
            return None

    def _check_connection(self, exchange: Exchange) -> None:
        request = exchange.request
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            raise RequestRefused(421, "the console is not known by this host name; see console.hosts")
        if self._closed:
            raise RequestRefused(403, self._closed)
        if self._secure and not exchange.secure:
            location = {"Location": f"https://{host}/"} if request.path == "/" else {}
            raise RequestRefused(308 if location else 403, "the console is served over TLS", location)

    def _is_ours(self, host: str) -> bool:
        """A foreign name that leads here is an attack, DNS rebinding."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].lower().rstrip(".")
        return name == "localhost" or name in self._hosts or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _check_method(request: RequestHead, *methods: str) -> None:
    if request.method not in methods:
        raise RequestRefused(405, f"use {methods[0]}", {"Allow": ", ".join(methods)})


def _check_script(request: RequestHead) -> None:
    """Accepts our own page's script, and programs that are no browser."""
    headers: Mapping[str, str] = request.headers
    origin = headers.get("origin")
    if HEADER not in headers:
        raise RequestRefused(403, f"send the header {HEADER}")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise RequestRefused(403, "another site's page may not ask")
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise RequestRefused(403, "another site's page may not ask")
