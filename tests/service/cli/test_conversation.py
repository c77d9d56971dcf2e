"""`whippet generate` without a prompt, on a terminal."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.cli.host import Behaviour, Host, refusing, two_words
from tests.service.cli.terminal import Terminal
from tests.service.conftest import PATIENCE, ROOT, Server

pytestmark = pytest.mark.product

PROMPT = r"(?:\A|\n|\r|2004h)> "
Talk = Callable[..., AbstractContextManager[Terminal]]


def command(address: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "service.cli", "generate", "--address", address, *flags]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    started = Host()
    yield started
    started.server.stop(None).wait()


@pytest.fixture
def talk(host: Host, tmp_path: Path) -> Talk:
    """A conversation at its first prompt, in an empty home folder."""
    host.servicer.requests.clear()
    host.servicer.ended.clear()
    host.servicer.behaviour = two_words

    @contextmanager
    def start(*flags: str, address: str = host.address, **environment: str) -> Iterator[Terminal]:
        home = {"HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "", **environment}
        with Terminal(command(address, *flags), home) as terminal:
            terminal.until(PROMPT)
            yield terminal

    return start


def asked(host: Host) -> list[list[tuple[str, str]]]:
    return [[(one.role, one.content) for one in request.chat.messages] for request in host.servicer.requests]


def ask(terminal: Terminal, question: str) -> str:
    """Until the next prompt; what was said up to that."""
    terminal.type(question.encode() + b"\r")
    return terminal.until(PROMPT)


def end(terminal: Terminal) -> None:
    terminal.type(b"\x04")
    assert terminal.process.wait(2 * PATIENCE) == 0
    assert "Traceback" not in terminal.said


def interrupted(terminal: Terminal) -> int:
    """The exit code after ctrl-C at the prompt. Once more where it came between the prompt and the wait for keys: there
    Python's readline notices it with the next key only."""
    for _ in range(3):
        terminal.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return terminal.process.wait(PATIENCE)
    raise AssertionError(terminal.said)


