"""Starts a server on loopback, and measures its processes' use of the processor. Needs only what servers need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from bench.grpc_frames import FrameClient, ReceivedStream
from bench.pace import PacedAnswer
from engine.api import SamplingParams
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1 import model_pb2
from service.pb.whippet.v1.model_pb2_grpc import ModelServiceStub

TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "demo" / "tokenizer.json"
_READY = re.compile(r"^ready: data (\S+) admin (\S+)")


def with_tokenizer(model: Path, target: Path) -> Path:
    """Returns the model itself. Of a folder without a tokenizer, one like it with the demo's, filled up with made-up
    tokens."""
    if model.is_file() or (model / "tokenizer.json").exists():
        return model
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads(TOKENIZER.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary.update({f"token{at}": at for at in range(config["vocab_size"]) if at not in known})
    target.mkdir(parents=True)
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file in model.iterdir():
        shutil.copy(file, target / file.name) if file.suffix == ".json" else (target / file.name).symlink_to(file)
    return target


class RunningServer:
    metadata: tuple[tuple[str, str], ...] = ()  # no token is needed

    def __init__(self, address: str, pid: int, seconds: float, admin: str = "") -> None:
        self.address = address
        self.admin = admin
        self.seconds = seconds  # from its start to its readiness
        self.pid = pid

    def cpu(self) -> float:
        """Returns seconds of processor time so far, front and engine."""
        return sum(cpu_seconds(pid) for pid in (self.pid, *self._children()))

    def relays_cpu(self) -> float:
        relays = [pid for pid in self._children() if b"transport.relays" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return sum(map(cpu_seconds, relays))

    def _children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]


class Remote:
    """A foreign server, whose processes are unknown."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def cpu(self) -> float:
        """Returns no figure, because nothing is known of its processes."""
        return 0.0


@contextmanager
def server(flags: Sequence[str], tree: Path | None = None) -> Iterator[RunningServer]:
    """Yields a server on free ports, until the context ends; of `tree`, where one is given."""
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen", "metrics-listen")]
    code = "import sys; from service.main import serve; sys.exit(serve(sys.argv[1:]))"
    began = time.monotonic()
    command = [sys.executable, "-c", code, "--log-level=warning", *ports, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tree) as process:
        try:
            address, admin = _addresses(process)
            yield RunningServer(address, process.pid, time.monotonic() - began, admin)
        finally:
            process.terminate()
            process.wait(20)


def _addresses(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns the addresses of the data port and of the admin port."""
    for line in process.stdout or ():
        if match := _READY.match(line):
            return match[1], match[2]
    raise RuntimeError("the server did not start")


def served_model(address: str, token: str = "") -> model_pb2.Model:
    make: Any = ModelServiceStub
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        listed = make(channel).ListModels(model_pb2.ListModelsRequest(), metadata=metadata, timeout=60)
    first: model_pb2.Model = listed.models[0]
    return first


def cpu_seconds(pid: int) -> float:
    """Returns a process's seconds so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


STREAM = "/whippet.v1.GenerationService/GenerateStream"


def request(prompt: Sequence[int], tokens: int, sampling: SamplingParams) -> bytes:
    """Makes a request for exactly `tokens` tokens, as text and ids, straight from the model."""
    message = pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=prompt))
    message.stopping.max_tokens = tokens
    message.stopping.ignore_eos = True
    message.output.text = message.output.token_ids = True
    message.cache.response = message.cache.semantic = pb.CACHE_MODE_OFF
    message.cache.bypass_prefix = True
    message.sampling.temperature = sampling.temperature
    message.sampling.top_k = sampling.top_k
    message.sampling.top_p = sampling.top_p
    message.sampling.min_p = sampling.min_p
    message.sampling.repetition_penalty = sampling.repetition_penalty
    message.sampling.presence_penalty = message.sampling.frequency_penalty = 0.0
    message.sampling.seed = sampling.seed
    return message.SerializeToString()


def ask(running: RunningServer | Remote, prompt: Sequence[int], tokens: int, sampling: SamplingParams) -> PacedAnswer:
    payloads: list[tuple[float, bytes]] = []
    marks: list[float] = []

    def on_message(stream: ReceivedStream, data: bytes) -> None:
        payloads.append((time.monotonic(), data))  # decoded afterwards, out of the way
        if len(payloads) == 1:
            marks.append(running.cpu())

    message = request(prompt, tokens, sampling)
    with FrameClient(running.address, time.monotonic, on_message=on_message) as client:
        answer = PacedAnswer(time.monotonic())
        stream = client.streams[client.start(STREAM, message, running.metadata)]
        while client.ended < 1 and client.read():
            pass
        answer.cpu = running.cpu() - (marks[0] if marks else 0.0)
    for at, data in payloads:
        count = len(pb.GenerateStreamResponse.FromString(data).token_ids)
        if count:
            answer.arrivals.append((at, count))
    if stream.status != 0 or answer.tokens != tokens:
        reason = stream.headers.get("grpc-message", "")
        raise RuntimeError(f"status {stream.status} ({reason}), {answer.tokens} of {tokens} tokens came")
    return answer
