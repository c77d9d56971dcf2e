"""A real gateway in front of two servers, one of which is killed, and callers who leave."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gateways import Gateway, smg
from tests.service.conftest import Server
from tests.waiting import wait_for

pytestmark = pytest.mark.proof

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
TOKENS = 150
_PATIENCE = 60.0  # seconds


@pytest.fixture(scope="module")
def pair(serve: Serve) -> Iterator[tuple[Server, Server]]:
    """An answer of TOKENS takes three seconds; two run at a time on each."""
    flags = (f"--model={DEMO}", "--fake.step-time=0.02", "--scheduler.max-sequences=2")
    with serve(*flags) as one, serve(*flags) as two:
        yield one, two


@pytest.fixture(scope="module")
def gateway(pair: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with smg(tmp_path_factory.mktemp("smg"), "demo", *(one.data for one in pair)) as running:
        yield running


def busy(server: Server) -> bool:
    load = server.load()
    return load.running == 2 and load.waiting > 0


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_caller_who_leaves_leaves_nothing(gateway: Gateway, pair: tuple[Server, Server], stream: str) -> None:
    """A streaming caller's gateway says Abort and keeps the stream; another one's cancels, and says nothing."""
    host, _, port = gateway.address.rpartition(":")
    body = (
        f'{{"model": "demo", "messages": [{{"role": "user", "content": "go on"}}], "stream": {stream}, '
        '"max_tokens": 4000, "ignore_eos": true, "temperature": 0}'
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), _PATIENCE) as link:
        link.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: any(one.load().running for one in pair))
    for one in pair:
        one.idle(_PATIENCE)


def test_a_server_is_killed_and_nobody_is_lost_who_had_no_token(gateway: Gateway, pair: tuple[Server, Server]) -> None:
    wishes = {"model": "demo", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    alike = "a long beginning that all of them share, " * 8  # so that the gateway sends them to one server first
    with ThreadPoolExecutor(10) as callers:
        calls = [callers.submit(gateway.chat, f"{alike}{number}", **wishes) for number in range(10)]
        end = time.monotonic() + _PATIENCE
        while not (victims := [one for one in pair if busy(one)]):
            assert time.monotonic() < end, [one.load() for one in pair]
        time.sleep(0.5)  # so that what runs has been told, too: a first token may be part of a character
        victims[0].process.send_signal(9)
        answers = [call.result() for call in calls]
    victims[0].process.wait(20)
    failed = [answer for answer in answers if '"error"' in answer.body]
    assert len(failed) <= 2  # those that ran there
    for answer in failed:
        assert any(event["choices"][0]["delta"].get("content") for event in answer.events if "choices" in event)
    for answer in answers:
        assert answer.status == 200
        if answer not in failed:
            assert answer.events[-1]["choices"][0]["finish_reason"] == "length"
