"""A prompt, its answer and a token leave no trace in what operators read: nor does what no parser could make sense of.

The engine is the real one, at its most talkative, and everything is tried that makes somebody write something down.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from bench.floods import GENERATE, Metadata, Rogue
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, ROOT, Server, ask, ask_stream
from tests.service.tracing.collector import Collector

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
CANARY = "zqxwCanary"
TOKEN = f"{CANARY}-token"
KNOWN = (("authorization", f"Bearer {TOKEN}"),)
ENDLESS = pb.StoppingOptions(ignore_eos=True)  # longer than anything that is waited for here
PROMPT = f"def {CANARY}_of(path):\n    "
BAD: list[Metadata] = [
    ((b"authorization", f"Bearer {CANARY}-wrong".encode()),),
    ((b"authorization", f"Basic {CANARY}".encode()),),
    ((b"authorization", f"Bearer {CANARY}\xff".encode("latin-1")),),
    ((b"x-request-id", f"{CANARY} two words".encode()),),
    ((b"traceparent", f"00-{CANARY}".encode()),),
    ((b"grpc-timeout", CANARY.encode()),),
    ((b"grpc-encoding", CANARY.encode()),),
    ((b"x-bin", f"{CANARY}!".encode()),),
]


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


class Provoker:
    """Does to a server what makes servers talk, and keeps what callers were told."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.errors: list[str] = []
        self.answer = ""  # text
        self.ids: list[int] = []

    def everything(self) -> None:
        self._generate()
        self._refusals()
        self._ended_early()
        for metadata in BAD:
            self._bytes(GENERATE.encode(), metadata)
        self._bytes(f"/whippet.v1.GenerationService/{CANARY}".encode(), ())
        self._bytes(f"/{CANARY}\xff".encode("latin-1"), ())
        self._kill_engine()
        self._generate()

    def _generate(self) -> None:
        request = ask(PROMPT, 48, output=pb.OutputOptions(token_ids=True))
        request.sampling.temperature = 0
        for _ in range(2):  # the second one may be a hit
            answer = self.server.generation.Generate(request, metadata=KNOWN, timeout=PATIENCE)
            self.answer, self.ids = answer.text, list(answer.token_ids)
        streamed = ask_stream(PROMPT, 16)
        list(self.server.generation.GenerateStream(streamed, metadata=KNOWN, timeout=PATIENCE))
        chat = ask(chat=pb.Chat(messages=[pb.ChatMessage(role=CANARY, content=PROMPT)]))
        self.server.generation.Generate(chat, metadata=KNOWN, timeout=PATIENCE)

    def _fails(self, request: pb.GenerateRequest, metadata: tuple[tuple[str, str], ...] = KNOWN, **more: float) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            self.server.generation.Generate(request, metadata=metadata, **{"timeout": PATIENCE, **more})
        self.errors.append(f"{caught.value.details()} {caught.value.trailing_metadata()!r}")

    def _refusals(self) -> None:
        self._fails(ask(PROMPT, 0))
        self._fails(ask(PROMPT * 4000, 1))
        self._fails(ask(PROMPT, 8, stopping=pb.StoppingOptions(stop_strings=[CANARY] * 100)))
        self._fails(ask(PROMPT, 8, sampling=pb.SamplingOptions(temperature=-1)))
        self._fails(ask(PROMPT, 8), metadata=())
        self._fails(ask(PROMPT, 8), metadata=(("authorization", f"Bearer {CANARY}"),))
        self._fails(ask(PROMPT, 1900, stopping=ENDLESS), timeout=0.05)

    def _ended_early(self) -> None:
        call = self.server.generation.GenerateStream(
            ask_stream(PROMPT, 1000, request_id="cut"), metadata=KNOWN, timeout=PATIENCE
        )
        next(call)
        call.cancel()

    def _kill_engine(self) -> None:
        call = self.server.generation.GenerateStream(
            ask_stream(PROMPT, 1900, stopping=ENDLESS), metadata=KNOWN, timeout=PATIENCE
        )
        next(call)
        os.kill(self.server.engine_pid(), signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        self.errors.append(f"{caught.value.details()} {caught.value.trailing_metadata()!r}")
        self._again()

    def _again(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self.server.generation.Generate(ask("x", 1), metadata=KNOWN, timeout=PATIENCE)
                return
            except grpc.RpcError:
                assert time.monotonic() < end
                time.sleep(0.05)

    def _bytes(self, path: bytes, metadata: Metadata) -> None:
        rogue = Rogue(self.server.data, path, metadata)
        rogue.socket.sendall(rogue.call(b"\0\0\0\0\x0a" + CANARY.encode(), ended=True))
        self._again()
        rogue.finish()


def windows(text: str, length: int = 16) -> set[str]:
    """All pieces of a text that can hardly be there by chance."""
    pieces = {text[start : start + length] for start in range(len(text) - length + 1)}
    return {piece for piece in pieces if len(set(piece)) >= 8}


@pytest.mark.parametrize("form", ["json", pytest.param("text", marks=pytest.mark.proof)])
def test_nothing_of_it_is_written_down(form: str, serve: Serve, tmp_path: Path, collector: Collector) -> None:
    tokens = tmp_path / "tokens.yaml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens.write_text(json.dumps([{"tenant": "acme", "sha256": digest, "rights": ["generate", "admin"]}]))
    flags = (
        *("--engine=model", f"--model={ROOT / 'models' / 'demo-draft'}", "--device=cpu", "--scheduler.threads=1"),
        *("--log-level=debug", f"--log.format={form}", "--optimizations.response-cache=true"),
        *(f"--auth.tokens-file={tokens}", f"--traces.endpoint={collector.endpoint}", "--traces.sample=1"),
    )
    with serve(*flags) as server:
        provoker = Provoker(server)
        provoker.everything()
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=PATIENCE) as page:
            metrics = page.read().decode()
        collector.calls(10)
        assert server.stop() == 0
        log = server.log.read_text(errors="replace")
    assert log.count("GenerationService/Generate") > 10
    assert windows(provoker.answer)
    spans = b"".join(batch.SerializeToString() for batch in collector.batches)
    places = {"log": log, "metrics": metrics, "spans": spans.decode("latin-1"), "errors": "\n".join(provoker.errors)}
    numbers = ", ".join(map(str, provoker.ids[:4]))
    for name, text in places.items():
        assert CANARY not in text, name
        assert digest[:16] not in text, name
        assert not [piece for piece in windows(provoker.answer) if piece in text], name
        assert numbers not in text, name
    assert "acme" not in log + metrics
