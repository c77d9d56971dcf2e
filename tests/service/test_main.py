"""Start, stop and exit codes of the whole process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.redis_server import free_port
from service import main
from service.main import serve as serve_here
from service.pb.whippet.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, ROOT, Server, all_flags, ask, ask_stream, command, refused
from tests.service.drained import one_at_most_in_the_gap
from tests.service.forked import Template

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
# The second once a caller at most: `one_at_most_in_the_gap`.
ENDS_OF_A_DRAIN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def start(*flags: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A start that must fail."""
    return subprocess.run(
        command(*flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(environ or {})},
    )


def the_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("whippet: ")
    assert done.stdout == ""
    return lines[0]


@pytest.mark.product
def test_a_start_says_in_three_lines_what_serves_on_what_and_how_to_call_it(serve: Serve) -> None:
    with serve("--engine=fake", "--model-name=mine") as server:
        serving, call, ready = server.log.read_text().splitlines()[:3]
    assert serving.startswith("serving mine: ")
    assert call.startswith('call it: grpcurl -plaintext -d \'{"chat": ')
    assert call.endswith(f"{server.data} whippet.v1.GenerationService/Generate")
    assert ready.startswith(f"ready: data {server.data} admin ")
    assert "metrics http://127.0.0.1:" in ready


@pytest.mark.product
def test_bad_settings_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.yaml").write_text("scheduler: {max_sequencez: 3}\n")

    def pair(name: str) -> list[str]:
        return [f"--cache.redis-cert-file={tmp_path / name}", f"--cache.redis-key-file={tmp_path / name}"]

    for flags, environ, words in (
        (["--scheduler.max-sequences=0"], {}, ["scheduler.max-sequences"]),
        (["--warp=9"], {}, ["--warp"]),
        (["--engine=model"], {}, ["--model"]),
        ([f"--config={tmp_path}/bad.yaml"], {}, ["scheduler.max-sequencez"]),
        ([f"--config={tmp_path}/none.yaml"], {}, ["none.yaml"]),
        ([], {"WHIPPET_WARP": "9"}, ["WHIPPET_WARP"]),
        ([f"--auth.tokens-file={tmp_path}/none"], {}, ["auth.tokens-file"]),
        (["--tls.cert=a"], {}, ["tls", "key"]),
        (["--cache.redis-url=http://x"], {}, ["cache", "redis://"]),
        (["--cache.redis-url=redis://:secret@x:port/0"], {}, ["cache", "redis-url"]),
        (["--cache.redis-sentinels=a:1"], {}, ["cache", "redis-url"]),
        ([f"--cache.key-file={tmp_path}/none"], {}, ["cache.key-file"]),
        ([f"--cache.redis-password-file={tmp_path}/none"], {}, ["cache.redis-password-file"]),
        ([*pair("none"), "--cache.redis-url=rediss://x"], {}, ["cache.redis-cert-file", "none"]),
        ([*pair("bad.yaml"), "--cache.redis-url=rediss://x"], {}, ["cache.redis-ca-file, -cert-file and -key-file"]),
        (["--cache.semantic.mode=perhaps"], {}, ["cache.semantic.mode"]),
        ([f"--tls.cert={tmp_path}/none", f"--tls.key={tmp_path}/none"], {}, ["tls.cert"]),
    ):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            assert serve_here(["--engine=fake", *flags]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("whippet: ")
        assert err.count("\n") == 1
        assert all(word in err for word in words), err
        assert "secret" not in err


@pytest.mark.product
def test_the_process_ends_with_that_code() -> None:
    done = start("--warp=9")
    assert done.returncode == 2
    assert "--warp" in the_line(done)


@pytest.mark.product
def test_a_folder_that_is_no_model_is_one_line_and_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert serve_here([f"--model={folder}", "--engine=fake"]) == 3
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("whippet: ")
        assert str(folder) in err
        assert err.count("\n") == 1


def test_an_engine_that_refuses_is_exit_code_3(template: Template, tmp_path: Path) -> None:
    done = template.run(all_flags("--fake.vocab-size=5"), tmp_path)
    assert done.returncode == 3
    assert "vocabulary" in [line for line in done.stderr.splitlines() if line.startswith("whippet: ")][-1]


def test_another_model_than_the_one_demanded_is_exit_code_3(template: Template, tmp_path: Path) -> None:
    folder = ROOT / "models" / "demo-draft"
    done = template.run(all_flags(f"--model={folder}", f"--model-digest=sha256:{'0' * 64}"), tmp_path)
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("whippet: ")]
    assert f"{folder}: its digest is sha256:" in line
    assert template.run(all_flags(f"--model={folder}", "--model-digest=sha256:12"), tmp_path).returncode == 2


