"""Which bytes go to which RPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from service.pb.whippet.v1 import admin_pb2, generation_pb2, model_pb2
from service.protocols.seam import Services, UseCases
from service.protocols.whippet_v1.parse import decode
from service.protocols.whippet_v1.servicer import AdminServicer, GenerationServicer, ModelServicer
from service.transport.auth import Right
from service.transport.rpc import Call, Endpoints, Guard, StreamBody, UnaryBody, service
from service.transport.status import ResourceTypes
from service.transport.writer import StallWatch

GENERATION = "whippet.v1.GenerationService"
MODEL = "whippet.v1.ModelService"
ADMIN = "whippet.v1.AdminService"
RESOURCES = ResourceTypes(model="whippet.v1.Model", request="whippet.v1.GenerateRequest")
_Request = TypeVar("_Request", bound=Message)


class WhippetV1:
    """The protocol of `protos/whippet/v1`."""

    def data_services(self, cases: UseCases, guard: Guard, watch: StallWatch) -> Services:
        endpoints, may = Endpoints(guard, RESOURCES), Right.GENERATE
        generation = GenerationServicer(cases.generator, cases.tokenization, cases.model, watch)
        model = ModelServicer(cases.model)
        generate = {
            "GenerateStream": endpoints.stream(
                may, streamed(generation_pb2.GenerateStreamRequest, generation.generate_stream)
            ),
            "Generate": endpoints.unary(may, unary(generation_pb2.GenerateRequest, generation.generate)),
            "Tokenize": endpoints.unary(may, unary(generation_pb2.TokenizeRequest, generation.tokenize)),
            "Detokenize": endpoints.unary(may, unary(generation_pb2.DetokenizeRequest, generation.detokenize)),
        }
        models = {
            "ListModels": endpoints.unary(may, unary(model_pb2.ListModelsRequest, model.list_models)),
            "GetModel": endpoints.unary(may, unary(model_pb2.GetModelRequest, model.get_model)),
        }
        return Services((service(GENERATION, generate), service(MODEL, models)), (GENERATION, MODEL))

    def admin_services(self, cases: UseCases, guard: Guard) -> Services:
        endpoints, may, admin = Endpoints(guard, RESOURCES), Right.ADMIN, AdminServicer(cases)
        methods = {
            "AbortGeneration": endpoints.unary(may, unary(admin_pb2.AbortGenerationRequest, admin.abort_generation)),
            "GetLoad": endpoints.unary(may, unary(admin_pb2.GetLoadRequest, admin.get_load)),
            "FlushCache": endpoints.unary(may, unary(admin_pb2.FlushCacheRequest, admin.flush_cache)),
            "ListOptimizations": endpoints.unary(
                may, unary(admin_pb2.ListOptimizationsRequest, admin.list_optimizations)
            ),
            "SetOptimization": endpoints.unary(may, unary(admin_pb2.SetOptimizationRequest, admin.set_optimization)),
            "Drain": endpoints.unary(may, unary(admin_pb2.DrainRequest, admin.drain)),
        }
        return Services((service(ADMIN, methods),), (ADMIN,))


def unary(kind: type[_Request], body: Callable[[_Request, Call], Awaitable[Message]]) -> UnaryBody:
    """The body over bytes."""

    async def answer(data: bytes, call: Call) -> bytes:
        return (await body(decode(kind, data), call)).SerializeToString()

    return answer


def streamed(kind: type[_Request], body: Callable[[_Request, Call], Awaitable[None]]) -> StreamBody:
    """The body over bytes; it writes its responses to the call's context."""

    def answer(data: bytes, call: Call) -> Awaitable[None]:
        return body(decode(kind, data), call)

    return answer
