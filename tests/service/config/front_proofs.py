"""Proofs for the front: limits and streams by the objects that keep to them, the rest by servers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc

from engine.api import Priority
from engine.client import EngineClient
from engine.errors import InvalidModel
from engine.fake import plain_request
from service.assembly import protocols
from service.config.settings import BadSettings, Settings
from service.core.admission.admission import Admission
from service.core.errors import Overloaded
from service.core.operations.cache_dir import PREBUILT, cache_dir, prebuilt_dir
from service.core.operations.draining import Drain
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1 import model_pb2
from service.protocols.open_inference.services import OpenInference
from service.protocols.vllm_engine.services import VllmEngine
from service.transport.call.writer import StallWatch
from service.transport.identity.identity import Identity, refuse_strangers
from service.transport.identity.tenants_file import TenantsFile
from service.transport.ports import SIDE_BOUNDS, open_port
from tests.service.asked import chat
from tests.service.browsed import browse
from tests.service.certificates import HERE, Authority, private_key, write_pair
from tests.service.config.proofs import FAKE, Proof, Tools, becomes
from tests.service.conftest import Server, ask

MODELS = Path(__file__).resolve().parents[3] / "models"

TOKEN = "open sesame"
KNOWN = (("authorization", f"Bearer {TOKEN}"),)


@dataclass(frozen=True)
class Seen:
    """What a caller sees of a running server, and what its log says."""

    data: str
    admin: str
    health: str
    metrics: str
    model: str
    refusal: grpc.StatusCode | None  # without a token
    cached: bool  # the second answer to one question
    asks_caches: bool  # what the answer's header says
    informs: bool  # lines of level INFO
    objects: bool  # lines in JSON
    names: bool  # lines with a tenant


_seen: dict[tuple[str, ...], Seen] = {}  # a server of the same flags need not be started twice


def server(field: str) -> Callable[[Settings, Tools], Any]:
    async def effect(settings: Settings, tools: Tools) -> Any:
        (tools.folder / "tokens.yaml").write_text(
            f'[{{tenant: a, sha256: "{hashlib.sha256(TOKEN.encode()).hexdigest()}", rights: [generate, admin]}}]\n'
        )
        flags = tools.flags
        if flags not in _seen:
            _seen[flags] = await asyncio.to_thread(look_at, tools)
        return getattr(_seen[flags], field)

    return effect


def look_at(tools: Tools) -> Seen:
    """Starts a server and stops it."""
    with tools.serve(*tools.flags) as one:
        refusal = None
        try:
            one.models.ListModels(model_pb2.ListModelsRequest(), timeout=60)
        except grpc.RpcError as error:
            refusal = error.code()
        (model,) = one.models.ListModels(model_pb2.ListModelsRequest(), metadata=KNOWN, timeout=60).models
        cached = answered_from_cache(one)
        asking = asks_caches(one)
        assert one.stop() == 0
        text = one.log.read_text()
        metrics = re.search(r" metrics http://(\S+)/metrics$", text, re.MULTILINE)
        assert metrics is not None
        return Seen(
            data=host(one.data),
            admin=host(one.admin_address),
            health=host(one.health),
            metrics=host(metrics[1]),
            model=model.name,
            refusal=refusal,
            cached=cached,
            asks_caches=asking,
            informs=" INFO " in text,
            objects='{"time": ' in text,
            names=" tenant=default" in text,
        )


def page_by(name: str) -> Callable[[Settings, Tools], Any]:
    """What the console answers to a browser that knows the server by this name."""

    def asked(tools: Tools) -> int:
        with tools.serve(*tools.flags) as one:
            return browse(one.metrics, "/", headers={"Host": name}).status

    async def effect(settings: Settings, tools: Tools) -> Any:
        return await asyncio.to_thread(asked, tools)

    return effect


def answered_from_cache(one: Server) -> bool:
    """One of many answers to the same question; it is stored a moment after it was given."""
    request = ask("twice", 4)
    request.sampling.temperature = 0
    answers = (one.generation.Generate(request, metadata=KNOWN, timeout=60) for _ in range(50))
    return any(answer.finish.cache_source == pb.CACHE_SOURCE_RESPONSE for answer in answers)


def asks_caches(one: Server) -> bool:
    """The semantic one has an eye for chats alone."""
    _, call = one.generation.Generate.with_call(chat("How do I sell a car?"), metadata=KNOWN, timeout=60)
    return dict(call.initial_metadata())["x-cache"] != "off"


def host(address: str) -> str:
    return address.rpartition(":")[0]


async def waits(settings: Settings, tools: Tools) -> str:
    """What becomes of a request whose first token does not come."""
    refused: asyncio.Future[Overloaded] = asyncio.get_running_loop().create_future()
    slots = Admission(settings.limits, lambda: 2).slots
    slots.patience(time.monotonic(), refused.set_result)
    try:
        return (await asyncio.wait_for(refused, 20.0 if settings.limits.queue_timeout else 0.5)).reason
    except TimeoutError:
        return "still waiting"


def quota(settings: Settings, tools: Tools) -> int | None:
    """Live requests of a tenant."""
    (tools.folder / "tenants.yaml").write_text("acme: {requests: 1}\n")
    path = settings.auth.tenants_file
    return None if path is None else TenantsFile(path, lambda outcome: None).policies().of("acme").requests


def kept_in(settings: Settings, tools: Tools) -> str:
    """Where compiled code goes."""
    environ = {"XDG_CACHE_HOME": str(tools.folder / "elsewhere")}
    with cache_dir(settings.cache_dir, environ) as found:
        assert found is not None
        return found.relative_to(tools.folder).parts[0]


def built_ahead(settings: Settings, tools: Tools) -> str | None:
    """Where the processes that we start look for compiled code first."""
    (tools.folder / "ahead").mkdir(exist_ok=True)
    environ: dict[str, str] = {}
    with prebuilt_dir(settings.prebuilt_dir, environ):
        return Path(environ[PREBUILT]).name if PREBUILT in environ else None


async def served(settings: Settings, tools: Tools) -> bool:
    """Whether the model folder is taken for the right one."""
    client = EngineClient(settings.engine_settings())
    try:
        await client.start()
    except InvalidModel:
        return False
    finally:
        await client.close()
    return True


def speaks(protocol: type) -> Callable[[Settings, Tools], bool]:
    return lambda settings, tools: any(isinstance(one, protocol) for one in protocols(settings))


def named(settings: Settings, tools: Tools) -> str:
    return settings.served_name


def refused_after(admit: Callable[[Admission, int], None]) -> Callable[[Settings, Tools], int]:
    """How many are let in before one is refused, 5000 at most; two run at once."""

    def effect(settings: Settings, tools: Tools) -> int:
        admission = Admission(settings.limits, lambda: 2)
        for count in range(5000):
            try:
                admit(admission, count)
            except Overloaded:
                return count
        return 5000

    return effect


def generation(admission: Admission, count: int) -> None:
    admission.slots.take(Priority.NORMAL, 0, None)


def prompt(admission: Admission, count: int) -> None:
    admission.slots.take(Priority.NORMAL, 100, None)


def request_of_one(admission: Admission, count: int) -> None:
    admission.admit("acme", str(count), None).lookup_ended()


async def pauses(settings: Settings, tools: Tools) -> bool:
    """Whether an answer that nobody reads is paused before its end."""
    client = EngineClient(settings.engine_settings(), stream_buffer=settings.stream.buffer_bytes)
    try:
        await client.start()
        stream = client.submit(plain_request((40, 41), 1000))
        paused = False
        for _ in range(1000):
            paused = client.load.paused > 0
            if paused or (client.load.steps > 1 and not client.load.running):
                break
            await asyncio.sleep(0.01)
        stream.cancel()
        return paused
    finally:
        await client.close()


async def stalls(settings: Settings, tools: Tools) -> bool:
    """Whether a stream whose reader has taken nothing for ten seconds is ended."""
    ended = asyncio.Event()
    since = asyncio.get_running_loop().time() - 10
    writer = MagicMock(waiting_since=since, stalled=False, stall=ended.set)
    watch = StallWatch(settings.stream.stall_timeout)
    watch.add(writer)
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.wait_for(ended.wait(), 2.0 if settings.stream.stall_timeout > 10 else 60.0)
    except TimeoutError:
        return False
    finally:
        watching.cancel()
    return True


async def waits_for_the_live(settings: Settings, tools: Tools) -> bool:
    """Whether a drain goes on while a request is live."""
    admission = Admission(settings.limits, lambda: 2)
    admission.admit("acme", "one", None)
    try:
        await asyncio.wait_for(admission.idle(settings.drain.timeout), 0.5 if settings.drain.timeout else 60.0)
    except TimeoutError:
        return True
    return False


async def processes(settings: Settings, tools: Tools) -> int:
    """Which of a server speak gRPC to callers."""
    with tools.serve(*tools.flags) as running:
        return len(running.relay_pids()) or 1


async def seconds_to_another(settings: Settings, tools: Tools) -> float:
    """After which a relay that was stopped has been replaced."""
    with tools.serve(*tools.flags) as running:
        (first,) = running.relay_pids()[:1]
        begun = time.monotonic()
        os.kill(first, signal.SIGSTOP)
        while first in running.relay_pids():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return time.monotonic() - begun


async def admits_in_a_drain(settings: Settings, tools: Tools) -> bool:
    """Whether a request still gets in."""
    admission = Admission(settings.limits, lambda: 2)
    Drain(admission, settings.drain.delay).begin()
    return not admission.draining


async def certificate(settings: Settings, tools: Tools) -> str:
    """Which certificate a caller without one of its own is shown, or that it is refused."""
    try:
        port = open_port("listen", "127.0.0.1:0", [], Identity(settings).credentials(), SIDE_BOUNDS)
    except BadSettings:
        return "refused"
    await port.server.start()
    try:
        return await asyncio.to_thread(_shake_hands, int(port.address.rpartition(":")[2]))
    except OSError:  # ssl.SSLError is one
        return "refused"
    finally:
        await port.server.stop(None)


def _shake_hands(port: int) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), 60) as raw, context.wrap_socket(raw) as link:
        shown = link.getpeercert(binary_form=True) or b""
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        if not link.recv(1):
            raise ConnectionError
        return hashlib.sha256(shown).hexdigest()


def certify(folder: Path) -> None:
    """Two certificates of one key, and another pair."""
    authority, key = Authority("ca"), private_key()
    for name, own in (("server", key), ("again", key), ("other", private_key())):
        write_pair(folder, name, authority.sign(*HERE, key=own))


async def shown(settings: Settings, tools: Tools) -> str:
    """See `certificate`; makes the files first."""
    if not (tools.folder / "server.pem").exists():
        await asyncio.to_thread(certify, tools.folder)
    return await certificate(settings, tools)


def refuses(before: Any, after: Any) -> bool:
    return before != "refused" and after == "refused"


def other_certificate(before: Any, after: Any) -> bool:
    return len({before, after, "refused"}) == 3


async def lets_strangers_in(settings: Settings, tools: Tools) -> bool:
    try:
        refuse_strangers(settings)
    except BadSettings:
        return False
    return True


SHADOW = (*FAKE, "--cache.semantic.mode=shadow")
TLS = (*FAKE, "--tls.cert={folder}/server.pem", "--tls.key={folder}/server.key")
ELSEWHERE = becomes("127.0.0.1", "127.0.0.2")
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED

PROOFS = {
    "cache-dir": Proof("{folder}/kept", kept_in, becomes("elsewhere", "kept"), FAKE),
    "prebuilt-dir": Proof("{folder}/ahead", built_ahead, becomes(None, "ahead"), FAKE),
    "model-digest": Proof(f"sha256:{'0' * 64}", served, becomes(True, False), (*FAKE, f"--model={MODELS}/demo-draft")),
    "model-name": Proof("other", server("model"), becomes("fake", "other")),
    "config": Proof("{folder}/c.yaml", named, becomes("fake", "from-file")),
    "listen": Proof("127.0.0.2:0", server("data"), ELSEWHERE),
    "admin-listen": Proof("127.0.0.2:0", server("admin"), ELSEWHERE),
    "health-listen": Proof("127.0.0.2:0", server("health"), ELSEWHERE),
    "metrics-listen": Proof("127.0.0.2:0", server("metrics"), ELSEWHERE),
    "insecure": Proof("true", lets_strangers_in, becomes(False, True), (*FAKE, "--listen=0.0.0.0:0")),
    "server.fronts": Proof("3", processes, becomes(1, 3)),
    "server.hang-timeout": Proof(
        "1",
        seconds_to_another,
        lambda before, after: before > after,
        (*FAKE, "--server.fronts=2", "--server.hang-timeout=4"),
    ),
    "console.enabled": Proof("false", page_by("localhost"), becomes(200, 404)),
    "console.hosts": Proof("models.example", page_by("models.example"), becomes(421, 200)),
    "protocols.vllm-engine": Proof("off", speaks(VllmEngine), becomes(True, False)),
    "protocols.open-inference": Proof("off", speaks(OpenInference), becomes(True, False)),
    "log.format": Proof("json", server("objects"), becomes(False, True)),
    "log.tenants": Proof("true", server("names"), becomes(False, True)),
    "log-level": Proof("error", server("informs"), becomes(True, False)),
    "auth.tokens-file": Proof("{folder}/tokens.yaml", server("refusal"), becomes(None, UNAUTHENTICATED)),
    "auth.tenants-file": Proof("{folder}/tenants.yaml", quota, becomes(None, 1)),
    "optimizations.response-cache": Proof("on", server("cached"), becomes(False, True)),
    "optimizations.semantic-cache": Proof("off", server("asks_caches"), becomes(True, False), SHADOW),
    "limits.queued-requests": Proof("3", refused_after(generation), becomes(258, 5)),
    "limits.queued-prompt-tokens": Proof("1000", refused_after(prompt), lambda before, after: before > after == 10),
    "limits.tenant-requests": Proof("7", refused_after(request_of_one), becomes(4096, 7)),
    "limits.queue-timeout": Proof("0.01", waits, becomes("still waiting", "QUEUE_TIMEOUT")),
    "limits.live-requests": Proof("300", refused_after(request_of_one), becomes(4096, 300)),
    "stream.buffer-bytes": Proof("4096", pauses, becomes(False, True)),
    "stream.stall-timeout": Proof("1", stalls, becomes(False, True)),
    "drain.delay": Proof("60", admits_in_a_drain, becomes(False, True)),
    "drain.timeout": Proof("0", waits_for_the_live, becomes(True, False)),
    "tls.cert": Proof("{folder}/again.pem", shown, other_certificate, TLS),
    "tls.key": Proof("{folder}/other.key", shown, refuses, TLS),
    "tls.client-ca": Proof("{folder}/other.pem", shown, refuses, TLS),
}
