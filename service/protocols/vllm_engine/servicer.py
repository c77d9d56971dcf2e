"""Implements the RPCs: parse, run the use case, render."""

from __future__ import annotations

import contextlib

from engine.api import TokenLogprob
from service.core.answers.delivery import AnswerMessage
from service.core.errors import UnknownRequest
from service.core.request import PromptFacts
from service.pb.smg.grpc.common import tokenizer_pb2
from service.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from service.protocols.bodies import send_headers
from service.protocols.sampling_fields import fields_called
from service.protocols.seam import UseCases
from service.protocols.vllm_engine import render
from service.protocols.vllm_engine.parse import NAMES, ParsedGenerate, read_generate
from service.transport.call.rpc import Call
from service.transport.call.writer import StallWatch, Writer

_PIECE = 64 * 1024  # bytes of an archive in one message


class _Outlet:
    def __init__(self, writer: Writer, question: ParsedGenerate) -> None:
        self._writer = writer
        self._question = question
        self._prompt_tokens = self._first_id = 0
        self._scored_ids: list[int] = []  # of the prompt
        self._scores: list[TokenLogprob] = []

    async def begin(self, prompt: PromptFacts) -> None:
        self._prompt_tokens, self._first_id = prompt.prompt_tokens, prompt.first_id
        await send_headers(self._writer.context, prompt)

    async def send(self, message: AnswerMessage) -> None:
        question, prompt_tokens, writer = self._question, self._prompt_tokens, self._writer
        scores = self._prompt_scores(message) if message.prompt_ids else None
        if question.streamed and (message.token_ids or scores is not None):
            response = render.chunk(message, question, prompt_tokens)
            if scores is not None:
                response.chunk.input_logprobs.CopyFrom(scores)
            await writer.write(response.SerializeToString())
        if message.ending is not None:
            response = render.complete(message, question, message.ending, prompt_tokens)
            if scores is not None and not question.streamed:
                response.complete.input_logprobs.CopyFrom(scores)
            await writer.write(response.SerializeToString())

    def _prompt_scores(self, message: AnswerMessage) -> pb.InputLogProbs | None:
        """Returns the whole prompt's scores with the message that completes them, since this protocol has one place for
        them."""
        self._scored_ids.extend(message.prompt_ids)
        self._scores.extend(message.prompt_logprobs)
        if len(self._scored_ids) < self._prompt_tokens - 1:
            return None
        return render.input_logprobs([self._first_id, *self._scored_ids], self._scores, self._question)


class VllmEngineServicer:
    def __init__(self, cases: UseCases, watch: StallWatch) -> None:
        self._cases = cases
        self._watch = watch

    def read(self, message: pb.GenerateRequest) -> ParsedGenerate:
        return read_generate(message, self._cases.model.facts())

    async def generate(self, question: ParsedGenerate, call: Call) -> None:
        generator, request = self._cases.generator, question.request
        answer = generator.stream if question.streamed else generator.answer
        with Writer(call.context, self._watch, call.origin.record) as writer, fields_called(NAMES):
            await answer(request, call.origin, _Outlet(writer, question))

    async def abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        """A gateway whose client has gone calls this instead of cancelling Generate, which ends with ABORTED."""
        for request_id in request.request_ids:
            with contextlib.suppress(UnknownRequest):
                self._cases.admission.abort(call.origin.tenant, request_id, "the caller ended the request")
        return pb.AbortResponse()

    async def health_check(self, request: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        return render.health(self._cases)

    async def get_model_info(self, request: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        return render.model_info(self._cases.model.describe())

    async def get_server_info(self, request: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
        return render.server_info(self._cases)

    async def get_loads(self, request: pb.GetLoadsRequest, call: Call) -> pb.GetLoadsResponse:
        return render.loads(self._cases)

    async def get_tokenizer(self, request: tokenizer_pb2.GetTokenizerRequest, call: Call) -> None:
        archive = await self._cases.tokenizer_files.get()
        size = len(archive.data)
        with Writer(call.context, self._watch, call.origin.record) as writer:
            for start in range(0, size, _PIECE):
                end = start + _PIECE
                piece = tokenizer_pb2.GetTokenizerChunk(data=archive.data[start:end])
                if end >= size:
                    piece.sha256 = archive.sha256
                await writer.write(piece.SerializeToString())
