"""First tokens of prompts that come together to a server that has been idle, as bare sockets see them. Prints a table
and ends in one JSON line.

    python -m bench.bursts --model bench/models/qwen3-0.6b --load-format=dummy
    git worktree add ../before COMMIT && python -m bench.bursts --engine=fake --beside ../before

Flags that are not ours are the server's. With `--beside`, servers of the two trees run in turns, one at a time, since
hosts differ from minute to minute by more than most changes do.
"""

from __future__ import annotations

import argparse
import json
import selectors
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench import about, own_server
from bench.front import STREAM
from bench.grpc_frames import FrameClient, Stream
from bench.pace import quantile
from bench.serving.caller import message
from bench.serving.jobs import Job, Wish

_SPIN = 0.001  # seconds before a burst in which its caller no longer sleeps
_WARM = 3  # bursts that do not count


class Callers:
    """Connections that call a server together."""

    def __init__(self, address: str, count: int) -> None:
        self._clients = [FrameClient(address, time.monotonic) for _ in range(count)]
        self._job = Job(0.0, [], vocabulary=own_server.served_model(address).limits.vocab_size)
        self._asked = 0

    def burst(self, count: int, prompt: int, tokens: int, gap: float) -> list[float]:
        """Milliseconds from each request to its first token, ascending. All are sent at once, `gap` seconds from now.
        Raises RuntimeError where one was not answered."""
        due = time.monotonic() + gap
        prepared: list[tuple[FrameClient, Stream, bytes]] = []
        for client in self._clients[:count]:
            self._asked += 1
            asked = message(Wish(self._asked, prompt, tokens), self._job).SerializeToString()
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

    def _read(self, calls: Sequence[tuple[FrameClient, Stream]]) -> None:
        """To the end of all."""
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
        """Hangs up."""
        for client in self._clients:
            client.close()


def measure(tree: Path | None, flags: Sequence[str], given: argparse.Namespace) -> dict[int, list[list[float]]]:
    """By number of prompts, the first tokens of each burst. A server of its own."""
    found: dict[int, list[list[float]]] = {count: [] for count in given.together}
    with own_server.server(flags, tree) as server, closing(Callers(server.address, max(given.together))) as callers:
        for number in range(_WARM + given.bursts):
            for count in given.together:
                took = callers.burst(count, given.prompt, given.tokens, given.gap)
                if number >= _WARM:
                    found[count].append(took)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
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
    """Of the last first token of each burst."""
    return (
        f"{name:16} {count:3} together: the last first token after "
        f"{min(last):6.2f} ms at best, {quantile(last, 0.5):6.2f} median, {quantile(last, 0.9):6.2f} p90"
    )


if __name__ == "__main__":
    sys.exit(main())
