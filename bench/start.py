"""Measures a start with an empty cache of kernels, with kernels compiled ahead, and with a full cache, by its phases.

    python -m bench.start --model bench/models/qwen3-0.6b --load-format dummy --max-context 1024

`engine` is the engine process: seconds from its start to the end of each phase that it reports. `server` is a whole
server, from its start to its readiness, and what the first requests then wait for their first tokens. Ends in one JSON
line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import selectors
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc

from bench import own_server
from bench import result as about
from bench.front import STREAM
from bench.grpc_frames import FrameClient, ReceivedStream
from bench.own_server import server, with_tokenizer
from bench.pace import quantile
from bench.result import Result, Samples, finish, run_one_of, summary
from bench.serving.caller import message
from bench.serving.jobs import LoadJob, LoadRequest
from engine.ipc.frames import LoadProgress, Ready, report_reader
from engine.launch import Begun
from engine.settings import EngineSettings
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

_REQUESTS = 20  # the first
_UNCACHED = (
    "--optimizations.response-cache=false",
    "--cache.semantic.mode=off",
)  # the embedder would be exported meanwhile
_LONGEST = 300.0  # seconds of a start


def engine(settings: EngineSettings, cache: Path) -> dict[str, Any]:
    with _environment(WHIPPET_CACHE_DIR=str(cache)):
        began = time.monotonic()
        begun = Begun(settings.kind)
        begun.tell(settings)
    ours, process, _ = begun.take()
    ends: dict[str, float] = {}
    decoder, reader = None, report_reader()
    with ours:
        while decoder is None and select.select([ours], [], [], _LONGEST)[0]:
            for report in reader.feed(data) if (data := ours.recv(1 << 16)) else _gone():
                if isinstance(report, LoadProgress):
                    ends[report.stage] = round(time.monotonic() - began, 2)
                elif isinstance(report, Ready):
                    ends["ready"] = round(time.monotonic() - began, 2)
                    decoder = report.info.decoder
    process.kill()
    process.wait()
    return {"ends": ends, "decoder": decoder, "compiled": len(list((cache / "kernels").glob("*.cubin")))}


def _gone() -> Iterator[Any]:
    raise RuntimeError("the engine process did not start")


def first_tokens(address: str) -> dict[str, float]:
    """Measures milliseconds until the first token of each of the first requests, one after the other."""
    found = []
    with grpc.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for number in range(_REQUESTS):
            request = pb.GenerateStreamRequest(text=f"{number}: def read_json(path):")
            request.stopping.max_tokens = 8
            begun = time.monotonic()
            stream = iter(stub.GenerateStream(request, timeout=120))
            next(stream)
            found.append(1e3 * (time.monotonic() - begun))
            for _ in stream:
                pass
    return {"first": round(found[0], 1), "median": round(statistics.median(found), 1), "worst": round(max(found), 1)}


def command(argv: Sequence[str] | None = None) -> Result:
    """Measures starts that are empty, ahead where there is such a folder, and full; engine and server."""
    flags = _parser().parse_args(argv)
    given = {name: value for name in _GIVEN if (value := getattr(flags, name)) is not None}
    settings = EngineSettings(model=str(flags.model), **given)
    asked = [*_UNCACHED]
    asked += [f"--{_flag(name)}={value}" for name, value in given.items()]
    ahead = {} if flags.ahead is None else {"ahead": {"WHIPPET_PREBUILT_DIR": str(flags.ahead.resolve())}}
    kinds: Mapping[str, Mapping[str, str]] = {"empty": {}, "full": {}, **ahead}
    found: dict[str, Any] = {"model": flags.model.name, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        served = with_tokenizer(flags.model, Path(folder) / "model")
        for kind, environment in kinds.items():
            caches = Path(folder) / ("ahead" if kind == "ahead" else "kept")  # which the first start fills
            with _environment(**environment):
                if flags.part != "server":
                    found[f"engine {kind}"] = starts = engine(settings, caches / "engine")
                    print(f"engine {kind}: {starts['compiled']} kernels, {starts['ends']}", flush=True)
                if flags.part != "engine":
                    with server([f"--cache-dir={caches}/server", f"--model={served}", *asked]) as one:
                        found[f"server {kind}"] = {"ready": round(one.seconds, 2), "ttft_ms": first_tokens(one.address)}
                    print(f"server {kind}: {found[f'server {kind}']}", flush=True)
    samples = {
        f"{name}, ready": Samples("s", (row["ends"]["ready"] if "ends" in row else row["ready"],))
        for name, row in found.items()
        if isinstance(row, dict)
    }
    return Result("start", {**vars(flags), "model": flags.model.name}, found, samples)


def main() -> int:
    return finish(command())


def _flag(name: str) -> str:
    plain = name.replace("_", "-")
    return plain if name in ("device", "load_format") else f"scheduler.{plain}"


_GIVEN = ("device", "load_format", "max_sequences", "max_context", "kv_bytes")


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.start", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-sequences", type=int)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--kv-bytes", type=int)
    parser.add_argument("--ahead", type=Path, metavar="FOLDER", help="what `whippet prebuild` made; a third case")
    parser.add_argument("--part", choices=("engine", "server"), help="default: both")
    return parser


_SPIN = 0.001  # seconds before a burst in which its caller no longer sleeps
_WARM = 3  # bursts that do not count


class BurstCallers:
    def __init__(self, address: str, count: int) -> None:
        self._clients = [FrameClient(address, time.monotonic) for _ in range(count)]
        self._job = LoadJob(0.0, [], vocabulary=own_server.served_model(address).limits.vocab_size)
        self._asked = 0

    def burst(self, count: int, prompt: int, tokens: int, gap: float) -> list[float]:
        """Measures milliseconds from each request to its first token, ascending. All are sent at once, `gap` seconds
        from now. Raises RuntimeError where one was not answered."""
        due = time.monotonic() + gap
        prepared: list[tuple[FrameClient, ReceivedStream, bytes]] = []
        for client in self._clients[:count]:
            self._asked += 1
            asked = message(LoadRequest(self._asked, prompt, tokens), self._job).SerializeToString()
            stream, data = client.prepare(STREAM, asked)
            prepared.append((client, client.streams[stream], data))
        time.sleep(max(0.0, due - time.monotonic() - _SPIN))
        while time.monotonic() < due:
            pass
        sent = []
        for client, _, data in prepared:
            sent.append(time.monotonic())
            client.socket.sendall(data)
        self._read([(client, stream) for client, stream, _ in prepared])
        return sorted(1000 * ((stream.first_at or 0.0) - at) for (_, stream, _), at in zip(prepared, sent, strict=True))

    def _read(self, calls: Sequence[tuple[FrameClient, ReceivedStream]]) -> None:
        with selectors.DefaultSelector() as waiting:
            for client, _ in calls:
                waiting.register(client.socket, selectors.EVENT_READ, client)
            while any(stream.status is None for _, stream in calls):
                for key, _ in waiting.select():
                    if not key.data.read():
                        raise RuntimeError("the server has hung up")
        if bad := [stream.status for _, stream in calls if stream.status or stream.first_at is None]:
            raise RuntimeError(f"calls ended with {bad}")

    def close(self) -> None:
        for client in self._clients:
            client.close()


def measure(tree: Path | None, flags: Sequence[str], given: argparse.Namespace) -> dict[int, list[list[float]]]:
    """Returns by number of prompts the first tokens of each burst. A server of its own."""
    found: dict[int, list[list[float]]] = {count: [] for count in given.together}
    with (
        own_server.server(flags, tree) as server,
        closing(BurstCallers(server.address, max(given.together))) as callers,
    ):
        for number in range(_WARM + given.bursts):
            for count in given.together:
                took = callers.burst(count, given.prompt, given.tokens, given.gap)
                if number >= _WARM:
                    found[count].append(took)
    return found


def bursts_main(argv: Sequence[str] | None = None) -> int:
    """Measures first tokens of prompts that arrive together at a server that has been idle, as bare sockets see them.
    Prints a table and ends in one JSON line.

        python -m bench.start bursts --model bench/models/qwen3-0.6b --load-format=dummy
        git worktree add ../before COMMIT && python -m bench.start bursts --engine=fake --beside ../before

    Flags that are not ours are the server's. With `--beside`, servers of the two trees run in turns, one at a time,
    since hosts differ from minute to minute by more than most changes do.
    """
    parser = argparse.ArgumentParser(description=summary(bursts_main), allow_abbrev=False)
    parser.add_argument("--model", help="a folder; with --load-format=dummy its config.json suffices")
    parser.add_argument("--beside", type=Path, help="another tree")
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in")
    parser.add_argument("--tokens", type=int, default=16, help="tokens out")
    parser.add_argument("--gap", type=float, default=0.3, help="seconds of nothing before a burst")
    parser.add_argument("--bursts", type=int, default=16, help="of each number of prompts, of one server")
    parser.add_argument("--turns", type=int, default=2, help="servers of each tree")
    given, flags = parser.parse_known_args(argv)
    trees = [None] if given.beside is None else [None, given.beside]
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        if given.model is not None:
            model = own_server.with_tokenizer(Path(given.model).resolve(), Path(folder) / Path(given.model).name)
            served = [f"--model={model}", *flags]
        else:
            served = flags
        for _ in range(given.turns):
            for tree in trees:
                for count, bursts in measure(tree, served, given).items():
                    name = "this tree" if tree is None else tree.name
                    print(_row(name, count, [max(burst) for burst in bursts]), flush=True)
                    records.append(
                        {
                            "tree": name,
                            "revision": about.revision(tree or about.ROOT),
                            "together": count,
                            "first_tokens_ms": [[round(one, 3) for one in burst] for burst in bursts],
                        }
                    )
    about_run = {"device": about.device(), "model": Path(given.model or "").name, "flags": flags, "gap_s": given.gap}
    print(json.dumps({**about_run, "bursts": records}))
    return 0


def _row(name: str, count: int, last: Sequence[float]) -> str:
    """Returns a table's row of the last first token of each burst."""
    return (
        f"{name:16} {count:3} together: the last first token after "
        f"{min(last):6.2f} ms at best, {quantile(last, 0.5):6.2f} median, {quantile(last, 0.9):6.2f} p90"
    )


if __name__ == "__main__":
    sys.exit(run_one_of(main, bursts=bursts_main))
