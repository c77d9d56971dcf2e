"""Which requests of the console are answered, and how a call of the page becomes one of a gRPC method."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, cast

import grpc
import pytest

from service.core.errors import InvalidRequest, Reason, Unauthenticated
from service.observability import scrape
from service.observability.scrape import MetricsPort
from service.pb.whippet.v1 import admin_pb2, generation_pb2
from service.protocols.console.calls import MAX_VALUES, parsed
from service.protocols.console.site import Console
from service.protocols.console.state import ConsoleState
from service.protocols.seam import UseCases
from service.protocols.whippet_v1.rights import ADMIN, GENERATION
from service.transport.call.auth import ALL_RIGHTS, Caller, NoTokens, Presented, Right, Rights
from service.transport.call.context import Context
from service.transport.port.http1 import MAX_BODY

Body = Callable[[object, Context], Awaitable[bytes | None]]


class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it has no parameters while it runs
    """The two methods that the page calls, as a test wishes."""

    def __init__(self, generate: Body, switch: Body) -> None:
        self._methods = {
            f"/{GENERATION}/GenerateStream": grpc.stream_stream_rpc_method_handler(generate),
            f"/{ADMIN}/SetOptimization": grpc.stream_unary_rpc_method_handler(switch),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._methods.get(handler_call_details.method)


async def echo(_: object, context: Context) -> None:
    """Answers with the message's text, word by word."""
    message = generation_pb2.GenerateStreamRequest.FromString(cast(bytes, await context.read()))
    await context.send_initial_metadata((("x-cache", "miss"),))
    for word in message.text.split():
        await context.write(generation_pb2.GenerateStreamResponse(text=word).SerializeToString())


async def switched(_: object, context: Context) -> bytes:
    asked = admin_pb2.SetOptimizationRequest.FromString(cast(bytes, await context.read()))
    assert await context.read() is None
    found = admin_pb2.Optimization(name=asked.name, enabled=asked.enabled)
    return admin_pb2.SetOptimizationResponse(optimization=found).SerializeToString()


@asynccontextmanager
async def console(generate: Body = echo, **options: Any) -> AsyncIterator[MetricsPort]:
    site = Console(
        cast(UseCases, None),
        options.pop("guard", NoTokens()),
        [Handlers(generate, switched)],
        options.pop("hosts", ()),
        **options,
    )
    port = MetricsPort("metrics-listen", "127.0.0.1:0", lambda: [], site)
    await port.start()
    try:
        yield port
    finally:
        await port.stop()


async def exchange(port: MetricsPort, request: bytes) -> bytes:
    reader, writer = await connect(port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


async def connect(port: MetricsPort) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, number = port.address.rpartition(":")
    return await asyncio.open_connection(host, int(number))


def get(path: str, *headers: str, host: str = "localhost:9090", last: bool = True) -> bytes:
    """`last`: the connection is to be closed after it."""
    given = [*headers, "Connection: close"] if last else headers
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *given, "", ""]).encode()