def test_a_folder_for_code_that_others_can_write_is_exit_code_2(template: Template, tmp_path: Path) -> None:
    open_to_all = tmp_path / "code"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    done = template.run(all_flags(f"--cache-dir={open_to_all}"), tmp_path)
    assert done.returncode == 2
    assert f"whippet: cache-dir: {open_to_all} can be written by others" in done.stderr


def test_help_is_no_error(template: Template, tmp_path: Path) -> None:
    done = template.run(all_flags("--help"), tmp_path)
    assert done.returncode == 0
    assert "--scheduler.max-sequences" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_at_once(serve: Serve, number: int) -> None:
    with serve() as server:
        engine = server.engine_pid()
        started = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - started < PATIENCE  # and not after the drain's time
        assert not Path(f"/proc/{engine}").exists()


@contextlib.contextmanager
def loading(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server that never gets ready, since its engine's interpreter does nothing; and its addresses."""
    sleeper = tmp_path / "python"
    sleeper.write_text(f'#!/bin/sh\ncase "$*" in *engine.worker*) exec sleep 60;; esac\nexec {sys.executable} "$@"\n')
    sleeper.chmod(0o755)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    names = ("listen", "admin-listen", "health-listen")
    flags = command(*(f"--{name}={address}" for name, address in zip(names, addresses, strict=True)))
    flags[2] = flags[2].replace("import sys; ", f"import sys; sys.executable = {str(sleeper)!r}; ", 1)
    with subprocess.Popen(flags, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, addresses
        finally:
            process.kill()


@pytest.mark.product
def test_while_loading_requests_are_told_to_come_back_and_a_signal_stops_it(tmp_path: Path) -> None:
    with loading(tmp_path) as (process, (data, admin, health)):
        with grpc.insecure_channel(data) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
            generation = generation_pb2_grpc.GenerationServiceStub(channel)
            for call, request in (
                (generation.Generate, ask("x", 1)),
                (generation.GenerateStream, ask_stream("x", 1)),
                (generation.Generate, ask("x", -1)),
                (generation.Tokenize, pb.TokenizeRequest(text="x")),
                (model_pb2_grpc.ModelServiceStub(channel).ListModels, model_pb2.ListModelsRequest()),
            ):
                refusal = refused(call, request)
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
                assert refusal.retry_ms > 0
        with grpc.insecure_channel(admin) as channel:
            load = admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest(), timeout=60)
            assert load.state == admin_pb2.ENGINE_STATE_LOADING
        with grpc.insecure_channel(health) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            serving = health_pb2.HealthCheckResponse.SERVING
            assert check(health_pb2.HealthCheckRequest(), timeout=60).status == serving
            name = "whippet.v1.GenerationService"
            assert check(health_pb2.HealthCheckRequest(service=name), timeout=60).status != serving
        ends, told = [list[grpc.StatusCode]() for _ in range(4)], threading.Event()

        def call_again_and_again(codes: list[grpc.StatusCode]) -> None:
            with grpc.insecure_channel(data) as channel:
                generate = generation_pb2_grpc.GenerationServiceStub(channel).Generate
                while process.poll() is None:
                    codes.append(generate.future(ask("x", 1), timeout=PATIENCE).code())
                    told.set()

        callers = [threading.Thread(target=call_again_and_again, args=(codes,)) for codes in ends]
        for caller in callers:
            caller.start()
        assert told.wait(PATIENCE)
        process.terminate()
        out, _ = process.communicate(timeout=60)
        for caller in callers:
            caller.join()
        assert process.returncode == 0
        assert "ready" not in out
        assert grpc.StatusCode.UNAVAILABLE in set().union(*ends) <= ENDS_OF_A_DRAIN
        assert all(one_at_most_in_the_gap(codes) for codes in ends), ends


def test_a_drain_loses_nothing(serve: Serve) -> None:
    """Under load, SIGTERM: everything that was let in is answered whole, everything else is told to come back."""
    with serve("--fake.step-time=0.002", "--scheduler.max-sequences=16") as server:
        ends: list[list[object]] = [[] for _ in range(12)]
        stop = threading.Event()

        def client(name: int, outcomes: list[object]) -> None:
            with grpc.insecure_channel(server.data) as channel:
                call = channel.unary_stream("/whippet.v1.GenerationService/GenerateStream")
                for turn in range(1000):
                    if stop.is_set():
                        return
                    try:
                        messages = list(call(ask_stream(f"{name} {turn}", 40).SerializeToString(), timeout=60))
                        outcomes.append(len(messages))
                    except grpc.RpcError as error:
                        outcomes.append(error.code())
                        if error.code() is grpc.StatusCode.UNAVAILABLE:
                            return

        threads = [threading.Thread(target=client, args=each) for each in enumerate(ends)]
        for thread in threads:
            thread.start()
        while sum(map(len, ends)) < 100:
            time.sleep(0.01)
        code = server.stop()
        stop.set()
        for thread in threads:
            thread.join(60)
        assert code == 0
        assert {end for outcomes in ends for end in outcomes} <= {40, *ENDS_OF_A_DRAIN}
        assert all(one_at_most_in_the_gap(outcomes) for outcomes in ends), ends


def test_what_outlives_the_drain_is_cut_off_with_unavailable(serve: Serve) -> None:
    with serve("--fake.step-time=0.05", "--drain.timeout=0.5") as server:
        call = server.generation.GenerateStream(ask_stream("long", 3000), timeout=60)
        next(call)
        started = time.monotonic()
        server.process.terminate()
        refusal = refused(lambda **_: iter(call))
        assert refusal.code is grpc.StatusCode.UNAVAILABLE
        assert refusal.message == "the server is stopping"
        assert refusal.retry_ms > 0
        assert server.process.wait(60) == 1
        assert 0.4 < time.monotonic() - started < PATIENCE


def test_a_second_signal_ends_the_wait(serve: Serve) -> None:
    with serve("--fake.step-time=0.05", "--drain.timeout=600") as server:
        call = server.generation.GenerateStream(ask_stream("long", 3000), timeout=60)
        next(call)
        server.process.terminate()
        for _ in range(20):
            next(call)
        assert server.process.poll() is None
        server.process.terminate()
        assert server.process.wait(60) == 1


def test_prompts_and_answers_stay_out_of_the_log(serve: Serve) -> None:
    with serve("--log-level=debug", "--fake.faults=true") as server:
        canary = "canary-in-a-coal-mine"
        answer = server.generation.Generate(ask(canary, 30, request_id="seen"), timeout=60).text
        refused(server.generation.Generate, ask(canary, -1))
        refused(server.generation.Generate, ask(token_ids=pb.TokenIds(ids=[0, 1, 0, *canary.encode()])))
        assert server.stop() == 0
        log = server.log.read_text()
        assert canary not in log
        assert answer not in log
        assert ", ".join(str(byte) for byte in canary.encode()[:5]) not in log


@pytest.mark.product
def test_the_front_never_imports_torch() -> None:
    code = "import sys, service.serving; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "environ", "kind"),
    [
        (["--model=m"], {}, "model"),
        (["--model", "m"], {}, "model"),
        ([], {"WHIPPET_MODEL": "m"}, "model"),
        (["--model=m", "--engine=fake"], {}, "fake"),
        (["--model=m", "--engine.kind", "fake"], {}, "fake"),
        (["--config=c.yaml"], {}, "fake"),  # what it says is not known yet, and nothing is imported in vain
    ],
)
def test_what_is_imported_before_the_settings_are_read(
    flags: list[str], environ: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WHIPPET_MODEL", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main._kind(flags) == kind
