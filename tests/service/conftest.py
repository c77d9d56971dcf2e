"""A whole server in a process of its own, on free ports of the loopback, its fake engine in yet another process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from service.pb.whippet.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2_grpc
from tests.service.forked import Template

ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"^ready: data (\S+) admin (\S+) health (\S+)", re.MULTILINE)
_DETAILS = (
    error_details_pb2.BadRequest,
    error_details_pb2.ErrorInfo,
    error_details_pb2.RetryInfo,
    error_details_pb2.ResourceInfo,
)


STEP = 0.002  # seconds, of an engine that is watched
PATIENCE = 60.0  # seconds after which a test that waits has failed, on however slow a machine
UNCACHED = ("--optimizations.response-cache=false", "--cache.semantic.mode=off")


def all_flags(*flags: str) -> list[str]:
    """A server with the fake engine on free ports and without caches, unless the flags say otherwise."""
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen", "metrics-listen")]
    return ["--engine=fake", *ports, *UNCACHED, *flags]


def command(*flags: str) -> list[str]:
    """The same, started by a fresh interpreter."""
    code = "import sys; from service.main import serve; sys.exit(serve(sys.argv[1:]))"
    return [sys.executable, "-c", code, *all_flags(*flags)]


class Server:
    """One running server."""

    def __init__(self, template: Template, *flags: str, environ: dict[str, str] | None = None, log: Path) -> None:
        self.log = log
        self.process = template.start(all_flags(*flags), {**os.environ, **(environ or {})}, log, log)
        self.data, self.admin_address, self.health = self._addresses()
        self.channel = grpc.insecure_channel(self.data, options=[("grpc.max_receive_message_length", -1)])
        self.admin_channel = grpc.insecure_channel(self.admin_address)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.admin_channel)

    def _addresses(self) -> tuple[str, str, str]:
        end = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            if self.log.exists() and (match := _READY.search(self.log.read_text())):
                return match[1], match[2], match[3]
            time.sleep(0.02)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    @property
    def metrics(self) -> str:
        """The address of the metrics port."""
        match = re.search(r" metrics http://(\S+)/metrics$", self.log.read_text(), re.MULTILINE)
        assert match is not None
        return match[1]

    def engine_pid(self) -> int:
        """Of its engine process."""
        engines = self.engine_pids()
        assert len(engines) == 1, engines
        return engines[0]

    def engine_pids(self) -> list[int]:
        """The same, or none where there is none now."""
        return self._children(b"engine.worker.process")

    def relay_pids(self) -> list[int]:
        """Of the processes that speak gRPC for it."""
        return self._children(b"service.transport.relays.process")

    def _children(self, module: bytes) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = []
        for pid in children:
            with contextlib.suppress(OSError):  # it has just ended
                if module in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found

    def load(self) -> admin_pb2.GetLoadResponse:
        return self.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=60)

    def idle(self, within: float = PATIENCE) -> admin_pb2.GetLoadResponse:
        """Waits until the engine holds nothing; the load it then reports."""
        return self.until(lambda load: not (load.running or load.waiting or load.paused or load.used_pages), within)

    def until(
        self, found: Callable[[admin_pb2.GetLoadResponse], bool], within: float = PATIENCE
    ) -> admin_pb2.GetLoadResponse:
        """Waits until the load is as wished."""
        end = time.monotonic() + within
        while True:
            load = self.load()
            if found(load):
                return load
            assert time.monotonic() < end, load
            time.sleep(0.01)

    def rss(self) -> int:
        """Bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        self.channel.close()
        self.admin_channel.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(60)
                raise


@dataclass
class Refusal:
    """How an RPC failed."""

    code: grpc.StatusCode
    message: str
    trailers: dict[str, Any]
    details: dict[str, Message] = field(default_factory=dict)

    @classmethod
    def of(cls, error: grpc.RpcError) -> Refusal:
        """What the client can know of it."""
        trailers = dict(error.trailing_metadata() or ())
        refusal = cls(error.code(), error.details() or "", trailers)
        if (packed := trailers.get("grpc-status-details-bin")) is not None:
            status = status_pb2.Status.FromString(packed)
            assert status.code == error.code().value[0]
            assert status.message == error.details()
            for detail in status.details:
                kind = next(kind for kind in _DETAILS if detail.Is(kind.DESCRIPTOR))
                message = kind()
                detail.Unpack(message)
                refusal.details[kind.DESCRIPTOR.name] = message
        return refusal

    @property
    def fields(self) -> set[str]:
        """Field paths that were named as wrong."""
        return {violation.field for violation in self.details["BadRequest"].field_violations}  # type: ignore[attr-defined]

    @property
    def reason(self) -> str:
        """For programs."""
        info = self.details["ErrorInfo"]
        assert info.domain == "whippet"  # type: ignore[attr-defined]
        return str(info.reason)  # type: ignore[attr-defined]

    @property
    def retry_ms(self) -> float:
        """When to come back, which both ways of saying it must agree on."""
        delay = self.details["RetryInfo"].retry_delay  # type: ignore[attr-defined]
        assert int(self.trailers["grpc-retry-pushback-ms"]) == delay.ToMilliseconds()
        return float(delay.ToMilliseconds())


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> Refusal:
    """The failure of an RPC, unary or streamed, which must fail."""
    options.setdefault("timeout", PATIENCE)

    def run() -> None:
        answer = call(*arguments, **options)
        if isinstance(answer, Iterator):
            list(answer)

    with pytest.raises(grpc.RpcError) as caught:
        run()
    return Refusal.of(caught.value)


def ask(text: str = "hello", tokens: int | None = 8, **fields: Any) -> generation_pb2.GenerateRequest:
    """A unary request."""
    if "token_ids" not in fields and "chat" not in fields:
        fields["text"] = text
    request = generation_pb2.GenerateRequest(**fields)
    if tokens is not None and not request.stopping.HasField("max_tokens"):
        request.stopping.max_tokens = tokens
    return request


def ask_stream(text: str = "hello", tokens: int | None = 8, **fields: Any) -> generation_pb2.GenerateStreamRequest:
    """The same, streamed."""
    return generation_pb2.GenerateStreamRequest.FromString(ask(text, tokens, **fields).SerializeToString())


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    one = Template()
    yield one
    one.close()


@pytest.fixture(scope="session")
def serve(
    template: Template, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """Starts a server for the length of a `with` block."""

    @contextlib.contextmanager
    def start(*flags: str, environ: dict[str, str] | None = None) -> Iterator[Server]:
        server = Server(template, *flags, environ=environ, log=tmp_path_factory.mktemp("server") / "log")
        try:
            yield server
        finally:
            server.close()

    return start


@pytest.fixture(scope="session")
def server(serve: Callable[..., contextlib.AbstractContextManager[Server]]) -> Iterator[Server]:
    """One that all tests share, which must leave it idle. A step takes 1 ms."""
    with serve("--fake.step-time=0.001", "--scheduler.max-sequences=8") as one:
        yield one
        one.idle()
        assert one.stop() == 0, one.log.read_text()


@pytest.fixture(scope="module")
def cached(serve: Callable[..., contextlib.AbstractContextManager[Server]]) -> Iterator[Server]:
    """A response cache in memory; its engine is slow enough to be watched."""
    flags = ("--optimizations.response-cache=true", f"--fake.step-time={STEP}", "--fake.faults=true")
    with serve(*flags, "--scheduler.max-sequences=8", "--drain.timeout=5") as one:
        yield one
        one.idle()
        assert one.stop() == 0, one.log.read_text()