def post(path: str, body: bytes, *headers: str, host: str = "localhost:9090") -> bytes:
    given = [f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join([f"POST {path} HTTP/1.1", f"Host: {host}", *given, "", ""]).encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


OURS = "X-Whippet-Console: 1"
SAME = "Sec-Fetch-Site: same-origin"
SWITCH = b'{"name": "batching", "enabled": false}'


@pytest.mark.parametrize("path", ["/", "/console.js", "/console.css", "/icon.svg"])
async def test_files_come_with_a_policy_that_forbids_whatever_is_not_ours(path: str) -> None:
    async with console() as port:
        answer = await exchange(port, get(path))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert status(answer) == 200
        policy = head.split(b"Content-Security-Policy: ")[1].split(b"\r\n")[0].decode()
        directives = dict(one.strip().partition(" ")[::2] for one in policy.split(";"))
        assert directives["default-src"] == "'none'"
        assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
        assert directives["frame-ancestors"] == "'none'"
        assert "unsafe" not in policy
        assert "http:" not in policy
        assert body
        assert await exchange(port, get(path).replace(b"GET", b"HEAD")) == head + b"\r\n\r\n"


def test_the_page_has_nothing_inline_and_nothing_foreign() -> None:
    static = resources.files("service.protocols.console").joinpath("static")
    page = static.joinpath("page.html").read_text()
    script = static.joinpath("console.js").read_text()
    assert "style=" not in page
    assert "onclick" not in page.lower()
    assert page.count("<script") == page.count("<script src=") == 1
    for text in (page, static.joinpath("console.css").read_text(), script.replace("http://www.w3.org/2000/svg", "")):
        assert "http" not in text
        assert "url(" not in text
    for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc"):
        assert markup not in script
    for storage in ("localStorage", "sessionStorage", "cookie", "indexedDB"):
        assert storage not in script


@pytest.mark.parametrize(
    "host", ["localhost:9090", "127.0.0.1", "[::1]:9090", "192.0.2.7:80", "LOCALHOST.", "models.example:9090"]
)
async def test_hosts_that_we_are(host: str) -> None:
    async with console(hosts=["Models.Example"]) as port:
        assert status(await exchange(port, get("/", host=host))) == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "a, localhost", "localhost:x", "é"]
)
async def test_a_host_that_is_somebody_elses_is_refused(host: str) -> None:
    async with console() as port:
        for request in (get("/", host=host), get("/api/state", OURS, host=host), post("/api/switch", b"{}", OURS)):
            if b"Host: localhost" not in request:
                assert status(await exchange(port, request)) == 421


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [SAME],
        [OURS, "Origin: http://evil.example"],
        [OURS, "Origin: null"],
        [OURS, "Origin: http://localhost:9091"],
        [OURS, "Sec-Fetch-Site: cross-site"],
        [OURS, "Sec-Fetch-Site: same-site"],
        [OURS, "Sec-Fetch-Site: none"],
    ],
)
async def test_what_another_sites_page_can_send_is_refused_before_anything_is_done(headers: list[str]) -> None:
    async def never(_: object, context: Context) -> None:
        raise AssertionError("called")

    async with console(never) as port:
        for request in (
            get("/api/state", *headers),
            post("/api/switch", SWITCH, *headers),
            post("/api/generate", b"{}", *headers),
        ):
            assert status(await exchange(port, request)) == 403


