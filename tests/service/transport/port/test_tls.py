"""TLS: certificates that cannot be used, that stand for callers, and that change while streams live."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.config.settings import BadSettings, TlsOptions
from service.pb.whippet.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from service.transport.port.tls import Certificates, read_pair
from tests.service.certificates import HERE, Authority, private_key, write_pair
from tests.service.conftest import PATIENCE, Refusal, Server, all_flags, ask, ask_stream, refused
from tests.service.forked import Template
from tests.service.scraped import page_of, value
from tests.service.transport.presented import entry, named

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("wrong", "flags"),
    [
        ("tls.key", {"key": "client.key"}),
        ("tls.key", {"key": "server.pem"}),
        ("tls.key", {"key": "locked.key"}),
        ("tls.cert", {"cert": "server.key"}),
        ("tls.cert", {"cert": "garbled.pem"}),
        ("tls.client-ca", {"client_ca": "garbled.pem"}),
        ("tls.client-ca", {"client_ca": "server.key"}),
        ("tls.cert", {"cert": "gone.pem"}),
    ],
)
def test_certificates_that_cannot_be_used_are_named(certificates: Path, wrong: str, flags: dict[str, str]) -> None:
    files = {"cert": "server.pem", "key": "server.key", **flags}
    with pytest.raises(BadSettings) as caught:
        read_pair(TlsOptions(**{name: certificates / file for name, file in files.items()}))
    assert str(caught.value).startswith(f"{wrong}: {certificates}/")


def test_a_certificate_that_cannot_be_used_is_one_line_at_the_start(
    template: Template, tmp_path: Path, certificates: Path
) -> None:
    flags = (f"--tls.cert={certificates}/server.pem", f"--tls.key={certificates}/client.key")
    done = template.run(all_flags(*flags), tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("whippet:")]
    assert line.startswith("whippet: tls.key: ")


def test_keys_that_grpc_does_not_speak_and_pipes_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, "server", Authority("ca").sign(key=private_key(ec.SECP256K1())))
    with pytest.raises(BadSettings, match="P-256"):
        read_pair(options(tmp_path))
    (tmp_path / "server.key").unlink()
    os.mkfifo(tmp_path / "server.key")
    with pytest.raises(BadSettings, match="no file"):
        read_pair(options(tmp_path))


def options(folder: Path) -> TlsOptions:
    return TlsOptions(cert=folder / "server.pem", key=folder / "server.key")


def test_a_pair_replaces_another_unless_it_is_worse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    authority, in_force = Authority("ca"), ""

    def written(days: tuple[float, float]) -> str:
        write_pair(tmp_path, "server", authority.sign(days=days))
        return f"{read_pair(options(tmp_path)).expires}"

    written((-3, -1))
    certificates = Certificates(options(tmp_path))
    until(lambda: "not now" in caplog.text)  # served all the same, with a line
    for days, better in (
        ((-3.0, -0.5), True),  # as bad
        ((-1.0, 0.1), True),
        ((-2.0, -1.0), False),  # expired
        ((1.0, 3.0), False),  # from tomorrow on
        ((-1.0, 30.0), True),
    ):
        before, failures = caplog.text.count("read again"), certificates.failures
        found = written(days)
        certificates.reload()
        if better:
            until(lambda before=before: caplog.text.count("read again") > before)
            in_force = found
        else:
            until(lambda failures=failures: certificates.failures > failures)
        assert f"{certificates.expiries['cert']}" == in_force
    (tmp_path / "server.pem").write_text("-----BEGIN ")
    certificates.reload()
    until(lambda: "holds no certificate" in caplog.text)
    assert f"{certificates.expiries['cert']}" == in_force
    assert "BEGIN" not in caplog.text


@pytest.mark.parametrize(("days", "quiet", "told"), [(100.0, 92.9, 93.1), (4.0, 2.9, 3.1), (0.04, 0.029, 0.031)])
def test_what_expires_soon_is_told(tmp_path: Path, days: float, quiet: float, told: float) -> None:
    write_pair(tmp_path, "server", Authority("ca").sign(days=(0.0, days)))
    pair = read_pair(options(tmp_path))
    assert not pair.expires_soon(pair.begins + quiet * 86_400)
    assert pair.expires_soon(pair.begins + told * 86_400)


@pytest.mark.product
def test_a_folder_that_kubernetes_swaps_is_a_new_pair(tmp_path: Path) -> None:
    authority = Authority("ca")
    for version, days in (("one", 2.0), ("two", 3.0)):
        (tmp_path / version).mkdir()
        write_pair(tmp_path / version, "server", authority.sign(days=(-1.0, days)))
    for file in ("server.pem", "server.key"):
        (tmp_path / file).symlink_to(f"..data/{file}")
    (tmp_path / "..data").symlink_to("one")
    certificates = Certificates(options(tmp_path))
    (tmp_path / "..next").symlink_to("two")
    (tmp_path / "..next").replace(tmp_path / "..data")
    until(lambda: certificates.expiries["cert"] == read_pair(options(tmp_path / "two")).expires)
    assert certificates.failures == 0


def channel_of(address: str, folder: Path, client: str | None) -> grpc.Channel:
    names = [] if client is None else [f"{client}.key", f"{client}.pem"]
    pair = [(folder / name).read_bytes() for name in names]
    # A connection of its own: gRPC shares one among channels that look alike.
    options = [("grpc.use_local_subchannel_pool", 1)]
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *pair)
    return grpc.secure_channel(address, credentials, options)


def secure(server: Server, folder: Path, client: str | None) -> generation_pb2_grpc.GenerationServiceStub:
    return generation_pb2_grpc.GenerationServiceStub(channel_of(server.data, folder, client))


def test_tls(serve: Serve, certificates: Path) -> None:
    flags = (f"--tls.cert={certificates}/server.pem", f"--tls.key={certificates}/server.key")
    with serve(*flags) as one:
        assert secure(one, certificates, None).Generate(ask("safe", 3), timeout=60).text
        assert refused(one.generation.Generate, ask("plain", 1)).code is grpc.StatusCode.UNAVAILABLE
        with grpc.insecure_channel(one.health) as channel:  # kubelets come without TLS
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == SERVING


def test_rubbish_at_a_tls_port_is_not_logged(serve: Serve, certificates: Path) -> None:
    """Nor is it at the others."""
    with serve(f"--tls.cert={certificates}/server.pem", f"--tls.key={certificates}/server.key") as one:
        before = len(one.log.read_text())
        for address in (one.data, one.admin_address, one.health, one.metrics):
            host, _, port = address.rpartition(":")
            for _ in range(50):
                with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), 60) as link:
                    link.sendall(b"CANARY" * 50)
                    link.shutdown(socket.SHUT_WR)
                    while link.recv(4096):
                        pass
        assert secure(one, certificates, None).Generate(ask("safe", 3), timeout=60).text
        log = one.log.read_text()
        assert "CANARY" not in log
        assert len(log) - before < 1000


def flags_of(folder: Path, **others: str) -> list[str]:
    """Of a server that wants certificates."""
    files = {"cert": "server.pem", "key": "server.key", "client-ca": "ca.pem", **others}
    return [f"--tls.{name}={folder}/{file}" for name, file in files.items()]


def admin(server: Server, folder: Path, client: str | None) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(channel_of(server.admin_address, folder, client))


LOAD, SWITCH = admin_pb2.GetLoadRequest(), admin_pb2.SetOptimizationRequest(name="batching", enabled=True)


def test_a_certificate_alone_lets_in_but_not_change_anything(serve: Serve, certificates: Path) -> None:
    with serve(*flags_of(certificates)) as one:
        assert secure(one, certificates, "client").Generate(ask("known", 3), timeout=60).text
        operator = admin(one, certificates, "client")
        assert operator.GetLoad(LOAD, timeout=60).total_pages
        refusal = refused(operator.SetOptimization, SWITCH)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "RIGHT_MISSING")
        for who in (None, "stranger"):
            assert refused(secure(one, certificates, who).Generate, ask("x", 1)).code is grpc.StatusCode.UNAVAILABLE
            assert refused(admin(one, certificates, who).GetLoad, LOAD).code is grpc.StatusCode.UNAVAILABLE
        assert refused(one.admin.GetLoad, LOAD).code is grpc.StatusCode.UNAVAILABLE  # without TLS


def test_certificates_stand_for_tenants(serve: Serve, tmp_path: Path) -> None:
    """On both ports, over real connections; a token wins."""
    authority = Authority("ca")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    write_pair(tmp_path, "server", authority.sign(*HERE))
    batch = x509.UniformResourceIdentifier("spiffe://acme/batch")
    for name, names in {
        "batch": (x509.DNSName("some-pod"), batch),
        "operator": (x509.RFC822Name("ops@acme.example"),),
        "unknown": (x509.DNSName("spiffe://acme/batch"), x509.DNSName("URI:spiffe://acme/batch")),
        "both": (batch, x509.RFC822Name("ops@acme.example")),
        "nameless": (),
    }.items():
        write_pair(tmp_path, name, authority.sign(*names))
    (tmp_path / "tokens").write_text(
        named("URI:spiffe://acme/batch")
        + named("email:ops@acme.example", "ops", "[admin]")
        + entry("user", "secret", "[view]")
    )
    token = (("authorization", "Bearer secret"),)
    with serve(*flags_of(tmp_path), f"--auth.tokens-file={tmp_path}/tokens") as one:

        def outcome(who: str, call: str, **options: object) -> str:
            try:
                if call == "generate":
                    secure(one, tmp_path, who).Generate(ask("x", 1), timeout=60, **options)
                else:
                    admin(one, tmp_path, who).SetOptimization(SWITCH, timeout=60, **options)
            except grpc.RpcError as error:
                return Refusal.of(error).reason
            return "OK"

        assert outcome("batch", "generate") == outcome("operator", "switch") == "OK"
        assert outcome("batch", "switch") == outcome("operator", "generate") == "RIGHT_MISSING"
        assert outcome("unknown", "generate") == "CERTIFICATE_UNKNOWN"
        assert outcome("both", "generate") == "CERTIFICATE_AMBIGUOUS"
        assert outcome("nameless", "generate") == "TOKEN_MISSING"
        assert outcome("batch", "generate", metadata=token) == "RIGHT_MISSING"
        assert outcome("batch", "generate", metadata=(("authorization", "Bearer wrong"),)) == "TOKEN_UNKNOWN"


def identification(address: str) -> bytes:
    """The certificate that a new connection is shown, as DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as raw, context.wrap_socket(raw) as link:
        return link.getpeercert(binary_form=True) or b""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def der(pair: tuple[bytes, bytes]) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair[1].decode())


