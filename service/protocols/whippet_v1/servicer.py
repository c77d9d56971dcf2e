"""The bodies of the RPCs."""

from __future__ import annotations

from engine.api import Engine
from service.core.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.answers.flush import Flusher
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.request import Ask
from service.core.switches import Switches
from service.pb.whippet.v1 import admin_pb2, generation_pb2, model_pb2
from service.protocols.whippet_v1 import render as answers
from service.protocols.whippet_v1.parse import check_model, read_detokenize, read_tokenize
from service.protocols.whippet_v1.parse_admin import read_drain, read_flush, read_switch
from service.protocols.whippet_v1.sink import Messages, StallWatch, Whole, Writer
from service.transport.auth import DEFAULT_TENANT
from service.transport.rpc import Call


class GenerationServicer:
    """whippet.v1.GenerationService."""

    def __init__(self, generator: Generator, model: ServedModel, watch: StallWatch) -> None:
        self._generator = generator
        self._model = model
        self._watch = watch

    async def generate(self, request: generation_pb2.GenerateRequest, call: Call) -> generation_pb2.GenerateResponse:
        """The whole answer in one message."""
        response = generation_pb2.GenerateResponse()

        def sink(ask: Ask, chunked: bool) -> Whole:
            return Whole(call.context, ask, response)

        await self._generator.run(request, call.origin, sink)
        return response

    async def generate_stream(self, request: generation_pb2.GenerateStreamRequest, call: Call) -> None:
        """The answer as it grows."""
        with Writer(call.context, self._watch) as writer:

            def sink(ask: Ask, chunked: bool) -> Messages:
                return Messages(writer, ask, chunked)

            await self._generator.run(request, call.origin, sink)

    async def tokenize(self, request: generation_pb2.TokenizeRequest, call: Call) -> generation_pb2.TokenizeResponse:
        """Text or chat to ids."""
        prompt = read_tokenize(request, self._model.facts())
        return generation_pb2.TokenizeResponse(token_ids=await self._model.tokenize(prompt))

    async def detokenize(
        self, request: generation_pb2.DetokenizeRequest, call: Call
    ) -> generation_pb2.DetokenizeResponse:
        """Ids to text."""
        ids = read_detokenize(request, self._model.facts())
        return generation_pb2.DetokenizeResponse(text=await self._model.detokenize(ids))


class ModelServicer:
    """whippet.v1.ModelService."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def list_models(self, request: model_pb2.ListModelsRequest, call: Call) -> model_pb2.ListModelsResponse:
        """The one there is."""
        return model_pb2.ListModelsResponse(models=[self._model.describe()])

    async def get_model(self, request: model_pb2.GetModelRequest, call: Call) -> model_pb2.GetModelResponse:
        """One by name."""
        check_model(request.name, self._model.facts())
        return model_pb2.GetModelResponse(model=self._model.describe())


class AdminServicer:
    """whippet.v1.AdminService."""

    def __init__(
        self, engine: Engine, admission: Admission, switches: Switches, caches: AnswerCaches, flusher: Flusher
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._switches = switches
        self._caches = caches
        self._flusher = flusher

    async def abort_generation(
        self, request: admin_pb2.AbortGenerationRequest, call: Call
    ) -> admin_pb2.AbortGenerationResponse:
        """Its caller sees ABORTED."""
        tenant = request.tenant or DEFAULT_TENANT
        self._admission.abort(tenant, request.request_id, "an operator ended the request")
        return admin_pb2.AbortGenerationResponse()

    async def get_load(self, request: admin_pb2.GetLoadRequest, call: Call) -> admin_pb2.GetLoadResponse:
        """As of the engine's last report."""
        response = answers.load(self._engine, self._admission.draining)
        response.cache_counts.update(self._caches.named_counts())
        response.cache_breakers.update(self._caches.breakers())
        return response

    async def flush_cache(self, request: admin_pb2.FlushCacheRequest, call: Call) -> admin_pb2.FlushCacheResponse:
        """Forgotten when this returns."""
        return admin_pb2.FlushCacheResponse(entries=await self._flusher.flush(read_flush(request)))

    async def list_optimizations(
        self, request: admin_pb2.ListOptimizationsRequest, call: Call
    ) -> admin_pb2.ListOptimizationsResponse:
        """By name."""
        return admin_pb2.ListOptimizationsResponse(
            optimizations=[answers.optimization(switch) for switch in self._switches.all()]
        )

    async def set_optimization(
        self, request: admin_pb2.SetOptimizationRequest, call: Call
    ) -> admin_pb2.SetOptimizationResponse:
        """In force when this returns."""
        switch = await self._switches.set(*read_switch(request))
        return admin_pb2.SetOptimizationResponse(optimization=answers.optimization(switch))

    async def drain(self, request: admin_pb2.DrainRequest, call: Call) -> admin_pb2.DrainResponse:
        """Nothing new gets in from here on."""
        within = read_drain(request, call.origin)
        self._admission.drain()
        return admin_pb2.DrainResponse(remaining=await self._admission.idle(within))