async def answered(reader: asyncio.StreamReader) -> bytes:
    """One response of a connection that is kept."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    return head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def test_a_page_keeps_its_connection_and_gives_it_up_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_MAX_CONNECTIONS", 2)
    async with console() as port:
        reader, writer = await connect(port)
        for path in ("/", "/console.js", "/", "/icon.svg"):
            writer.write(get(path, last=False))
            assert b"Connection: keep-alive\r\n" in await answered(reader)
        silent = [await connect(port) for _ in range(3)]
        assert status(await exchange(port, get("/metrics"))) == 200
        assert await asyncio.wait_for(reader.read(), 60) == b""
        for _, other in [*silent, (reader, writer)]:
            other.close()


async def test_a_request_with_a_body_or_a_refusal_ends_its_connection() -> None:
    async with console() as port:
        for request in (
            get("/", "Content-Length: 3", last=False) + b"abc",
            get("/", "Transfer-Encoding: chunked", last=False),
            get("/nothing", last=False),
            get("/metrics", last=False),
            post("/api/switch", SWITCH, OURS),
            get("/", last=False).replace(b"HTTP/1.1", b"HTTP/1.0"),
        ):
            assert b"Connection: close\r\n" in await exchange(port, request)


async def test_other_methods_types_and_paths_are_refused() -> None:
    async with console() as port:
        form = post("/api/switch", SWITCH, OURS).replace(b"application/json", b"text/plain")
        assert status(await exchange(port, form)) == 415
        assert status(await exchange(port, get("/api/switch", OURS))) == 405
        assert status(await exchange(port, get("/api/generate", OURS))) == 405
        assert status(await exchange(port, post("/", b"", OURS))) == 405
        options = get("/api/switch", "Origin: http://evil.example").replace(b"GET", b"OPTIONS")
        preflight = await exchange(port, options)
        assert status(preflight) == 405
        assert b"access-control" not in preflight.lower()
        assert status(await exchange(port, get("/nothing"))) == 404
        assert status(await exchange(port, get("/metrics", host="whatever"))) == 200


async def test_a_call_goes_through_the_method_and_comes_back_as_lines() -> None:
    async with console() as port:
        answer = await exchange(
            port, post("/api/generate", b'{"text": "a <b> c"}', OURS, "Origin: http://localhost:9090")
        )
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head
        assert b"x-cache: miss" in head
        assert [json.loads(line)["text"] for line in body.splitlines()] == ["a", "<b>", "c"]
        answer = await exchange(port, post("/api/switch", SWITCH, OURS))
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"optimization": {"name": "batching"}}


async def test_a_method_that_refuses_gives_its_status_and_one_that_fails_late_a_last_line() -> None:
    async def refuses(_: object, context: Context) -> None:
        trailers = (("grpc-retry-pushback-ms", "1500"),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers)

    async def late(_: object, context: Context) -> None:
        await context.read()
        await context.write(generation_pb2.GenerateStreamResponse(text="a").SerializeToString())
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with console(refuses) as port:
        answer = await exchange(port, post("/api/generate", b"{}", OURS))
        assert status(answer) == 429
        error = {"code": "RESOURCE_EXHAUSTED", "message": "full", "retry_ms": 1500}
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"error": error}
        large = post("/api/generate", b" " * MAX_BODY, OURS)  # which was not read when the method refused
        assert status(await exchange(port, large)) == 429
    async with console(late) as port:
        answer = await exchange(port, post("/api/generate", b"{}", OURS))
        first, last = answer.partition(b"\r\n\r\n")[2].splitlines()
        assert json.loads(first) == {"text": "a"}
        assert json.loads(last) == {"error": {"code": "UNAVAILABLE", "message": "gone"}}


async def test_a_client_that_goes_away_cancels_the_method_and_frees_its_place() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(_: object, context: Context) -> None:
        await context.read()
        await context.write(generation_pb2.GenerateStreamResponse(text="a").SerializeToString())
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with console(endless) as port:
        _, writer = await connect(port)
        writer.write(post("/api/generate", b"{}", OURS))
        await asyncio.wait_for(begun.wait(), 60)
        assert len(port._streams) == 1
        writer.close()
        await asyncio.wait_for(cancelled.wait(), 60)
        while port._clients:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
        assert not port._streams


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError, TimeoutError])
async def test_a_client_that_goes_away_during_a_write_is_no_failure_of_the_method(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = []

    async def gone(_: asyncio.StreamWriter) -> None:
        raise error

    async def speak(_: object, context: Context) -> None:
        await context.read()
        monkeypatch.setattr(asyncio.StreamWriter, "drain", gone)
        try:
            await context.write(generation_pb2.GenerateStreamResponse(text="a").SerializeToString())
        except BaseException as caught:
            raised.append(caught)
            raise
        finally:
            monkeypatch.undo()

    async with console(speak) as port:
        await exchange(port, post("/api/generate", b"{}", OURS))
    assert [type(one) for one in raised] == [grpc.aio.InternalError]  # as gRPC's own calls raise


async def test_streams_leave_places_for_scrapes_and_are_not_cut_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_MAX_STREAMS", 2)
    monkeypatch.setattr(scrape, "_MAX_CONNECTIONS", 4)
    go = asyncio.Event()

    async def waits(_: object, context: Context) -> None:
        await context.read()
        await go.wait()
        await context.write(generation_pb2.GenerateStreamResponse(text="a").SerializeToString())

    async with console(waits) as port:
        streams = [asyncio.create_task(exchange(port, post("/api/generate", b"{}", OURS))) for _ in range(2)]
        while len(port._streams) < 2:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
        assert status(await exchange(port, post("/api/generate", b"{}", OURS))) == 503
        silent = [await connect(port) for _ in range(20)]
        assert status(await exchange(port, get("/metrics"))) == 200
        go.set()
        for stream in streams:
            assert (await asyncio.wait_for(stream, 60)).endswith(b'{"text":"a"}\n')
        for _, writer in silent:
            writer.close()


async def test_stopping_the_port_cancels_a_stream() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(_: object, context: Context) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with console(endless) as port:
        _, writer = await connect(port)
        writer.write(post("/api/generate", b"{}", OURS))
        await asyncio.wait_for(begun.wait(), 60)
    assert cancelled.is_set()
    writer.close()


async def test_a_closed_console_and_one_for_tls_alone_do_nothing() -> None:
    async with console(closed="nobody says who calls") as port:
        for request in (get("/"), get("/api/state", OURS), post("/api/switch", SWITCH, OURS)):
            assert status(await exchange(port, request)) == 403
        assert status(await exchange(port, get("/metrics"))) == 200
    async with console(secure=True) as port:
        answer = await exchange(port, get("/"))
        assert status(answer) == 308
        assert b"Location: https://localhost:9090/\r\n" in answer
        for request in (get("/api/state", OURS), post("/api/switch", SWITCH, OURS), get("/console.js")):
            assert status(await exchange(port, request)) == 403


class Tokens:
    """The token `generate` may generate, until it expires, and nobody may look."""

    expired = False

    def authorize(self, call: Presented, permitted: Rights) -> Caller:
        given = dict(call.invocation_metadata() or ()).get("authorization")
        if given == "Bearer generate" and not self.expired:
            return Caller("a", frozenset((Right.GENERATE,)))
        raise Unauthenticated("a token is needed", Reason.TOKEN_MISSING)

    def tenants(self) -> frozenset[str]:
        return frozenset()


async def test_the_state_is_for_those_who_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsoleState, "_read", lambda self: {})
    async with console(guard=Tokens()) as port:
        answer = await exchange(port, get("/api/state", OURS))
        assert status(answer) == 401
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "UNAUTHENTICATED"
        answer = await exchange(port, get("/api/state", OURS, "Authorization: Bearer generate"))
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"rights": ["generate"], "state": None}


async def test_a_page_that_polls_is_answered_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other requests come between, in pieces or at once, and where the token has expired meanwhile."""
    monkeypatch.setattr(ConsoleState, "_read", lambda self: {})
    guard = Tokens()
    look = get("/api/state", OURS, "Authorization: Bearer generate", last=False)
    shown = {"rights": ["generate"], "state": None}
    async with console(guard=guard) as port:
        reader, writer = await connect(port)

        async def body() -> bytes:
            return (await answered(reader)).partition(b"\r\n\r\n")[2]

        for _ in range(3):
            writer.write(look)
            assert json.loads(await body()) == shown
        writer.write(get("/icon.svg", last=False))
        assert (await body()).startswith(b"<svg")
        writer.write(look[:20])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(look[20:] + look)
        assert [json.loads(await body()) for _ in range(2)] == [shown, shown]
        writer.write(look)
        assert json.loads(await body()) == shown
        guard.expired = True
        writer.write(look)
        assert (await answered(reader)).startswith(b"HTTP/1.1 401 ")
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


