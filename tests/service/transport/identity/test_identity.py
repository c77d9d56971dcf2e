"""Who gets in at all, and which right each RPC needs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from service.config.settings import BadSettings
from service.config.sources import load
from service.pb.whippet.v1 import admin_pb2, generation_pb2, model_pb2
from service.protocols.whippet_v1.rights import ADMIN, GENERATION, MODEL, RIGHTS
from service.transport.identity.identity import Identity, closed_console, refuse_strangers
from tests.service.conftest import Server, all_flags, ask, refused
from tests.service.forked import Template
from tests.service.tenants import metadata
from tests.service.transport.presented import entry

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
SERVICES = {
    one.full_name: one
    for file in (generation_pb2, model_pb2, admin_pb2)
    for one in file.DESCRIPTOR.services_by_name.values()
}
RPCS = [(name, method) for name, one in SERVICES.items() for method in one.methods_by_name]
# What each right permits, beside looking at the models.
PERMITTED = {
    "view": {"GetLoad", "ListOptimizations"},
    "generate": {"Generate", "GenerateStream", "Tokenize", "Detokenize"},
    "admin": {one.name for one in SERVICES[ADMIN].methods},
}
NO_MESSAGE = b"\xff"  # refused by whoever reads it, before it does anything


@pytest.mark.parametrize("flag", ["listen", "admin-listen"])
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]"])
def test_strangers_get_in_only_where_somebody_has_said_so(flag: str, host: str) -> None:
    open_to_all = [f"--{flag}={host}:0", "--engine=fake"]
    with pytest.raises(BadSettings) as caught:
        refuse_strangers(load(open_to_all, {}))
    for words in (f"{flag}: ", host, "--auth.tokens-file", "--tls.client-ca", "--insecure"):
        assert words in str(caught.value)
    certificate = ["--tls.cert=c", "--tls.key=k"]
    with pytest.raises(BadSettings):
        refuse_strangers(load([*open_to_all, *certificate], {}))  # says who we are, not who calls
    for remedy in (["--auth.tokens-file=t"], [*certificate, "--tls.client-ca=a"], ["--insecure"]):
        refuse_strangers(load([*open_to_all, *remedy], {}))
    refuse_strangers(load(open_to_all, {"WHIPPET_INSECURE": "true"}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"])
def test_this_machine_is_no_stranger(host: str) -> None:
    refuse_strangers(load([f"--listen={host}:0", f"--admin-listen={host}:0", "--engine=fake"], {}))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "unix"])  # gRPC takes the second for a socket's path
def test_a_host_that_nobody_knows_is_not_taken_for_this_machine(host: str) -> None:
    with pytest.raises(BadSettings, match=f"listen: the host of {host}:0 cannot be resolved"):
        refuse_strangers(load([f"--listen={host}:0", "--engine=fake"], {}))


def test_the_console_is_closed_where_others_reach_its_port_and_nobody_says_who_calls() -> None:
    def closed(*flags: str) -> bool:
        return bool(closed_console(load(["--engine=fake", *flags], {})))

    elsewhere, certificate = "--metrics-listen=0.0.0.0:0", ("--tls.cert=c", "--tls.key=k")
    assert not closed()
    assert not closed("--metrics-listen=[::1]:0")
    assert closed(elsewhere)
    assert closed(elsewhere, "--insecure")
    assert closed(elsewhere, *certificate)
    assert not closed(elsewhere, "--auth.tokens-file=t")
    assert not closed(elsewhere, *certificate, "--tls.client-ca=a")


def test_health_and_metrics_are_open_to_probes(template: Template) -> None:
    ports = ("health-listen", "metrics-listen")
    refuse_strangers(load([*(f"--{port}=0.0.0.0:0" for port in ports), "--engine=fake"], {}))


def test_the_refusal_is_one_line_and_exit_code_2(template: Template, tmp_path: Path) -> None:
    done = template.run(all_flags("--listen=0.0.0.0:0"), tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("whippet:")]
    assert line.startswith("whippet: listen: ")


def test_insecure_serves_strangers(serve: Serve) -> None:
    with serve("--listen=0.0.0.0:0", "--insecure") as one:
        assert one.data.startswith("0.0.0.0:")
        assert one.generation.Generate(ask("x", 1), timeout=60).text


def test_a_line_says_what_is_open(tmp_path: Path, certificates: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t").write_text(entry())
    tokens = f"--auth.tokens-file={tmp_path}/t"
    pair = [f"--tls.cert={certificates}/server.pem", f"--tls.key={certificates}/server.key"]
    for flags, told in (
        (["--listen=0.0.0.0:0", "--insecure"], ["listen: anybody who reaches 0.0.0.0:0 may call (--insecure)"]),
        (["--insecure"], []),
        (["--admin-listen=[::]:0", tokens], ["admin-listen: tokens come to [::]:0 in plain text"]),
        ([tokens], []),
        (["--metrics-listen=0.0.0.0:0", tokens], ["metrics-listen: tokens come to 0.0.0.0:0 in plain text"]),
        (["--metrics-listen=0.0.0.0:0", tokens, "--console.enabled=false"], []),
        (["--metrics-listen=0.0.0.0:0", "--insecure"], []),
        (["--listen=0.0.0.0:0", tokens, *pair], []),
    ):
        caplog.clear()
        Identity(load(["--engine=fake", *flags], {}))
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(lines) == len(told)
        assert all(line.startswith(start) for line, start in zip(lines, told, strict=True))


def test_every_rpc_has_a_right() -> None:
    assert {(name, method) for name, methods in RIGHTS.items() for method in methods} == set(RPCS)
    assert set(RIGHTS) == {GENERATION, MODEL, ADMIN}


@pytest.fixture(scope="module")
def guarded(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a token for each right, of that name."""
    folder = tmp_path_factory.mktemp("rights")
    expired = entry(token="expired", rest=", expires: 2020-01-01T00:00:00Z")
    (folder / "tokens").write_text("".join(entry(token=right, rights=f"[{right}]") for right in PERMITTED) + expired)
    one = Server(template, f"--auth.tokens-file={folder}/tokens", log=folder / "log")
    yield one
    one.close()


@pytest.mark.parametrize(("service", "method"), RPCS)
def test_rights(guarded: Server, service: str, method: str) -> None:
    channel = guarded.admin_channel if service == ADMIN else guarded.channel
    streamed = SERVICES[service].methods_by_name[method].server_streaming
    call = (channel.unary_stream if streamed else channel.unary_unary)(f"/{service}/{method}")
    for right, permitted in PERMITTED.items():
        refusal = refused(call, NO_MESSAGE, metadata=metadata(right))
        if service == MODEL or method in permitted:
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT, right
        else:
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "RIGHT_MISSING"), right
    for who, reason in (
        ((), "TOKEN_MISSING"),
        (metadata("nobody"), "TOKEN_UNKNOWN"),
        (metadata("expired"), "TOKEN_EXPIRED"),
        ((("authorization", "secret"),), "TOKEN_MALFORMED"),
    ):
        refusal = refused(call, NO_MESSAGE, metadata=who)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
