"""The smoke test passes on good servers and fails, saying why, on bad ones."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.service.config.front_proofs import certify
from tests.service.transport.test_token_file import entry

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "scripts" / "smoke.sh"
LOCAL = ROOT / "scripts" / "smoke-local.sh"
CHECKS = 12
MORE = 7  # of a server of one's own: admin port, health port, a drain and back

Done = subprocess.CompletedProcess[str]
Smoke = Callable[..., Done]


def script(*command: str | Path, **environ: str | Path) -> Done:
    environment = {**os.environ, **{name: str(value) for name, value in environ.items()}}
    return subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=170)


@pytest.fixture(params=["fake", "served_awq"])
def address(request: pytest.FixtureRequest) -> str:
    running = request.getfixturevalue(request.param)
    return str(running.data)


def test_it_passes_on_a_good_server(address: str, grpcurl: Path) -> None:
    done = script(SMOKE, address, GRPCURL=grpcurl)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"smoke: {CHECKS} passed, 0 failed against {address}"
    assert done.stdout.count("\nok ") + 1 == CHECKS
    assert "FAIL" not in done.stdout


def test_grpcurl_is_taken_from_the_path(fake: object, grpcurl: Path) -> None:
    address = fake.data  # type: ignore[attr-defined]
    done = script(SMOKE, address, PATH=f"{grpcurl.parent}:{os.environ['PATH']}", GRPCURL="")
    assert done.returncode == 0, done.stdout + done.stderr


def test_flags_replace_plaintext(fake: object, grpcurl: Path) -> None:
    address = fake.data  # type: ignore[attr-defined]
    assert script(SMOKE, address, "-plaintext", "-H", "x-test: 1", GRPCURL=grpcurl).returncode == 0
    done = script(SMOKE, address, "-insecure", GRPCURL=grpcurl)  # TLS to a plaintext port
    assert done.returncode == 1
    assert "tls" in done.stdout.lower()


def test_nobody_there(grpcurl: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        done = script(SMOKE, address, GRPCURL=grpcurl)
    assert done.returncode == 1
    assert "FAIL list: exit code 1 instead of 0" in done.stdout
    assert "connection refused" in done.stdout
    assert done.stdout.splitlines()[-1] == f"smoke: {address} does not answer; nothing else was tried"


def test_the_wrong_port_of_the_right_server(fake: object, grpcurl: Path) -> None:
    done = script(SMOKE, fake.admin, GRPCURL=grpcurl)  # type: ignore[attr-defined]
    assert done.returncode >= 5
    assert "FAIL list: no /^whippet.v1.GenerationService$/ in its answer" in done.stdout
    assert "FAIL generate: exit code" in done.stdout


@pytest.mark.parametrize(("arguments", "says"), [((), "usage"), (("127.0.0.1:1",), "not found")])
def test_a_wrong_call(arguments: tuple[str, ...], says: str) -> None:
    done = script(SMOKE, *arguments, GRPCURL="/no/grpcurl")
    assert done.returncode == 2
    assert says in done.stderr


# What a grpcurl that lies does for one method: sed over its output, or another exit code.
LIES = {
    "health": ("Health/Check", "s/SERVING/NOT_SERVING/", None),
    "models": ("ListModels", 's/"[0-9a-f]\\{64\\}"/"x"/', None),
    "generate": ("Service/Generate ", "s/_LENGTH/_STOP/", None),
    "stream": ("GenerateStream", 's/"prompt_\\?[iI]nfo"/"info"/', None),
    "tokenize": ("Service/Tokenize ", "/[0-9]/d", None),
    "detokenize gives the text back": ("Service/Detokenize ", "s/third/fourth/", None),
    "describe": ("describe", "/Detokenize/d", None),
    "an invalid request is refused field by field": ("Service/Generate ", "s/top_p/other/", None),
    "an unknown model is not found": ("Service/Generate ", "", 67),
    "chat": ("Service/Generate ", "", 70),
}


@pytest.fixture(scope="module")
def recorded(fake: object, grpcurl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grpcurl that says again what the real one said of a good server; asked anything else, it asks the real one."""
    folder = tmp_path_factory.mktemp("recorded")
    player = executable(
        folder / "grpcurl",
        'at="$0.$(printf %s "$*" | cksum | tr " " -)"',
        'if [ ! -e "$at.code" ]; then',
        f'  {shlex.quote(str(grpcurl))} "$@" >"$at.out" 2>"$at.err"; echo $? >"$at.code"',
        "fi",
        'cat "$at.out"; cat "$at.err" >&2; exit "$(cat "$at.code")"',
    )
    done = script(SMOKE, fake.data, GRPCURL=player)  # type: ignore[attr-defined]
    assert done.returncode == 0, done.stdout
    assert len(list(folder.glob("*.code"))) == CHECKS
    return player