def test_the_state_is_made_once_a_second_for_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [0.0], []
    state = ConsoleState(cast(UseCases, None), lambda: now[0])
    monkeypatch.setattr(state, "_read", lambda: made.append(now[0]) or {"number": len(made)})
    everything, generate = ALL_RIGHTS, frozenset((Right.GENERATE,))
    assert len({state.json(everything) for _ in range(50)}) == 1
    now[0] = 0.99
    assert json.loads(state.json(everything)) == {"rights": sorted(ALL_RIGHTS), "state": {"number": 1}}
    assert json.loads(state.json(generate)) == {"rights": ["generate"], "state": None}
    now[0] = 1.0
    assert json.loads(state.json(everything))["state"] == {"number": 2}
    assert json.loads(state.json(frozenset((Right.VIEW,))))["state"] == {"number": 2}
    assert made == [0.0, 1.0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'{"text": 7}',
        b'{"unknown": 1}',
        b'{"text": "\xff"}',
        b'{"sampling": {"seed": 1.5}}',
        b'{"sampling": {"logit_bias": {"a": 1}}}',
        b"[" * 30_000,
        b'{"chat":' * 5_000,
        b'{"chat": {"messages": [' + b"{}," * MAX_VALUES + b"{}]}}",
        b'{"chat": {"template_arguments": ' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}}",
    ],
)
def test_a_body_that_is_no_message_is_an_invalid_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parsed(generation_pb2.GenerateStreamRequest, body)


def test_rights_are_named_as_the_page_knows_them() -> None:
    assert sorted(ALL_RIGHTS) == ["admin", "generate", "view"]
