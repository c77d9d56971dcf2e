"""`whippet health` and `whippet drain` against a real server."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from bench.redis_server import free_port
from service.cli import main
from service.pb.whippet.v1 import admin_pb2
from tests.service.conftest import PATIENCE, ROOT, Server, ask, ask_stream
from tests.service.transport.identity.test_token_file import entry

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
TOKEN = (("authorization", "Bearer secret"),)
UNAUTHENTICATED = 64 + grpc.StatusCode.UNAUTHENTICATED.value[0]
NOT_FOUND = 64 + grpc.StatusCode.NOT_FOUND.value[0]


@pytest.fixture(scope="module")
def guarded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Asks for tokens; in service before each test and after it."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tokens.write_text(entry(rights="[generate, admin]"))
    with serve(f"--auth.tokens-file={tokens}", "--fake.step-time=0.02") as one:
        yield one


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stdout; stderr is one line where the code tells of an error, and nothing else."""
    code = main(words)
    out, err = capsys.readouterr()
    assert err.count("\n") == (code not in (0, 1))
    assert err.startswith("whippet: ") == bool(err)
    assert "secret" not in err
    return code, out.strip()


def nobody() -> str:
    """An address that nobody listens on."""
    return f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def live(server: Server) -> Iterator[None]:
    """A request that lasts."""
    call = server.generation.GenerateStream(ask_stream("live", 4000), metadata=TOKEN, timeout=PATIENCE * 3)
    next(call)
    yield
    call.cancel()


def test_health(guarded: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for address in (guarded.health, guarded.data, guarded.admin_address):
        assert said(capsys, "health", address) == (0, "SERVING")
        assert said(capsys, "health", address, "--service", "") == (0, "SERVING")
    assert said(capsys, "health", guarded.health, "--service", "nobody") == (NOT_FOUND, "")
    assert said(capsys, "health", nobody()) == (3, "")


def test_a_drain_and_back(guarded: Server, capsys: pytest.CaptureFixture[str]) -> None:
    drain = ("drain", guarded.admin_address, "--token", "secret")
    with live(guarded):
        assert said(capsys, *drain) == (0, "1 requests are live")
        assert said(capsys, "health", guarded.health) == (1, "NOT_SERVING")
        assert said(capsys, "health", guarded.health, "--service", "") == (0, "SERVING")
        assert said(capsys, *drain, "--wait", "--timeout", "0.05") == (1, "1 requests are live")
    assert said(capsys, *drain, "--wait") == (0, "drained")
    assert said(capsys, *drain, "--undo") == (0, "in service")
    assert said(capsys, "health", guarded.health) == (0, "SERVING")
    assert guarded.generation.Generate(ask("back", 2), metadata=TOKEN, timeout=PATIENCE).text


def test_who_may_not_or_cannot(guarded: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "drain", guarded.admin_address)[0] == UNAUTHENTICATED
    assert said(capsys, "drain", guarded.admin_address, "--undo")[0] == UNAUTHENTICATED
    assert said(capsys, "drain", nobody(), "--wait")[0] == 3
    assert said(capsys, "health", guarded.health) == (0, "SERVING")


@pytest.mark.parametrize(
    "words",
    [
        ("health", "--nope"),
        ("health", "--timeout", "soon"),
        ("health", "--tls-cert", "a"),
        ("drain", "--timeout", "5"),
        ("drain", "--wait", "--undo"),
        ("drain", "--wait", "--timeout", "-1"),
        ("drain", "--token", "@/no/such/file"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *words) == (2, "")


def test_in_the_delay_it_says_so(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    with serve("--drain.delay=600") as server:
        admitting = "0 requests are live, requests are still admitted"
        assert said(capsys, "drain", server.admin_address) == (0, admitting)
        assert said(capsys, "drain", server.admin_address, "--wait", "--timeout", "0.05") == (1, admitting)
        assert said(capsys, "health", server.health) == (1, "NOT_SERVING")
        while server.process.poll() is None:  # the first one would wait for the rest of the delay
            server.process.terminate()
            time.sleep(0.05)


def test_ctrl_c_ends_the_wait_and_not_the_drain(guarded: Server, capsys: pytest.CaptureFixture[str]) -> None:
    line = [sys.executable, "-m", "service.cli", "drain", guarded.admin_address, "--token", "secret", "--wait"]
    with live(guarded), subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE) as process:
        while (
            guarded.admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=TOKEN).state != admin_pb2.ENGINE_STATE_DRAINING
        ):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert said(capsys, "health", guarded.health) == (1, "NOT_SERVING")
    assert said(capsys, "drain", guarded.admin_address, "--token", "secret", "--undo")[0] == 0


@pytest.mark.product
def test_they_import_little() -> None:
    code = (
        "import sys, service.cli.health, service.cli.drain\n"
        "print(sorted({'torch', 'pydantic', 'yaml', 'tokenizers', 'engine', 'cache'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