def executable(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("check", LIES)
def test_every_check_can_fail(fake: object, recorded: Path, tmp_path: Path, check: str) -> None:
    method, edit, code = LIES[check]
    liar = executable(
        tmp_path / "grpcurl",
        f'{shlex.quote(str(recorded))} "$@" >"$0.out" 2>"$0.err"; code=$?',
        'case "$* " in',
        f"*{shlex.quote(method)}*)",
        f'  sed {shlex.quote(edit)} "$0.out"; sed {shlex.quote(edit)} "$0.err" >&2',
        f"  exit {'$code' if code is None else code} ;;",
        "esac",
        'cat "$0.out"; cat "$0.err" >&2; exit $code',
    )
    done = script(SMOKE, fake.data, GRPCURL=liar)  # type: ignore[attr-defined]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert done.returncode == len(failed) > 0
    assert any(line.startswith(f"FAIL {check}: ") for line in failed), done.stdout


@pytest.mark.parametrize(
    ("method", "check"),
    [
        ("GetLoad", "load"),
        ("AdminService/Drain", "a drain"),
        ("Undrain", "back in service"),
    ],
)
def test_so_can_those_of_the_admin_port(fake: object, grpcurl: Path, tmp_path: Path, method: str, check: str) -> None:
    """Where the method's answer is another one."""
    real = shlex.quote(str(grpcurl))
    liar = executable(
        tmp_path / "grpcurl",
        f'case "$* " in *"{method} "*)',
        f'  {real} "$@" >/dev/null; echo \'{{"remaining": 3}}\'; exit {int(method == "Undrain")} ;;',
        "esac",
        f'exec {real} "$@"',
    )
    done = script(SMOKE, fake.data, GRPCURL=liar, ADMIN=fake.admin, DRAIN="yes")  # type: ignore[attr-defined]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert done.returncode == len(failed) == 1
    assert failed[0].startswith(f"FAIL {check}: "), done.stdout


def test_a_server_with_tls_and_tokens(serve: Serve, grpcurl: Path, tmp_path: Path) -> None:
    certify(tmp_path)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(entry(rights="[generate, admin]"))
    pair = (f"--tls.cert={tmp_path}/server.pem", f"--tls.key={tmp_path}/server.key")
    with serve("--engine=fake", f"--auth.tokens-file={tokens}", *pair) as one:
        ports = {"ADMIN": one.admin, "HEALTH": one.health, "DRAIN": "yes"}
        done = script(SMOKE, one.data, "-insecure", "-H", "authorization: Bearer secret", GRPCURL=grpcurl, **ports)
        assert done.returncode == 0, done.stdout
        assert f"{CHECKS + MORE + 3} passed, 0 failed" in done.stdout


def test_a_server_of_its_own(whippet: Path, grpcurl: Path) -> None:
    done = script(LOCAL, "--engine", "fake", WHIPPET=whippet, GRPCURL=grpcurl)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CHECKS + MORE} passed, 0 failed" in done.stdout


def test_a_server_that_does_not_start(whippet: Path, grpcurl: Path) -> None:
    done = script(LOCAL, "--model", "/no/model", WHIPPET=whippet, GRPCURL=grpcurl)
    assert done.returncode == 2
    assert "/no/model" in done.stderr


def test_a_server_that_ends_badly(tmp_path: Path, whippet: Path, grpcurl: Path) -> None:
    """All checks pass, yet the exit code tells."""
    rude = executable(
        tmp_path / "whippet",
        f'"{whippet}" "$@" &',
        "server=$!",
        'trap \'kill "$server"; wait "$server"; exit 7\' TERM',
        'wait "$server"',
    )
    done = script(LOCAL, "--engine", "fake", WHIPPET=rude, GRPCURL=grpcurl)
    assert done.returncode == 2
    assert "0 failed" in done.stdout
    assert "ended with exit code 7" in done.stderr
