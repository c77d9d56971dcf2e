"""`whippet generate` against a scripted server on a real channel."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from service.cli import main
from service.cli.asking import LIMIT
from service.cli.channel import ServerAddress
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.certificates import HERE, Authority, write_pair
from tests.service.cli.host import Host, refusing, two_words

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def host() -> Iterator[Host]:
    started = Host()
    yield started
    started.server.stop(None).wait()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(host: Host, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*flags: str) -> tuple[int, str, str]:
        code = main(["generate", "--address", host.address, *flags])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_text_goes_to_stdout(run: Run, host: Host) -> None:
    assert run("hello") == (0, "Grüße, Welt\n", "")
    assert host.request == pb.GenerateStreamRequest(
        text="hello", sampling=pb.SamplingOptions(), stopping=pb.StoppingOptions(max_tokens=LIMIT)
    )


def test_only_what_is_given_is_set(run: Run, host: Host) -> None:
    run("x")
    assert not host.request.sampling.ListFields()
    assert host.request.stopping == pb.StoppingOptions(max_tokens=512)
    run("x", "--min-p", "0.25", "--repetition-penalty", "2", "--presence-penalty", "0", "--frequency-penalty", "-1")
    assert host.request.sampling == pb.SamplingOptions(
        min_p=0.25, repetition_penalty=2, presence_penalty=0, frequency_penalty=-1
    )
    run("x", "--temperature", "0", "--top-k", "0", "--top-p", "0.5", "--seed", "0", "--max-tokens", "0", "--stop", "a",
        "--stop", "b", "--min-tokens", "1", "--model", "m")  # fmt: skip
    assert host.request.model == "m"
    assert host.request.sampling == pb.SamplingOptions(temperature=0, top_k=0, top_p=0.5, seed=0)
    assert host.request.stopping == pb.StoppingOptions(max_tokens=0, min_tokens=1, stop_strings=["a", "b"])
    assert host.request.sampling.HasField("temperature")
    run("x", "--logit-bias", "7=-100", "--logit-bias", "8=.5", "--stop-token", "3", "--stop-token", "4", "--ignore-eos")
    assert host.request.sampling == pb.SamplingOptions(logit_bias={7: -100, 8: 0.5})
    assert host.request.stopping == pb.StoppingOptions(stop_token_ids=[3, 4], ignore_eos=True, max_tokens=LIMIT)


def to_the_limit(
    request: pb.GenerateStreamRequest, context: grpc.ServicerContext
) -> Iterator[pb.GenerateStreamResponse]:
    yield pb.GenerateStreamResponse(text="and on", finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))


def test_a_limit_that_nobody_named_is_said_when_it_ends_the_answer(run: Run, host: Host) -> None:
    host.servicer.behaviour = to_the_limit
    said = "whippet: stopped after 512 tokens, the default of --max-tokens\n"
    assert run("x") == (0, "and on\n", said)
    assert run("x", "--json")[2] == said
    assert run("x", "--max-tokens", "512") == (0, "and on\n", "")
    run("x", "--min-tokens", "600")
    assert host.request.stopping.max_tokens == 600


def test_a_context_with_less_room_is_no_fault(run: Run, host: Host) -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="stopping.max_tokens", description="must be at most 40 after this prompt")
    refuse = refusing(grpc.StatusCode.INVALID_ARGUMENT, "too many", bad)

    def behave(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
        yield from (refuse if request.stopping.HasField("max_tokens") else to_the_limit)(request, context)

    host.servicer.behaviour = behave
    assert run("x") == (0, "and on\n", "")
    assert len(host.servicer.requests) == 2
    code, out, err = run("x", "--max-tokens", "512")
    assert (code, out) == (64 + 3, "")
    assert "at most 40" in err


def test_what_the_answer_must_look_like(run: Run, host: Host, tmp_path: Path) -> None:
    file = tmp_path / "rules"
    file.write_text("{}")
    for flags, expected in (
        (["--json-schema", str(file)], pb.Constraint(json_schema="{}")),
        (["--grammar", str(file)], pb.Constraint(grammar="{}")),
        (["--regex", "[0-9]"], pb.Constraint(regex="[0-9]")),
        (["--choice", "a", "--choice", "b"], pb.Constraint(choice=pb.Choice(options=["a", "b"]))),
        (["--json-object"], pb.Constraint(json_object=True)),
    ):
        run("x", *flags)
        assert host.request.constraint == expected
    run("x")
    assert not host.request.HasField("constraint")
    code, _, err = run("x", "--json-schema", str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)
    assert "No such file" in err
    code, _, err = run("x", "--regex", "a", "--choice", "b")
    assert code == 2


def test_chat(run: Run, host: Host) -> None:
    run("hi", "--chat")
    assert host.request.chat == pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    run("hi", "--system", "be brief")
    assert [(m.role, m.content) for m in host.request.chat.messages] == [("system", "be brief"), ("user", "hi")]
    run("hi", "--template-argument", "enable_thinking=false", "--template-argument", 'style={"tone": "dry"}')
    assert host.request.chat.messages[0].content == "hi"
    given = host.request.chat.template_arguments
    assert given["enable_thinking"] is False
    assert given["style"]["tone"] == "dry"


@pytest.mark.parametrize("flags", [(), ("-",)])
def test_the_prompt_may_come_from_stdin(
    run: Run, host: Host, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("zwei\nZeilen ü\n".encode())))
    assert run(*flags)[0] == 0
    assert host.request.text == "zwei\nZeilen ü"


@pytest.mark.parametrize(("typed", "asked"), [("x", "x"), ("x\r\n", "x"), ("x\n\n", "x\n"), ("\n", ""), ("x ", "x ")])
def test_the_last_line_break_is_not_part_of_it(
    run: Run, host: Host, monkeypatch: pytest.MonkeyPatch, typed: str, asked: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    run()
    assert host.request.text == asked


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("localhost", "localhost:50051"),
        ("10.0.0.7", "10.0.0.7:50051"),
        ("models.example:443", "models.example:443"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("unix:/run/whippet", "unix:/run/whippet"),
        ("dns:///models.example", "dns:///models.example"),
    ],
)
def test_an_address_without_a_port_means_the_usual_one(given: str, meant: str) -> None:
    parser = argparse.ArgumentParser()
    ServerAddress.add_flags(parser)
    assert ServerAddress.of(parser.parse_args(["--address", given])).address == meant


def test_the_usual_port_of_operators_is_another_one() -> None:
    parser = argparse.ArgumentParser()
    ServerAddress.add_operator_flags(parser)
    assert ServerAddress.of(parser.parse_args(["localhost"])).address == "localhost:50052"


def test_json(run: Run) -> None:
    code, out, err = run("hello", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["text"] == "Grüße, Welt"
    assert (answer["request_id"], answer["model"]) == ("r1", "m")
    assert answer["finish"] == {"reason": "stop_string", "stop": "\n"}
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["timings"] == {"queue": 0.0015, "cache_lookup": 0.0, "prefill": 0.0, "decode": 2.0}
    assert answer["cache_source"] == "none"
    assert answer["sampling"]["temperature"] == 0.7
    assert answer["sampling"]["seed"] == 11


def several(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
    """Answers that come mixed, the last of them whole first."""
    yield pb.GenerateStreamResponse(index=0, text="on", prompt_info=pb.PromptInfo(request_id="r1", model="m"))
    yield pb.GenerateStreamResponse(index=2, text="thr")
    yield pb.GenerateStreamResponse(index=2, text="ee", finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))
    yield pb.GenerateStreamResponse(index=1, text="tw")
    yield pb.GenerateStreamResponse(index=0, text="e\n", finish=pb.Finish(reason=pb.FINISH_REASON_STOP))
    yield pb.GenerateStreamResponse(index=1, text="o", finish=pb.Finish(reason=pb.FINISH_REASON_STOP))


def test_several_answers_come_one_after_the_other(run: Run, host: Host) -> None:
    host.servicer.behaviour = several
    assert run("x", "--n", "3", "--max-tokens", "9") == (0, "one\n\ntwo\n\nthree\n", "")
    assert host.request.n == 3
    code, out, _ = run("x", "--n", "3", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["text"] == "one\n"
    assert [one["text"] for one in answer["more_answers"]] == ["two", "three"]
    assert [one["finish"]["reason"] for one in answer["more_answers"]] == ["stop", "length"]
    host.servicer.behaviour = two_words
    run("x")
    assert not host.request.HasField("n")
    assert "more_answers" not in json.loads(run("x", "--json")[1])


def test_a_refusal_names_the_fields(run: Run, host: Host) -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.top_p", description="must be at most 1")
    bad.field_violations.add(field="stopping", description="already said")
    host.servicer.behaviour = refusing(grpc.StatusCode.INVALID_ARGUMENT, "wrong\nthings, already said", bad)
    code, out, err = run("x")
    assert (code, out) == (64 + 3, "")
    assert err == "whippet: INVALID_ARGUMENT: wrong things, already said; sampling.top_p: must be at most 1\n"


def test_a_refusal_says_when_to_come_back(run: Run, host: Host) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    host.servicer.behaviour = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", retry)
    assert run("x") == (64 + 8, "", "whippet: RESOURCE_EXHAUSTED: queue full; try again in 1.5 s\n")


@pytest.mark.parametrize(("flags", "left"), [((), "part part \n"), (("--json",), "")])
def test_a_failure_after_some_text(run: Run, host: Host, flags: tuple[str, ...], left: str) -> None:
    host.servicer.behaviour = refusing(grpc.StatusCode.INTERNAL, "engine failed", after=2)
    assert run("x", *flags) == (64 + 13, left, "whippet: INTERNAL: engine failed\n")


def test_no_server(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", "127.0.0.1:1", "x"]) == 64 + 14
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("whippet: UNAVAILABLE: no answer from 127.0.0.1:1 (")
    assert err.count("\n") == 1


@pytest.mark.product
def test_a_timeout(run: Run, host: Host) -> None:
    def sleep(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
        host.servicer.ended.wait(60)
        yield pb.GenerateStreamResponse()

    host.servicer.behaviour = sleep
    code, _, err = run("x", "--timeout", "2")
    assert code == 64 + 4
    assert err.startswith("whippet: DEADLINE_EXCEEDED: ")
    assert host.servicer.ended.wait(60)


def test_tokens(run: Run, host: Host, tmp_path: Path) -> None:
    run("x")
    assert "authorization" not in host.servicer.metadata
    run("x", "--token", "secret-1")
    assert host.servicer.metadata["authorization"] == "Bearer secret-1"
    (tmp_path / "token").write_text("secret-2\n")
    run("x", "--token", f"@{tmp_path / 'token'}")
    assert host.servicer.metadata["authorization"] == "Bearer secret-2"


USAGE = {
    "number": (["x", "--max-tokens", "many"], "invalid int"),
    "answers": (["x", "--n", "some"], "invalid int"),
    "too large": (["x", "--max-tokens", "99999999999"], "out of range"),
    "bias": (["x", "--logit-bias", "7"], "--logit-bias"),
    "template argument": (["x", "--template-argument", "style=dry"], "a text needs its quotes"),
    "template argument without a name": (["x", "--template-argument", "dry"], "--template-argument"),
    "unknown flag": (["x", "--no-such"], "--no-such"),
    "abbreviated": (["x", "--max", "3"], "--max"),
    "two prompts": (["x", "y"], "y"),
    "key alone": (["x", "--tls-key", "k"], "go together"),
    "pair without ca": (["x", "--tls-key", "k", "--tls-cert", "c"], "needs --tls-ca"),
    "no ca file": (["x", "--tls-ca", "/no/ca.pem"], "/no/ca.pem: No such file"),
    "no token file": (["x", "--token", "@/no/token"], "/no/token: No such file"),
    "token": (["x", "--token", "se\ncret"], "printable ASCII"),
    "port": (["x", "--address", "localhost:grpc"], "localhost:grpc: an address is HOST or HOST:PORT"),
    "no host": (["x", "--address", ":50051"], ":50051: an address is"),
    "URL": (["x", "--address", "http://localhost:50051"], "an address is"),
    "not utf-8": (["\udcff"], "--help"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_errors_are_one_line(run: Run, host: Host, case: str) -> None:
    flags, says = USAGE[case]
    code, out, err = run(*flags)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("whippet: ")
    assert err.count("\n") == 1
    assert "cret" not in err
    assert host.servicer.requests == []


def test_a_prompt_that_is_not_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, _, err = run()
    assert code == 2
    assert "not UTF-8" in err


def test_a_terminal_without_a_prompt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = run()
    assert code == 2
    assert "no prompt" in err
    monkeypatch.setattr(sys, "stdout", Terminal())
    code, _, err = run("--n", "2")
    assert code == 2
    assert "--n needs a prompt" in err


def test_a_terminal_numbers_several_answers(run: Run, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    host.servicer.behaviour = several
    monkeypatch.setattr(sys, "stdout", shown)
    run("x", "--n", "3")
    assert shown.getvalue().startswith("1 of 3:\none\n\n2 of 3:\ntwo\n\n3 of 3:\nthree\n")


def endless(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
    """Ends when nobody listens any more, or after a minute."""
    for _ in range(6000):
        if not context.is_active():
            return
        yield pb.GenerateStreamResponse(text="more " * 200)
        time.sleep(0.01)


def started(host: Host, **pipes: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "service.cli", "generate", "--address", host.address, "x"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipes)


@pytest.mark.product
def test_ctrl_c_cancels(host: Host) -> None:
    host.servicer.behaviour = endless
    process = started(host)
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert host.servicer.ended.wait(60)


@pytest.mark.product
def test_a_reader_that_goes_away_cancels(host: Host) -> None:
    host.servicer.behaviour = endless
    process = started(host)
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert host.servicer.ended.wait(60)


@pytest.mark.product
def test_a_terminal_that_cannot_show_it(host: Host) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "service.cli", "generate", "--address", host.address, "x"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Gr??e, Welt\n", b"")


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate for 127.0.0.1 of it."""
    folder, authority = tmp_path_factory.mktemp("pems"), Authority("whippet")
    (folder / "ca.pem").write_bytes(authority.pem)
    write_pair(folder, "own", authority.sign(*HERE))
    return folder


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(pems: Path, capfd: pytest.CaptureFixture[str], mutual: bool) -> None:
    key, cert, ca = ((pems / name).read_bytes() for name in ("own.key", "own.pem", "ca.pem"))
    credentials = grpc.ssl_server_credentials([(key, cert)], ca if mutual else None, mutual)
    host = Host(credentials)
    try:
        flags = ["generate", "--address", host.address, "x", "--tls-ca", str(pems / "ca.pem")]
        pair = ["--tls-cert", str(pems / "own.pem"), "--tls-key", str(pems / "own.key")] if mutual else []
        assert main([*flags, *pair]) == 0
        assert capfd.readouterr().out == "Grüße, Welt\n"
        assert main(["generate", "--address", host.address, "x"]) == 64 + 14  # plaintext to a TLS port
        if mutual:
            assert main(flags) == 64 + 14  # without a certificate of its own
    finally:
        host.server.stop(None).wait()