def refuses(server: Server, folder: Path, client: str) -> bool:
    """A new connection with this certificate."""
    with channel_of(server.data, folder, client) as channel:
        try:
            generation_pb2_grpc.GenerationServiceStub(channel).Generate(ask("x", 1), timeout=60)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        return False


def expiry(pair: tuple[bytes, bytes]) -> float:
    return x509.load_pem_x509_certificate(pair[1]).not_valid_after_utc.timestamp()


@pytest.mark.proof
def test_certificates_change_under_60_streams(serve: Serve, tmp_path: Path) -> None:
    """None is lost: each goes on with tokens of steps that came after everything had changed."""
    old, new = Authority("old"), Authority("new")
    (tmp_path / "ca.pem").write_bytes(old.pem)
    write_pair(tmp_path, "server", old.sign(*HERE))
    write_pair(tmp_path, "client", old.sign(*HERE))
    flags = ["--fake.step-time=0.05", "--scheduler.max-sequences=64", "--limits.tenant-requests=100"]
    (tmp_path / "clients.pem").write_bytes(old.pem)
    with serve(*flags_of(tmp_path, **{"client-ca": "clients.pem"}), *flags) as one:
        stubs = [secure(one, tmp_path, "client") for _ in range(6)]
        operator = admin(one, tmp_path, "client")
        streams = [stubs[n % 6].GenerateStream(ask_stream(f"number {n}", 3000), timeout=120) for n in range(60)]
        until(lambda: operator.GetLoad(LOAD, timeout=60).running == 60)

        second = old.sign(*HERE)
        write_pair(tmp_path, "server", second)
        one.process.send_signal(signal.SIGHUP)
        for address in (one.data, one.admin_address):
            until(lambda address=address: identification(address) == der(second))
        assert secure(one, tmp_path, "client").Generate(ask("again", 1), timeout=60).text

        third, other = old.sign(*HERE), old.sign(*HERE)
        write_pair(tmp_path, "server", (third[0], other[1]))  # a key and a certificate that do not fit
        until(lambda: "the old certificates stay in force: tls.key" in one.log.read_text())
        assert identification(one.data) == der(second)
        page = page_of(one)
        assert value(page, "identity_reload_failures_total", file="certificates") >= 1
        assert value(page, "tls_certificate_expiry_timestamp_seconds", file="cert") == expiry(second)
        assert value(page, "tls_certificate_expiry_timestamp_seconds", file="client-ca") == expiry((b"", old.pem))
        write_pair(tmp_path, "server", third)
        until(lambda: identification(one.data) == der(third))

        write_pair(tmp_path, "newcomer", new.sign(*HERE))
        assert not refuses(one, tmp_path, "client")
        assert refuses(one, tmp_path, "newcomer")
        (tmp_path / "clients.new").write_bytes(new.pem)
        (tmp_path / "clients.new").replace(tmp_path / "clients.pem")
        until(lambda: refuses(one, tmp_path, "client"))
        assert not refuses(one, tmp_path, "newcomer")

        steps = operator.GetLoad(LOAD, timeout=60).steps
        for stream in streams:
            for _ in range(steps + 1):
                assert not next(stream).HasField("finish")
            stream.cancel()
