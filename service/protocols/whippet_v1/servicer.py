"""Implements the RPCs: parse, run the use case, render."""

from __future__ import annotations

from collections.abc import Awaitable

from service.core.answers.delivery import AnswerMessage
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.request import ChatPrompt, Output, PromptFacts, Request, TextPrompt
from service.core.text import TokenTexts
from service.core.tokenization import Tokenization
from service.pb.whippet.v1 import admin_pb2, generation_pb2, model_pb2
from service.protocols.bodies import WholeOutlet, send_headers
from service.protocols.seam import UseCases
from service.protocols.whippet_v1 import render, render_load
from service.protocols.whippet_v1.parse import (
    GenerationMessage,
    check_model,
    read_detokenize,
    read_generation,
    read_tokenize,
)
from service.protocols.whippet_v1.parse_admin import read_drain, read_flush, read_profile, read_switch
from service.transport.call.auth import DEFAULT_TENANT
from service.transport.call.rpc import Call
from service.transport.call.writer import StallWatch, Writer


class StreamOutlet:
    def __init__(self, writer: Writer, output: Output, texts: TokenTexts) -> None:
        self._writer = writer
        self._output = output
        self._texts = texts

    async def begin(self, prompt: PromptFacts) -> None:
        await send_headers(self._writer.context, prompt)

    def send(self, message: AnswerMessage) -> Awaitable[None]:
        return self._writer.write(render.stream_message(message, self._output, self._texts).SerializeToString())


class GenerationServicer:
    def __init__(self, generator: Generator, tokenization: Tokenization, model: ServedModel, watch: StallWatch) -> None:
        self._generator = generator
        self._tokenization = tokenization
        self._model = model
        self._watch = watch

    def read(self, message: GenerationMessage) -> Request:
        return read_generation(message, self._model.facts(), self._generator.semantic)

    def read_tokenize(self, message: generation_pb2.TokenizeRequest) -> TextPrompt | ChatPrompt:
        return read_tokenize(message, self._model.facts())

    def read_detokenize(self, message: generation_pb2.DetokenizeRequest) -> list[int]:
        return read_detokenize(message, self._model.facts())

    async def generate(self, request: Request, call: Call) -> generation_pb2.GenerateResponse:
        texts = self._model.token_texts
        outlet = WholeOutlet(call.context, lambda found: render.whole_message(found, request.output, texts))
        await self._generator.answer(request, call.origin, outlet)
        return outlet.response

    async def generate_stream(self, request: Request, call: Call) -> None:
        with Writer(call.context, self._watch, call.origin.record) as writer:
            await self._generator.stream(
                request, call.origin, StreamOutlet(writer, request.output, self._model.token_texts)
            )

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, call: Call) -> generation_pb2.TokenizeResponse:
        return generation_pb2.TokenizeResponse(token_ids=await self._tokenization.tokenize(prompt, call.origin))

    async def detokenize(self, ids: list[int], call: Call) -> generation_pb2.DetokenizeResponse:
        return generation_pb2.DetokenizeResponse(text=await self._tokenization.detokenize(ids, call.origin))


class ModelServicer:
    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def list_models(self, request: model_pb2.ListModelsRequest, call: Call) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[render.model(self._model.describe())])

    async def get_model(self, request: model_pb2.GetModelRequest, call: Call) -> model_pb2.GetModelResponse:
        check_model(request.name, self._model.facts())
        return model_pb2.GetModelResponse(model=render.model(self._model.describe()))


class AdminServicer:
    def __init__(self, cases: UseCases) -> None:
        self._cases = cases

    async def abort_generation(
        self, request: admin_pb2.AbortGenerationRequest, call: Call
    ) -> admin_pb2.AbortGenerationResponse:
        """The generation's caller gets ABORTED."""
        tenant = request.tenant or DEFAULT_TENANT
        self._cases.admission.abort(tenant, request.request_id, "an operator ended the request")
        return admin_pb2.AbortGenerationResponse()

    async def get_load(self, request: admin_pb2.GetLoadRequest, call: Call) -> admin_pb2.GetLoadResponse:
        return render_load.load(self._cases)

    async def flush_cache(self, request: admin_pb2.FlushCacheRequest, call: Call) -> admin_pb2.FlushCacheResponse:
        """Returns once the answers are dropped."""
        return admin_pb2.FlushCacheResponse(entries=await self._cases.flusher.flush(read_flush(request)))

    async def list_optimizations(
        self, request: admin_pb2.ListOptimizationsRequest, call: Call
    ) -> admin_pb2.ListOptimizationsResponse:
        return admin_pb2.ListOptimizationsResponse(
            optimizations=[render.optimization(switch) for switch in self._cases.switches.all()]
        )

    async def set_optimization(
        self, request: admin_pb2.SetOptimizationRequest, call: Call
    ) -> admin_pb2.SetOptimizationResponse:
        """Returns once the change is in force."""
        switch = await self._cases.switches.set(*read_switch(request))
        return admin_pb2.SetOptimizationResponse(optimization=render.optimization(switch))

    async def drain(self, request: admin_pb2.DrainRequest, call: Call) -> admin_pb2.DrainResponse:
        """Drains the server, even if the caller leaves."""
        within = read_drain(request, call.origin)
        self._cases.drain.begin()
        remaining = await self._cases.drain.over(within)
        return admin_pb2.DrainResponse(remaining=remaining, admitting=self._cases.drain.admitting)

    async def undrain(self, request: admin_pb2.UndrainRequest, call: Call) -> admin_pb2.UndrainResponse:
        """Returns once new requests are admitted."""
        self._cases.drain.undo()
        return admin_pb2.UndrainResponse()

    async def profile(self, request: admin_pb2.ProfileRequest, call: Call) -> admin_pb2.ProfileResponse:
        found = await self._cases.profiler.take(read_profile(request))
        return admin_pb2.ProfileResponse(
            processes=[
                admin_pb2.ProcessProfile(process=one.process, stacks=one.stacks, why_not=one.why_not) for one in found
            ]
        )
