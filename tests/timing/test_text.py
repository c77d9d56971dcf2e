"""What callers and models may do to the text side: the rest of the server does not notice, and memory is bounded."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.core.text.tokenizer import MOST_TEXT
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, Refusal, Server
from tests.service.tenants import metadata, write_tokens
from tests.waiting import gone

DEMO = Path("models/demo")
HEALTH = 1.0  # seconds, which the issue of every probe has to stay below; on a quiet machine it takes milliseconds
MEMORY = 3 * 2**29  # bytes: the front with a dozen messages of 16 MiB, and text processes at work
UNBOUNDED = [("grpc.max_send_message_length", -1)]


def family(pid: int) -> list[int]:
    """The front and its text processes."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
            lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
            found += [child for child, line in lines.items() if b"fork_server" in line]
    return found


def resident(pid: int) -> int:
    """Bytes of all of them."""
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


class Watched:
    """Probes and weighs a server beside the test, until the `with` block ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.worst = 0.0  # seconds of a probe
        self.most = 0  # bytes
        self.failed: list[grpc.RpcError] = []

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with grpc.insecure_channel(self._server.health) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._stop.is_set():
                begun = time.monotonic()
                try:
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
                except grpc.RpcError as error:
                    self.failed.append(error)
                    return
                self.worst = max(self.worst, time.monotonic() - begun)
                self.most = max(self.most, resident(self._server.process.pid))
                self._stop.wait(0.02)


def seconds(act: Callable[[], object]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


@pytest.mark.parametrize("tokens", [False, True], ids=["without tokens", "with tokens"])
def test_a_dozen_large_texts(serve: Callable[..., Any], tmp_path: Path, tokens: bool) -> None:
    flags = [f"--auth.tokens-file={write_tokens(tmp_path)}"] if tokens else []
    identity = metadata("acme") if tokens else None
    word = "word " * 3_180_000  # 15.9 MB
    source = "def parse(line):\n    return [int(x) for x in line.split()]\n"
    most = (source * (MOST_TEXT // len(source)))[:MOST_TEXT]
    messages = pb.Chat(messages=[pb.ChatMessage(role="user", content=word)])
    # Bytes, so that this process has little to do while it probes.
    giant = pb.TokenizeRequest(text=word).SerializeToString()
    chat = pb.TokenizeRequest(chat=messages).SerializeToString()
    prompt = pb.GenerateRequest(chat=messages).SerializeToString()
    request = pb.TokenizeRequest(text=most).SerializeToString()
    short = pb.TokenizeRequest(text="short " * 2000).SerializeToString()
    late = pb.TokenizeRequest(text="late " * 20_000).SerializeToString()
    with serve(f"--model={DEMO}", *flags) as server, grpc.insecure_channel(server.data, UNBOUNDED) as channel:
        tokenize = channel.unary_unary("/whippet.v1.GenerationService/Tokenize")
        generate = channel.unary_unary("/whippet.v1.GenerationService/Generate")
        with Watched(server) as watched:
            refused = [tokenize.future(giant, metadata=identity) for _ in range(6)]
            refused += [tokenize.future(chat, metadata=identity) for _ in range(3)]
            refused += [generate.future(prompt, metadata=identity) for _ in range(3)]
            for call in refused:
                code = Refusal.of(call.exception(timeout=PATIENCE)).code
                assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
            alone = seconds(lambda: tokenize(request, metadata=identity, timeout=60))
            calls = [tokenize.future(request, metadata=identity, timeout=60) for _ in range(12)]
            small = seconds(lambda: tokenize(short, metadata=identity, timeout=60))
            for call in calls:
                call.cancel()
            after = seconds(lambda: tokenize(late, metadata=identity, timeout=60))
        assert not watched.failed
        assert watched.worst < HEALTH
        assert watched.most < MEMORY
        assert small < alone  # it did not wait for a large one
        assert after < 2 * alone  # nor did this one wait for the twelve


HANGS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model whose chat template never ends."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": HANGS}))
    return folder


def test_a_template_that_never_ends(serve: Callable[..., Any], hostile: Path) -> None:
    chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")]))
    with serve(f"--model={hostile}", "--drain.timeout=0.1") as server:
        with Watched(server) as watched:
            ended: queue.Queue[Any] = queue.Queue()  # in the order in which they end, which is not that of sending
            calls = [server.generation.Generate.future(chat, timeout=60) for _ in range(2)]
            for call in calls:
                call.add_done_callback(ended.put)
            refusal = Refusal.of(ended.get(timeout=60).exception())
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "takes more than 5 seconds" in refusal.message
            assert not all(call.done() for call in calls)
            text = pb.GenerateRequest(text="fine", stopping=pb.StoppingOptions(max_tokens=4))
            assert server.generation.Generate(text, timeout=60).finish
        assert not watched.failed
        assert watched.worst < HEALTH
        processes = family(server.process.pid)
        assert len(processes) >= 3
        assert seconds(lambda: server.stop(signal.SIGTERM)) < 5
        end = time.monotonic() + PATIENCE
        while not all(map(gone, processes)):
            assert time.monotonic() < end
            time.sleep(0.01)
