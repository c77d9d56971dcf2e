"""Proofs for what the engine process is given: real engine processes of the fake kind, and real models in this one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bench.redis_server import free_port
from engine.api import EngineLoad, EngineState, ModelInfo
from engine.client import EngineClient
from engine.errors import EngineError, Unsupported
from engine.fake import plain_request
from engine.ipc.joining import JoinRefused, code_digest, join
from engine.settings import EngineSettings
from service.config.settings import Settings
from tests.service.config.proofs import FAKE, Proof, Tools, becomes

MODELS = Path(__file__).resolve().parents[3] / "models"
MODEL = (
    f"--model={MODELS}/demo-draft",
    "--device=cpu",
    "--dtype=float32",
    "--scheduler.threads=1",
    "--scheduler.kv-bytes=16777216",
)
REDIS = (*FAKE, "--cache.redis-url={redis}", "--cache.key-file={keys}", "--cache.prefix.chunk-bytes=4096")
RANKS_PORTS = (free_port(), free_port())
RANKS = (
    *MODEL,
    "--tensor-parallel=2",
    f"--engine.ranks-listen=127.0.0.1:{RANKS_PORTS[0]}",
    "--engine.ranks-secret-file={folder}/secret",
)
PROMPT = tuple(range(33, 97))  # four pages


@functools.cache
def built(settings: EngineSettings) -> tuple[ModelInfo, int, tuple[tuple[str, bool], ...]]:
    """A model's facts, torch's threads and the switches that were set while it was built."""
    import torch

    from engine.execution.runner import ModelRunner
    from engine.worker.build import build

    threads = torch.get_num_threads()
    try:
        with patch.object(ModelRunner, "set_optimization") as switched:
            runner = build(settings, lambda *progress: None)
        runner.close()
        return runner.info, torch.get_num_threads(), tuple(tuple(call.args) for call in switched.call_args_list)
    finally:
        torch.set_num_threads(threads)


def model(field: str) -> Callable[[Settings, Tools], Any]:
    """A fact of the model; where there is none, what the refusal is about."""

    def effect(settings: Settings, tools: Tools) -> Any:
        try:
            return getattr(built(settings.engine_settings())[0], field)
        except Unsupported as error:
            return f"refused: {error}"

    return effect


def threads(settings: Settings, tools: Tools) -> int:
    return built(settings.engine_settings())[1]


def switches(settings: Settings, tools: Tools) -> dict[str, bool]:
    return dict(built(settings.engine_settings())[2])


async def generate(client: EngineClient, prompt: tuple[int, ...], tokens: int) -> tuple[int, int]:
    """How many ids came, -1 for a failure, and how many of the prompt's were cached."""
    count = 0
    try:
        async for events in client.submit(plain_request(prompt, tokens)):
            count += len(events.token_ids)
            if events.finish is not None:
                return count, events.finish.cached_tokens
    except EngineError:
        pass
    return -1, 0


async def process(
    settings: Settings, prompts: tuple[tuple[int, ...], ...], tokens: int, together: bool = False
) -> tuple[list[tuple[int, int]], ModelInfo, EngineLoad]:
    """What an engine process made of prompts, one after the other or all at once."""
    client = EngineClient(settings.engine_settings())
    try:
        await client.start()
        asked = [generate(client, prompt, tokens) for prompt in prompts]
        found = list(await asyncio.gather(*asked)) if together else [await one for one in asked]
        info = client.info
        assert info is not None
        for _ in range(200):  # the load is told a moment after the last token
            if not client.load.running:
                break
            await asyncio.sleep(0.01)
        return found, info, client.load
    finally:
        await client.close()


def fake(field: str) -> Callable[[Settings, Tools], Any]:
    async def effect(settings: Settings, tools: Tools) -> Any:
        return getattr((await process(settings, (), 0))[1], field)

    return effect


async def kind(settings: Settings, tools: Tools) -> str:
    return (await process(settings, (), 0))[1].architecture


async def steps(settings: Settings, tools: Tools) -> int:
    """For one answer of 12 ids."""
    return (await process(settings, (PROMPT,), 12))[2].steps


