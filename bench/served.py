"""One reader of a server's streams: what `bench.decode` measures through gRPC."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.grpc_frames import FrameClient, Stream
from bench.own_server import Server
from bench.pace import Answer
from engine.api import SamplingParams
from service.pb.whippet.v1 import generation_pb2 as pb

STREAM = "/whippet.v1.GenerationService/GenerateStream"


def request(prompt: Sequence[int], tokens: int, sampling: SamplingParams) -> bytes:
    """A streamed answer of exactly so many tokens, as text and ids, straight from the model."""
    message = pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=prompt))
    message.stopping.max_tokens = tokens
    message.stopping.ignore_eos = True
    message.output.text = message.output.token_ids = True
    message.cache.response = message.cache.semantic = pb.CACHE_MODE_OFF
    message.cache.bypass_prefix = True
    message.sampling.temperature = sampling.temperature
    message.sampling.top_k = sampling.top_k
    message.sampling.top_p = sampling.top_p
    message.sampling.min_p = sampling.min_p
    message.sampling.repetition_penalty = sampling.repetition_penalty
    message.sampling.presence_penalty = message.sampling.frequency_penalty = 0.0
    message.sampling.seed = sampling.seed
    return message.SerializeToString()


def ask(running: Server, prompt: Sequence[int], tokens: int, sampling: SamplingParams) -> Answer:
    """One answer over a connection of its own."""
    payloads: list[tuple[float, bytes]] = []
    marks: list[float] = []

    def on_message(stream: Stream, data: bytes) -> None:
        payloads.append((time.monotonic(), data))  # decoded afterwards, out of the way
        if len(payloads) == 1:
            marks.append(running.cpu())

    message = request(prompt, tokens, sampling)
    with FrameClient(running.address, time.monotonic, on_message=on_message) as client:
        answer = Answer(time.monotonic())
        stream = client.streams[client.start(STREAM, message)]
        while client.ended < 1 and client.read():
            pass
        answer.cpu = running.cpu() - (marks[0] if marks else 0.0)
    for at, data in payloads:
        count = len(pb.GenerateStreamResponse.FromString(data).token_ids)
        if count:
            answer.arrivals.append((at, count))
    if stream.status != 0 or answer.tokens != tokens:
        said = stream.headers.get("grpc-message", "")
        raise RuntimeError(f"status {stream.status} ({said}), {answer.tokens} of {tokens} tokens came")
    return answer