def saying(*texts: str, reasoning: str = "") -> Behaviour:
    def behave(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
        if reasoning:
            yield pb.GenerateStreamResponse(reasoning=reasoning)
        for text in texts:
            yield pb.GenerateStreamResponse(text=text)

    return behave


def test_what_was_said_is_told_again(talk: Talk, host: Host, tmp_path: Path) -> None:
    with talk("--temperature", "0", "--max-tokens", "9", "--system", "be kind") as terminal:
        assert "Grüße, Welt" in ask(terminal, "one")
        assert "Grüße, Welt" in ask(terminal, "two")
        ask(terminal, "   ")
        ask(terminal, "/reset")
        ask(terminal, "/system be brief")
        ask(terminal, "three")
        ask(terminal, "/system")
        ask(terminal, " /exit")
        end(terminal)
    kind, brief, answer = ("system", "be kind"), ("system", "be brief"), ("assistant", "Grüße, Welt")
    one, two, three = (("user", text) for text in ("one", "two", "three"))
    rest = [three, answer, ("user", " /exit")]
    assert asked(host) == [[kind, one], [kind, one, answer, two], [brief, three], rest]
    assert all(request.sampling == pb.SamplingOptions(temperature=0) for request in host.servicer.requests)
    assert all(request.stopping.max_tokens == 9 for request in host.servicer.requests)
    assert list(tmp_path.iterdir()) == []  # nothing that was said


def test_commands(talk: Talk, host: Host) -> None:
    with talk() as terminal:
        told = ask(terminal, "/help")
        assert all(name in told for name in ("/system", "/reset", "/exit", "ctrl-C"))
        assert "there is no /nope" in ask(terminal, "/nope")
        ask(terminal, "/usr/bin is what?")
        terminal.type(b"/exit\r")
        assert terminal.process.wait(2 * PATIENCE) == 0
    assert asked(host) == [[("user", "/usr/bin is what?")]]


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_conversation(talk: Talk, host: Host) -> None:
    def stuck(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
        yield pb.GenerateStreamResponse(text="begun")
        host.servicer.ended.wait(PATIENCE)

    host.servicer.behaviour = stuck
    with talk() as terminal:
        terminal.type(b"one\r")
        terminal.until("begun")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(PROMPT)
        assert host.servicer.ended.wait(PATIENCE)
        host.servicer.behaviour = two_words
        ask(terminal, "two")
        assert interrupted(terminal) == 130
        assert "Traceback" not in terminal.rest()
        assert "whippet:" not in terminal.said
    assert asked(host)[1] == [("user", "one"), ("assistant", "begun"), ("user", "two")]


def test_a_failure_is_one_line_and_the_question_is_forgotten(talk: Talk, host: Host) -> None:
    with talk() as terminal:
        host.servicer.behaviour = refusing(grpc.StatusCode.UNAVAILABLE, "it has gone", after=2)
        said = ask(terminal, "one")
        assert said.replace("\r", "").endswith("part part \nwhippet: UNAVAILABLE: no answer from "
                                               f"{host.address} (it has gone)\n\x1b[?")  # fmt: skip
        host.servicer.behaviour = two_words
        ask(terminal, "two")
        end(terminal)
    assert asked(host) == [[("user", "one")], [("user", "two")]]


def test_a_server_may_go_and_come_back(talk: Talk, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    first = Host(address=address)
    with talk(address=address) as terminal:
        assert "Welt" in ask(terminal, "one")
        first.server.stop(None).wait()
        assert "whippet: UNAVAILABLE: " in ask(terminal, "two")
        second = Host(address=address)
        try:
            over = time.monotonic() + PATIENCE
            while "Welt" not in ask(terminal, "three"):  # a channel tries once a second
                assert time.monotonic() < over
            end(terminal)
        finally:
            second.server.stop(None).wait()
    conversation = [("user", "one"), ("assistant", "Grüße, Welt"), ("user", "three")]
    assert asked(second) == [conversation]


@pytest.mark.parametrize(
    ("term", "keys"),
    [("xterm", b"\x1b[200~a\nb\n\nc\x1b[201~\r"), ("dumb", b"a\nb\n\nc\r")],
    ids=["marked", "unmarked"],
)
def test_a_paste_of_several_lines_is_one_message(talk: Talk, host: Host, term: str, keys: bytes) -> None:
    with talk(TERM=term) as terminal:
        terminal.type(keys)
        terminal.until("Welt")
        terminal.until(PROMPT)
        end(terminal)
    assert asked(host) == [[("user", "a\nb\n\nc")]]


def test_thoughts_are_apart_on_a_terminal_and_nowhere_else(talk: Talk, host: Host) -> None:
    host.servicer.behaviour = saying("an\x1b]0;title\x07swer", reasoning="hm\x9b2J")
    with talk() as terminal:
        said = ask(terminal, "one")
        assert "\x1b[2mhm\ufffd2J\x1b[0m\r\n\r\nan\ufffd]0;title\ufffdswer\r\n" in said
        ask(terminal, "two")
        end(terminal)
    assert host.request.chat.messages[1].reasoning == "hm\x9b2J"
    assert host.request.chat.messages[1].content == "an\x1b]0;title\x07swer"
    with talk(NO_COLOR="1") as terminal:
        assert "hm\ufffd2J\r\n\r\nan" in ask(terminal, "one")
        end(terminal)
    piped = [subprocess.run(command(host.address, "x", *flag), cwd=ROOT, capture_output=True, timeout=2 * PATIENCE)
             for flag in ((), ("--json",))]  # fmt: skip
    assert piped[0].stdout == b"an\x1b]0;title\x07swer\n"
    assert json.loads(piped[1].stdout)["reasoning"] == "hm\x9b2J"


def test_with_a_whole_server(talk: Talk, server: Server) -> None:
    with talk("--max-tokens", "12", "--seed", "1", address=server.data) as terminal:
        ask(terminal, "hello")
        answers = ask(terminal, "and again")
        assert len(answers) > 12
        terminal.type(b"/exit\r")
        assert terminal.process.wait(2 * PATIENCE) == 0
        assert "whippet:" not in terminal.rest()
    with talk(address=server.data) as terminal:
        terminal.type(b"say much\r")
        terminal.until(r"2004l\r[^\r]")  # its first text
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(PROMPT)
        server.idle()
        end(terminal)