async def steps_together(settings: Settings, tools: Tools) -> int:
    """For two answers of 16 ids that are asked for at once."""
    return (await process(settings, (PROMPT, (40, *PROMPT)), 16, together=True))[2].steps


async def steps_of_twelve(settings: Settings, tools: Tools) -> int:
    """For twelve answers of 16 ids that are asked for at once."""
    return (await process(settings, tuple((40 + at, *PROMPT) for at in range(12)), 16, together=True))[2].steps


async def cached(settings: Settings, tools: Tools) -> int:
    """Ids of a prompt that need not be computed the second time."""
    return (await process(settings, (PROMPT, PROMPT), 2))[0][1][1]


async def broken(settings: Settings, tools: Tools) -> bool:
    """By a prompt that asks for it."""
    return (await process(settings, ((0, 1, 2),), 8))[0][0][0] < 0


async def tells_time(settings: Settings, tools: Tools) -> bool:
    """Whether the first of an id's top log-probabilities is a time, and no id."""
    client = EngineClient(settings.engine_settings())
    try:
        await client.start()
        async for events in client.submit(plain_request(PROMPT, 1, logprobs=1)):
            return events.logprobs[0].top[0][0] != events.token_ids[0]
        return False
    finally:
        await client.close()


async def recorded(settings: Settings, tools: Tools) -> int:
    """Files that a fault leaves in the folder for temporary ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tools.folder))
        assert await broken(settings, tools)
    return len(list(tools.folder.glob("whippet-steps-*")))


async def seconds(settings: Settings, tools: Tools) -> float:
    """That an answer of ten ids takes."""
    clock = asyncio.get_running_loop().time
    client = EngineClient(settings.engine_settings())
    try:
        await client.start()
        begun = clock()
        await generate(client, PROMPT, 10)
        return clock() - begun
    finally:
        await client.close()


async def seconds_unnoticed(settings: Settings, tools: Tools) -> float:
    """That an engine process which was stopped is taken for a sound one."""
    clock = asyncio.get_running_loop().time
    client = EngineClient(settings.engine_settings())
    try:
        await client.start()
        assert client.pid is not None
        begun = clock()
        os.kill(client.pid, signal.SIGSTOP)
        while client.state is EngineState.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return clock() - begun
    finally:
        client.kill()
        await client.close()


async def seconds_alive(settings: Settings, tools: Tools) -> float:
    """For which liveness holds while every engine process is killed as it comes."""
    clock = asyncio.get_running_loop().time
    client = EngineClient(settings.engine_settings())
    try:
        await client.start()
        begun = clock()
        while client.alive:
            client.kill()
            await asyncio.sleep(0.01)
        return clock() - begun
    finally:
        await client.close()


async def joins(settings: Settings, tools: Tools) -> str:
    """What a rank of another host finds that knows the secret `x…` and tries each port until the engine is ready."""
    for name, secret in (("secret", "x" * 32), ("other", "y" * 32)):
        (tools.folder / name).write_text(secret)
    client = EngineClient(settings.engine_settings())
    started = asyncio.create_task(client.start())
    try:
        while not started.done():
            for name, port in zip("ab", RANKS_PORTS, strict=True):
                with contextlib.suppress(ConnectionRefusedError):
                    try:
                        given = await asyncio.to_thread(join, f"127.0.0.1:{port}", b"x" * 32, code_digest())
                    except JoinRefused:
                        return f"refused at {name}"
                    given.close()
                    return f"taken at {name}"
            await asyncio.sleep(0.01)
        return "nobody listens"
    finally:
        started.cancel()
        client.kill()
        await client.close()


async def looks_in_redis(settings: Settings, tools: Tools) -> bool:
    """Whether a prompt that the device lacks is looked for beyond it."""
    counts = (await process(settings, (PROMPT * 16,), 2))[2].tier.counts
    return any(event == "block_gate" for event, _, _ in counts)


PROOFS = {
    "model": Proof(f"{MODELS}/demo", model("weights_bytes"), base=MODEL),
    "engine.kind": Proof("fake", kind, becomes("Qwen3ForCausalLM", "fake"), MODEL),
    "engine.hang-timeout": Proof(
        "0.5", seconds_unnoticed, lambda before, after: before > after, (*FAKE, "--engine.hang-timeout=2")
    ),
    "engine.give-up": Proof(
        "0.2", seconds_alive, lambda before, after: before > after, (*FAKE, "--engine.give-up=2.5")
    ),
    "engine.ranks-elsewhere": Proof("1", joins, becomes("nobody listens", "taken at a"), RANKS),
    "engine.ranks-listen": Proof(
        f"127.0.0.1:{RANKS_PORTS[1]}",
        joins,
        becomes("taken at a", "taken at b"),
        (*RANKS, "--engine.ranks-elsewhere=1"),
    ),
    "engine.ranks-secret-file": Proof(
        "{folder}/other", joins, becomes("taken at a", "refused at a"), (*RANKS, "--engine.ranks-elsewhere=1")
    ),
    "engine.record-steps": Proof("on", recorded, becomes(0, 1), ("--engine=fake", "--fake.faults=on")),
    "device": Proof("cuda", model("device"), lambda _, after: "cuda" in after, MODEL),
    "dtype": Proof("bfloat16", model("dtype"), becomes("float32", "bfloat16"), MODEL),
    "decoder": Proof("graph", model("decoder"), lambda before, after: before == "eager" and "graph" in after, MODEL),
    "load-format": Proof("dummy", model("weights_digest"), base=MODEL),
    "kv-dtype": Proof("fp8", model("kv_dtype"), becomes("float32", "float8_e4m3fn"), MODEL),
    "quantization": Proof("int8", model("weight_format"), base=MODEL),
    "tensor-parallel": Proof("2", model("unused"), base=MODEL),
    "seed": Proof("7", model("weights_digest"), base=(*MODEL, "--load-format=dummy")),
    "draft-model": Proof(f"{MODELS}/demo-draft", model("draft_model"), becomes("", "demo-draft"), MODEL),
    "scheduler.max-sequences": Proof("3", model("max_sequences"), becomes(64, 3), MODEL),
    "scheduler.max-batch-tokens": Proof("16", steps, becomes(12, 15)),
    "scheduler.target-tpot": Proof(  # no step is as fast as that, so one sequence runs at a time
        "0.001", steps_of_twelve, lambda before, after: before < 100 <= after, (*FAKE, "--fake.step-time=0.01")
    ),
    "scheduler.max-context": Proof("64", model("max_context"), lambda before, after: before > after == 64, MODEL),
    "scheduler.kv-bytes": Proof("1048576", model("total_pages"), lambda before, after: before > after, MODEL),
    "scheduler.threads": Proof("2", threads, becomes(1, 2), MODEL),
    "optimizations.batching": Proof("off", steps_together, lambda before, after: before < 30 <= after),
    "optimizations.graphs": Proof("off", switches, becomes({}, {"graphs": False}), MODEL),
    "optimizations.fused-kernels": Proof("off", switches, becomes({}, {"fused_kernels": False}), MODEL),
    "optimizations.speculation": Proof("off", switches, becomes({}, {"speculation": False}), MODEL),
    "optimizations.two-pass-head": Proof("off", switches, becomes({}, {"two_pass_head": False}), MODEL),
    "optimizations.prefix-cache": Proof("off", cached, becomes(48, 0)),
    "optimizations.prefix-redis": Proof("off", looks_in_redis, becomes(True, False), REDIS),
    "fake.vocab-size": Proof("300", fake("vocab_size"), becomes(256, 300)),
    "fake.max-context": Proof("64", fake("max_context"), becomes(4096, 64)),
    "fake.total-pages": Proof("9", fake("total_pages"), becomes(4096, 9)),
    "fake.step-time": Proof("0.2", seconds, lambda before, after: before < after >= 2.0),
    "fake.tokens-per-step": Proof("3", steps, becomes(12, 4)),
    "fake.faults": Proof("on", broken, becomes(False, True)),
    "fake.stamps": Proof("on", tells_time, becomes(False, True)),
}
