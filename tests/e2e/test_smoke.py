"""The smoke test passes on good servers, of every kind of guard, and says what is wrong with a call of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from service.version import version
from tests.e2e.conftest import Running
from tests.e2e.faults import ADMIN, BROKEN, Fault, either, hangs, knows_everybody, spoilt
from tests.e2e.smoked import ROOT, SMOKE, failures, passed, script
from tests.service.certificates import HERE, Authority, write_pair
from tests.service.conftest import Server
from tests.service.forked import Template
from tests.service.transport.presented import entry

LOCAL = ROOT / "scripts" / "smoke-local.sh"
CHECKS = 16
TLS = {"plaintext is refused where TLS is spoken"}
CERTIFICATE = {"without a certificate nobody is connected"}
TOKEN = {"without a token nobody is served", "nor with a token that nobody has"}
ADMIN_TOKEN = {"nor on the admin port"}
OWN = {  # with ADMIN, HEALTH and DRAIN
    "the health port",
    "load",
    "optimizations",
    "a drain",
    "health of a drained server",
    "a drained server refuses",
    "back in service",
}


@dataclass(frozen=True)
class Guarded:
    """A server, the flags of grpcurl for it, and what is asked of such a one beside what is asked of all."""

    server: Running
    flags: tuple[str, ...]
    more: frozenset[str]


Servers = dict[str, Guarded]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority("ours")
    (folder / "ca.pem").write_bytes(authority.pem)
    write_pair(folder, "server", authority.sign(*HERE))
    write_pair(folder, "client", authority.sign())
    (folder / "tokens.yaml").write_text(entry(rights="[generate, admin]"))
    return folder


@pytest.fixture(scope="module")
def guarded(
    fake: Running, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Guarded]]:
    """With TLS or without, with tokens or without; and one that wants certificates of its callers."""
    pair = (f"--tls.cert={certificates}/server.pem", f"--tls.key={certificates}/server.key")
    tokens = (f"--auth.tokens-file={certificates}/tokens.yaml",)
    cacert, bearer = ("-cacert", f"{certificates}/ca.pem"), ("-H", "authorization: Bearer secret")
    client = ("-cert", f"{certificates}/client.pem", "-key", f"{certificates}/client.key")
    with contextlib.ExitStack() as stack:
        template = Template()
        stack.callback(template.close)

        def start(*flags: str) -> Running:
            log = tmp_path_factory.mktemp("server") / "log"
            server = Server(template, *flags, "--optimizations.response-cache=true", log=log)
            stack.callback(server.close)
            return Running(server.data, server.admin_address, server.health)

        yield {
            "plain": Guarded(fake, ("-plaintext",), frozenset()),
            "tokens": Guarded(start(*tokens), ("-plaintext", *bearer), frozenset(TOKEN | ADMIN_TOKEN)),
            "TLS": Guarded(start(*pair), cacert, frozenset(TLS)),
            "TLS and tokens": Guarded(start(*pair, *tokens), (*cacert, *bearer), frozenset(TLS | TOKEN | ADMIN_TOKEN)),
            "certificates and tokens": Guarded(
                start(*pair, *tokens, f"--tls.client-ca={certificates}/ca.pem"),
                (*cacert, *client, *bearer),
                frozenset(TLS | CERTIFICATE | {"nor with a token that nobody has"}),
            ),
        }


@pytest.mark.product
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "certificates and tokens",
        *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("tokens", "TLS", "TLS and tokens")),
    ],
)
def test_it_passes_whatever_guards_the_server(kind: str, guarded: Servers, grpcurl: Path) -> None:
    """`make smoke`, as one types it, to a server that runs."""
    one = guarded[kind]
    ports = {"ADMIN": one.server.admin, "HEALTH": one.server.health, "DRAIN": "yes", "VERSION": version()}
    flags = " ".join(f"'{flag}'" for flag in one.flags)
    installed = f"{sys.prefix}/.test"  # as it is: a test installs nothing
    words = ("make", "-s", "-C", ROOT, f"VENV={sys.prefix}", "-o", installed, "smoke")
    done = script(*words, f"ADDRESS={one.server.data}", f"ARGS={flags}", GRPCURL=grpcurl, **ports)
    assert not failures(done), done.stdout + done.stderr
    assert set(passed(done)) >= OWN | one.more
    assert done.stdout.endswith(f"smoke: {CHECKS + len(OWN | one.more)} passed, 0 failed against {one.server.data}\n")


@pytest.mark.product
def test_it_passes_on_a_model(served_awq: Running, grpcurl: Path) -> None:
    """What `make serve` serves."""
    done = script(SMOKE, served_awq.data, PATH=f"{grpcurl.parent}:{os.environ['PATH']}", GRPCURL="")
    assert not failures(done), done.stdout + done.stderr
    assert len(passed(done)) == CHECKS


@pytest.mark.proof
def test_nobody_there(grpcurl: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        done = script(SMOKE, address, GRPCURL=grpcurl)
    assert failures(done) == ["list: exit code 1 instead of 0"]
    assert "connection refused" in done.stdout
    assert done.stdout.splitlines()[-1] == f"smoke: {address} does not answer; nothing else was tried"


@pytest.mark.proof
def test_the_wrong_port_of_the_right_server(fake: Running, grpcurl: Path) -> None:
    failed = failures(script(SMOKE, fake.admin, GRPCURL=grpcurl))
    assert failed[0] == "list: no /^whippet.v1.GenerationService$/ in its answer"
    assert any(one.startswith("generate: exit code") for one in failed)


@pytest.mark.proof
def test_tls_to_a_plaintext_port(fake: Running, grpcurl: Path) -> None:
    done = script(SMOKE, fake.data, "-insecure", GRPCURL=grpcurl)
    assert failures(done) == ["list: exit code 1 instead of 0"]
    assert "tls" in done.stdout.lower()


@pytest.mark.proof
@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ((), {}, "usage"),
        (("127.0.0.1:1",), {"GRPCURL": "/no/grpcurl"}, "/no/grpcurl: not found"),
        (("127.0.0.1:1",), {"TIMEOUT": "1m"}, "TIMEOUT=1m: whole seconds"),
        (("127.0.0.1:1",), {"TOKEN_FILE": "/no/token"}, "TOKEN_FILE=/no/token: not readable"),
        (("127.0.0.1:1",), {"DRAIN": "yes"}, "need ADMIN"),
        (("127.0.0.1:1",), {"VERSION": "1"}, "need ADMIN"),
    ],
)
def test_a_wrong_call(arguments: tuple[str, ...], environment: dict[str, str], says: str, grpcurl: Path) -> None:
    done = script(SMOKE, *arguments, **{"GRPCURL": str(grpcurl), **environment})
    assert done.returncode == 2
    assert says in done.stderr


def undrain(server: Running) -> None:
    with grpc.insecure_channel(server.admin) as channel:
        admin_pb2_grpc.AdminServiceStub(channel).Undrain(admin_pb2.UndrainRequest(), timeout=60)


def spoiled(fault: str, server: Running, grpcurl: Path) -> list[str]:
    """Names of the checks that failed on such a server."""
    method, broken, _ = BROKEN[fault]
    faults: dict[str, Fault] = {method: broken}
    asked: dict[str, str | Path] = {"GRPCURL": grpcurl}
    if broken is hangs:
        asked["TIMEOUT"] = "5"
    if method.startswith(ADMIN):
        with spoilt(server.admin, faults) as admin:
            drain = {"DRAIN": "yes"} if "rain" in method else {"VERSION": version()}
            failed = failures(script(SMOKE, server.data, ADMIN=admin, **drain, **asked))
    else:
        with spoilt(server.data, faults) as address:
            failed = failures(script(SMOKE, address, **asked))
    return [line.partition(":")[0] for line in failed]


@pytest.mark.proof
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_server_is_found_out(fault: str, fake: Running, grpcurl: Path) -> None:
    """By the checks whose business it is, and by no other where nothing but time could spoil those."""
    try:
        failed = spoiled(fault, fake, grpcurl)
    finally:
        undrain(fake)
    wanted = BROKEN[fault][2]
    assert set(failed) >= wanted
    if fault not in ("names without descriptors", "one that hangs", "a drain that does not end"):
        assert set(failed) == wanted


@pytest.mark.proof
def test_a_port_that_spoils_nothing_passes(fake: Running, grpcurl: Path) -> None:
    """So that it is the faults which are found out."""
    with spoilt(fake.data, {}) as address, spoilt(fake.admin, {}) as admin:
        done = script(SMOKE, address, ADMIN=admin, HEALTH=fake.health, DRAIN="yes", GRPCURL=grpcurl)
    assert not failures(done), done.stdout
    found = {check for _, _, checks in BROKEN.values() for check in checks}
    assert set(passed(done)) - found == {"the health port"}  # each can fail; of this one see below


@pytest.mark.proof
def test_a_health_port_that_says_no(fake: Running, grpcurl: Path) -> None:
    method, broken, _ = BROKEN["not in service"]
    with spoilt(fake.health, {method: broken}) as health:
        failed = failures(script(SMOKE, fake.data, HEALTH=health, GRPCURL=grpcurl))
    assert [line.partition(":")[0] for line in failed] == ["the health port"]


@pytest.mark.proof
def test_a_server_that_knows_every_token(guarded: Servers, grpcurl: Path) -> None:
    one = guarded["tokens"]
    known = knows_everybody("secret")
    every = {f"/whippet.v1.GenerationService/{name}": known for name in ("Generate", "GenerateStream")}
    with spoilt(one.server.data, every) as data, spoilt(one.server.admin, {f"{ADMIN}/GetLoad": known}) as admin:
        failed = failures(script(SMOKE, data, *one.flags, ADMIN=admin, GRPCURL=grpcurl))
    assert {line.partition(":")[0] for line in failed} == TOKEN | ADMIN_TOKEN


@pytest.mark.proof
def test_a_token_from_a_file(guarded: Servers, grpcurl: Path, tmp_path: Path) -> None:
    one = guarded["tokens"]
    (tmp_path / "token").write_text("secret\n")
    done = script(SMOKE, one.server.data, TOKEN_FILE=tmp_path / "token", GRPCURL=grpcurl)
    assert not failures(done), done.stdout + done.stderr
    assert set(passed(done)) >= TOKEN


@pytest.mark.proof
def test_a_server_that_speaks_plaintext_as_well(guarded: Servers, grpcurl: Path) -> None:
    one = guarded["TLS"]
    with either(one.server.data, guarded["plain"].server.data) as address:
        failed = failures(script(SMOKE, address, *one.flags, GRPCURL=grpcurl))
    assert {line.partition(":")[0] for line in failed} == TLS


@pytest.mark.proof
def test_a_server_that_asks_for_no_certificate(guarded: Servers, grpcurl: Path) -> None:
    client = guarded["certificates and tokens"].flags
    failed = failures(script(SMOKE, guarded["TLS and tokens"].server.data, *client, GRPCURL=grpcurl))
    assert {line.partition(":")[0] for line in failed} == CERTIFICATE


@pytest.mark.proof
def test_a_server_that_was_drained_is_back_when_the_script_is_ended(fake: Running, grpcurl: Path) -> None:
    """Ended while the drain waits for an answer that is still being read."""
    with grpc.insecure_channel(fake.data) as channel, grpc.insecure_channel(fake.admin) as operator:
        long = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(
            generation_pb2.GenerateStreamRequest(text="x", stopping={"ignore_eos": True}), timeout=300
        )
        next(long)
        admin = admin_pb2_grpc.AdminServiceStub(operator)
        environment = {**os.environ, "GRPCURL": str(grpcurl), "ADMIN": fake.admin, "DRAIN": "yes"}
        running = subprocess.Popen([SMOKE, fake.data], env=environment, stdout=subprocess.DEVNULL)
        while admin.GetLoad(admin_pb2.GetLoadRequest()).state != admin_pb2.ENGINE_STATE_DRAINING:
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        long.cancel()
        assert running.wait(120) == 128 + signal.SIGTERM
        assert admin.GetLoad(admin_pb2.GetLoadRequest()).state == admin_pb2.ENGINE_STATE_READY


@pytest.mark.proof
def test_a_server_of_its_own(whippet: Path, grpcurl: Path) -> None:
    done = script(LOCAL, "--engine", "fake", WHIPPET=whippet, GRPCURL=grpcurl)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CHECKS + len(OWN)} passed, 0 failed" in done.stdout


@pytest.mark.proof
def test_a_server_that_does_not_start(whippet: Path, grpcurl: Path) -> None:
    done = script(LOCAL, "--model", "/no/model", WHIPPET=whippet, GRPCURL=grpcurl)
    assert done.returncode == 2
    assert "/no/model" in done.stderr


@pytest.mark.proof
def test_a_server_that_ends_badly(tmp_path: Path, whippet: Path, grpcurl: Path) -> None:
    """All checks pass, yet the exit code tells."""
    rude = tmp_path / "whippet"
    lines = (
        f'"{whippet}" "$@" &',
        "server=$!",
        'trap \'kill "$server"; wait "$server"; exit 7\' TERM',
        'wait "$server"',
    )
    rude.write_text("\n".join(("#!/bin/sh", *lines, "")))
    rude.chmod(0o755)
    done = script(LOCAL, "--engine", "fake", WHIPPET=rude, GRPCURL=grpcurl)
    assert done.returncode == 2
    assert "0 failed" in done.stdout
    assert "ended with exit code 7" in done.stderr
