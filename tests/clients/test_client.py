"""whippet-client against a whole server: answers, streams, cancelling, deadlines and refusals."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys

import pytest

import whippet_client
from tests.service.conftest import ROOT, Server
from whippet_client import (
    AlreadyExists,
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from whippet_client.pb.whippet.v1 import generation_pb2 as pb

LONG = 4000  # tokens, so that nobody reads them all before what a test waits for has happened


async def test_an_answer_and_a_stream_say_the_same(server: Server) -> None:
    async with AsyncClient(server.data, timeout=60) as client:
        answer = await client.generate("hello", max_tokens=8, temperature=0, token_ids=True)
        stream = client.stream("hello", max_tokens=8, temperature=0, token_ids=True)
        messages = [message async for message in stream]
        ids = await client.tokenize("hello")
        again = await client.generate(ids, max_tokens=8, temperature=0)
        chatted = await client.chat([{"role": "user", "content": "hello"}], max_tokens=8, temperature=0)
        [model] = await client.models()
        assert await client.detokenize(answer.token_ids) == answer.text
    assert "".join(message.text for message in messages) == answer.text == again.text
    assert [one for message in messages for one in message.token_ids] == list(answer.token_ids)
    assert stream.prompt_info is not None
    assert stream.prompt_info.prompt_tokens == answer.prompt_info.prompt_tokens == len(ids)
    assert stream.finish is not None
    assert stream.finish.usage.completion_tokens == 8
    assert stream.finish.reason == pb.FINISH_REASON_LENGTH
    assert model.name == answer.prompt_info.model
    assert chatted.finish.usage.completion_tokens == 8
    assert chatted.prompt_info.prompt_tokens > len(ids)  # the template's as well


def test_threads_have_the_same_client(server: Server) -> None:
    with Client(server.data, timeout=60) as client:
        answer = client.generate("hello", max_tokens=8, temperature=0)
        with client.stream("hello", max_tokens=8, temperature=0) as stream:
            assert stream.initial_metadata()["x-request-id"]
            assert stream.text() == answer.text
        assert stream.finish is not None
        assert stream.finish.usage.completion_tokens == 8
        assert client.detokenize(client.tokenize("hello")) == "hello"
        assert len(client.models()) == 1
        with client.stream("hello", max_tokens=LONG) as stream:
            next(stream)
        assert list(stream) == []
        with pytest.raises(InvalidArgument):
            client.generate("hello", max_tokens=0)
    server.idle()


def test_both_have_the_same_methods() -> None:
    for one, other in ((AsyncClient, Client), (whippet_client.AsyncStream, whippet_client.Stream)):
        names = {name for name in vars(one) if not name.startswith("_")}
        assert names == {name for name in vars(other) if not name.startswith("_")}
        for name in names:
            assert list(inspect.signature(getattr(one, name)).parameters) == list(
                inspect.signature(getattr(other, name)).parameters
            )


async def test_a_stream_that_is_left_or_cancelled_stops_the_server(server: Server) -> None:
    async with AsyncClient(server.data, timeout=60) as client:
        async with client.stream("left", max_tokens=LONG) as left:
            await anext(left)
        cancelled = client.stream("cancelled", max_tokens=LONG)
        seen = 0
        async for _ in cancelled:
            seen += 1
            if seen == 3:
                cancelled.cancel()
        assert (seen, cancelled.finish) == (3, None)
        waiting = client.stream("by another task", max_tokens=LONG)
        reader = asyncio.create_task(waiting.text())
        assert "x-request-id" in await waiting.initial_metadata()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await asyncio.to_thread(server.idle)


async def test_a_deadline_ends_a_call(server: Server) -> None:
    async with AsyncClient(server.data, timeout=60) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("late", max_tokens=LONG, timeout=0.05)
        with pytest.raises(DeadlineExceeded):
            await client.stream("late", max_tokens=LONG, timeout=0.05).text()
    await asyncio.to_thread(server.idle)


async def test_an_answer_keeps_to_what_is_asked_for(server: Server) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    async with AsyncClient(server.data, timeout=60) as client:
        told = await client.generate("hello", json_schema={**schema, "additionalProperties": False}, max_tokens=80)
        assert isinstance(json.loads(told.text)["on"], bool)
        assert (await client.generate("hello", choice=["left"])).text == "left"
        with pytest.raises(TypeError, match="only one of"):
            await client.generate("hello", choice=["left"], regex="a")


async def test_refusals_are_read(server: Server) -> None:
    async with AsyncClient(server.data, timeout=60) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.generate("x", top_p=2.0, max_tokens=-1)
        assert {one.field for one in caught.value.violations} == {"sampling.top_p", "stopping.max_tokens"}
        assert caught.value.retry_after is None
        with pytest.raises(NotFound):
            await client.stream("x", model="another").text()
        async with client.stream("x", max_tokens=LONG, request_id="mine") as stream:
            await anext(stream)
            with pytest.raises(AlreadyExists, match="REQUEST_ID_IN_USE") as twice:
                await client.generate("x", request_id="mine")
        assert twice.value.reason == "REQUEST_ID_IN_USE"
        assert twice.value.metadata == {"request_id": "mine"}


async def test_nobody_there_is_unavailable_and_without_a_reason() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=60, attempts=1) as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate("x")
    assert (caught.value.reason, caught.value.retry_after) == ("", None)


@pytest.mark.product
@pytest.mark.parametrize("first", ["service", "whippet_client"])
def test_both_packages_stubs_live_in_one_process(first: str) -> None:
    packages = [first, *({"service", "whippet_client"} - {first})]
    names = [f"{package}.pb.whippet.v1.{stem}_pb2" for package in packages for stem in ("admin", "errors", "model")]
    code = (
        f"import importlib; modules = [importlib.import_module(name) for name in {names!r}]\n"
        "a, b = modules[2].Model, modules[5].Model\n"
        "assert b.FromString(a(name='x').SerializeToString()).name == 'x'"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'python'}"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
