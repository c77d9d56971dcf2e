"""Other people's gateways and clients, in processes of their own: they want another grpcio than ours, and bring
descriptors of the same names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.redis_server import free_port

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".tools" / "gateways"
_PATIENCE = 90.0  # seconds


def environ() -> dict[str, str]:
    """In which Python finds them before what is installed."""
    assert (FOLDER / ".made").exists(), "`make .tools/gateways/.made` fetches them"
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(FOLDER), str(ROOT)))}


def run(*words: str, timeout: float = _PATIENCE) -> bytes:
    """What a Python process with them prints."""
    done = subprocess.run([sys.executable, *words], env=environ(), cwd=ROOT, capture_output=True, timeout=timeout)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@dataclass(frozen=True)
class Answer:
    """Of an HTTP request."""

    status: int
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream."""
        lines = [line.removeprefix("data: ") for line in self.body.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass(frozen=True)
class Gateway:
    """SMG: OpenAI's HTTP in front of servers."""

    address: str

    def ask(self, path: str, **body: Any) -> Answer:
        """POST."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.address}/v1/{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                return Answer(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode())

    def chat(self, text: str, **body: Any) -> Answer:
        """A greedy chat of one message."""
        return self.ask("chat/completions", messages=[{"role": "user", "content": text}], **{"temperature": 0, **body})


@contextlib.contextmanager
def smg(folder: Path, model: str, *workers: str) -> Iterator[Gateway]:
    """In front of the data ports `workers`, for the length of a `with` block. It routes by prefix."""
    port, metrics = free_port(), free_port()
    words = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--policy", "cache_aware"]
    words += ["--worker-urls", *(f"grpc://{address}" for address in workers)]
    with (folder / "smg.log").open("wb") as log:
        process = subprocess.Popen(words, env=environ(), cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    gateway = Gateway(f"127.0.0.1:{port}")
    try:
        end = time.monotonic() + _PATIENCE
        while not _answers(gateway, model):
            assert process.poll() is None, (folder / "smg.log").read_text()
            assert time.monotonic() < end, (folder / "smg.log").read_text()
            time.sleep(0.1)
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(gateway: Gateway, model: str) -> bool:
    """It has found the servers, and has their tokenizer."""
    try:
        return gateway.chat("ready?", model=model, max_tokens=1).status == 200
    except OSError:
        return False
