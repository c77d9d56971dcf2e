"""`whippet top`: its frame, and the command against a real server, on a terminal and off it."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from bench.redis_server import free_port
from service.cli import top as top_command
from service.cli.top_frame import Look, frame, quantile
from service.pb.whippet.v1 import admin_pb2
from tests.service.asked import greedy
from tests.service.cli.terminal import Terminal
from tests.service.conftest import PATIENCE, ROOT, STEP, Server, ask, ask_stream, refused

CACHED = ("--optimizations.response-cache=true", f"--fake.step-time={STEP}")
Serve = Callable[..., AbstractContextManager[Server]]


def load(uptime: int, **fields: object) -> admin_pb2.GetLoadResponse:
    return admin_pb2.GetLoadResponse(uptime=Duration(seconds=uptime), **fields)  # type: ignore[arg-type]


BEFORE = load(100, generated_tokens=1000, prompt_tokens=50, ended_calls={"OK": 10, "CANCELLED": 3}, restarts=1)
NOW = load(
    102,
    state=admin_pb2.ENGINE_STATE_READY,
    generated_tokens=3000,
    prompt_tokens=150,
    cached_tokens=50,
    ended_calls={"OK": 30, "CANCELLED": 3, "INTERNAL": 1},
    refused_requests={"QUEUE_FULL": 8},
    seconds={"first_token": admin_pb2.Distribution(borders=[0.1, 0.2], counts=[0, 10, 0], total=1.5)},
    used_pages=25,
    kept_pages=50,
    total_pages=100,
    page_size=16,
    cache_counts={"response_lookup.hit": 3, "response_lookup.miss": 1},
    cache_breakers={"answers": "open"},
    live_requests=7,
    running=4,
    max_sequences=8,
    restarts=2,
    version="1.2.3",
    model="a-model",
    runs_on="fast things",
    front_cpu=Duration(seconds=1),
    front_bytes=3 * 2**30,
    device_used_bytes=20 * 2**30,
    device_bytes=80 * 2**30,
)


def test_a_frame_tells_what_happened_between_two_looks() -> None:
    text = "\n".join(frame(Look(5.0, BEFORE), Look(7.0, NOW), 120))
    for told in (
        "whippet 1.2.3  a-model  ready  up 0:01:42",
        "7 live  4 of 8 running",
        "OK 10.0/s  INTERNAL 0.5/s",
        "QUEUE_FULL 4.0/s",
        "1,000.0/s generated  50.0/s of prompts  25.0/s of them cached",
        "150 ms     190 ms     199 ms         10",
        "25% used  50% kept  100 of 16 tokens",
        "response 75% found of 2.0/s  semantic -  prefix 50% of tokens",
        "answers NOT ASKED",
        "2 restarts",
        "50% of a core  3.0 GiB",
        "20.0 GiB of 80.0 GiB  25% used",
    ):
        assert told in text, text
    assert "CANCELLED" not in text  # none of late
    assert f"[{'#' * 8}{'-' * 15}{' ' * 7}]" in text


def test_a_server_that_was_started_again_begins_at_nothing() -> None:
    again = load(1, generated_tokens=10, ended_calls={"OK": 4})
    text = "\n".join(frame(Look(5.0, NOW), Look(7.0, again), 120))
    assert "OK 4.0/s" in text
    assert "10.0/s generated" in text


def test_an_engine_that_was_started_again_has_no_negative_rate() -> None:
    again = load(104, generated_tokens=10, restarts=3)
    text = "\n".join(frame(Look(5.0, NOW), Look(7.0, again), 120))
    assert "0.0/s generated" in text
    assert "/s -" not in text


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_piece_is_lost_from_80_columns_on(width: int) -> None:
    lines = frame(Look(5.0, BEFORE), Look(7.0, NOW), width)
    assert max(map(len, lines)) <= width
    if width >= 80:
        whole = " ".join(" ".join(lines).split())
        assert whole == " ".join(" ".join(frame(Look(5.0, BEFORE), Look(7.0, NOW), 500)).split())


def test_a_server_that_has_said_nothing_yet_has_a_frame() -> None:
    text = "\n".join(frame(Look(0.0, admin_pb2.GetLoadResponse()), Look(0.0, admin_pb2.GetLoadResponse()), 80))
    assert "nothing is loaded yet" in text


def test_quantiles() -> None:
    assert quantile([1.0, 2.0], [0, 0, 0], 0.5) is None
    assert quantile([1.0, 2.0], [2, 2, 0], 0.5) == 1.0
    assert quantile([1.0, 2.0], [2, 2, 0], 0.75) == 1.5
    assert quantile([1.0, 2.0], [0, 0, 5], 0.5) == 2.0  # nobody knows how much more


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "service.cli", "top", *arguments]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=60, env=environ, check=False
    )


def test_what_a_server_did_is_in_its_load(serve: Serve) -> None:
    with serve(*CACHED, "--limits.queued-requests=3") as server:
        for number in range(3):
            list(server.generation.GenerateStream(ask_stream(f"hello {number}", 20), timeout=60))
        refused(server.generation.Generate, ask(tokens=0))
        server.generation.Generate(greedy("again"), timeout=60)
        load = server.until(lambda load: load.ended_calls["OK"] == 4)
        assert dict(load.ended_calls) == {"OK": 4, "INVALID_ARGUMENT": 1}
        counts = {name: sum(one.counts) for name, one in load.seconds.items()}
        assert {name: counts[name] for name in ("first_token", "whole", "queue")} == {
            "first_token": 4,
            "whole": 4,
            "queue": 4,
        }
        assert counts["between_tokens"] > 0
        assert (load.queue_limit, load.queued_requests, load.live_requests, load.looking_requests) == (3, 0, 0, 0)
        assert load.max_sequences > 0
        assert load.prompt_tokens >= 3 * len("hello")
        assert load.front_bytes > 2**20
        assert load.front_cpu.ToNanoseconds() > 0
        assert load.model == "fake"
        assert "decoder" in load.runs_on
        done = top(server.admin_address, "--once", "--interval", "0.2")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"whippet {load.version}  fake  ready  up 0:00:")
        assert "\x1b" not in done.stdout
        assert "0 of 3 queued" in done.stdout


@pytest.mark.product
def test_once_without_a_server_is_one_line_and_an_exit_code() -> None:
    done = top("127.0.0.1:1", "--once")
    assert (done.returncode, done.stdout) == (64 + 14, "")
    assert done.stderr.startswith("whippet: UNAVAILABLE: no answer from 127.0.0.1:1")
    assert done.stderr.count("\n") == 1
    assert top("--interval", "0").returncode == 2


def test_who_may_not_look_is_told_at_once(serve: Serve, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("viewer", "caller")}
    tokens.write_text(
        f'[{{tenant: a, sha256: "{digest["viewer"]}", rights: [view]}},'
        f' {{tenant: a, sha256: "{digest["caller"]}", rights: [generate]}}]\n'
    )
    with serve(f"--auth.tokens-file={tokens}") as server:
        allowed = top(server.admin_address, "--once", "--interval", "0.1", "--token", "viewer")
        assert allowed.returncode == 0, allowed.stderr
        denied = top(server.admin_address, "--interval", "0.1", "--token", "caller")  # again and again, elsewhere
        assert (denied.returncode, denied.stdout) == (64 + 7, "")
        assert denied.stderr.startswith("whippet: PERMISSION_DENIED")


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    with Terminal(command(*arguments)) as one:
        yield one


def test_on_a_terminal_a_server_may_go_and_come_back(serve: Serve) -> None:
    address = f"127.0.0.1:{free_port()}"
    with serve(f"--admin-listen={address}") as server, terminal(address, "--interval", "0.1") as screen:
        screen.until(r"fake  ready")
        server.generation.Generate(ask("hello"), timeout=60)
        screen.until(r"ended +OK [1-9]")
        server.stop()
        screen.until(rf"trying again: UNAVAILABLE: no answer from {address}")
        with serve(f"--admin-listen={address}"):
            screen.until(r"\x1b\[H\x1b\[1mwhippet \S+  fake  ready")
            screen.type(b"xq")
            assert screen.process.wait(PATIENCE) == 0
    assert screen.said.startswith("\x1b[?1049h\x1b[?25l")


def test_a_terminal_is_given_back(server: Server) -> None:
    for keys in (b"q", b"\x03"):
        with terminal(server.admin_address, "--interval", "3600") as screen:
            screen.until(r"front +\d+%")
            if keys == b"q":
                screen.type(keys)
            else:
                screen.process.send_signal(signal.SIGINT)
            assert screen.process.wait(PATIENCE) == 0
            assert screen.rest().endswith("\x1b[?25h\x1b[?1049l")
            assert "Traceback" not in screen.said


def test_a_signal_that_another_thread_gets_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    wait = select.select

    def announced(*arguments: Any) -> Any:
        waits.set()
        return wait(*arguments)

    def interrupt() -> None:
        waits.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    monkeypatch.setattr(select, "select", announced)
    threading.Thread(target=interrupt, daemon=True).start()
    with top_command._screen() as ended, pytest.raises(KeyboardInterrupt):
        ended(3600)


def test_without_a_terminal_frames_follow_each_other(server: Server) -> None:
    with subprocess.Popen(
        command(server.admin_address, "--interval", "0.1"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        heads = 0
        for line in process.stdout:
            heads += line.startswith("whippet ")
            assert "\x1b" not in line
            if heads == 3:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
