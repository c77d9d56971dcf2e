"""Maps RPCs to methods."""

from __future__ import annotations

from service.observability.record import Observers
from service.pb.whippet.v1 import admin_pb2, generation_pb2, model_pb2
from service.protocols.bodies import as_it_is, streamed, unary
from service.protocols.seam import Services, UseCases
from service.protocols.whippet_v1.rights import ADMIN, GENERATION, MODEL, RIGHTS
from service.protocols.whippet_v1.servicer import AdminServicer, GenerationServicer, ModelServicer
from service.transport.call.inbox import Inbox
from service.transport.call.rpc import Endpoints, Guard, service
from service.transport.call.status import ResourceTypes
from service.transport.call.writer import StallWatch

RESOURCES = ResourceTypes(model="whippet.v1.Model", request="whippet.v1.GenerateRequest")


class WhippetV1:
    counted = frozenset(f"{GENERATION}/{name}" for name in RIGHTS[GENERATION])

    def data_services(
        self, cases: UseCases, guard: Guard, inbox: Inbox, watch: StallWatch, observers: Observers
    ) -> Services:
        endpoints = Endpoints(guard, inbox, RESOURCES)
        may, look = RIGHTS[GENERATION], RIGHTS[MODEL]
        generation = GenerationServicer(cases.generator, cases.tokenization, cases.model, watch)
        model, check = ModelServicer(cases.model), cases.admission.check_unread
        generate = {
            "GenerateStream": endpoints.stream(
                may["GenerateStream"],
                streamed(generation_pb2.GenerateStreamRequest, generation.read, generation.generate_stream),
                check,
            ),
            "Generate": endpoints.unary(
                may["Generate"], unary(generation_pb2.GenerateRequest, generation.read, generation.generate), check
            ),
            "Tokenize": endpoints.unary(
                may["Tokenize"], unary(generation_pb2.TokenizeRequest, generation.read_tokenize, generation.tokenize)
            ),
            "Detokenize": endpoints.unary(
                may["Detokenize"],
                unary(generation_pb2.DetokenizeRequest, generation.read_detokenize, generation.detokenize),
            ),
        }
        models = {
            "ListModels": endpoints.unary(
                look["ListModels"], unary(model_pb2.ListModelsRequest, as_it_is, model.list_models)
            ),
            "GetModel": endpoints.unary(look["GetModel"], unary(model_pb2.GetModelRequest, as_it_is, model.get_model)),
        }
        handlers = service(GENERATION, generate, observers), service(MODEL, models, observers)
        return Services(handlers, (GENERATION, MODEL), (GENERATION,))

    def admin_services(self, cases: UseCases, guard: Guard, inbox: Inbox, observers: Observers) -> Services:
        endpoints, may, admin = Endpoints(guard, inbox, RESOURCES), RIGHTS[ADMIN], AdminServicer(cases)
        methods = {
            "AbortGeneration": endpoints.unary(
                may["AbortGeneration"], unary(admin_pb2.AbortGenerationRequest, as_it_is, admin.abort_generation)
            ),
            "GetLoad": endpoints.unary(may["GetLoad"], unary(admin_pb2.GetLoadRequest, as_it_is, admin.get_load)),
            "FlushCache": endpoints.unary(
                may["FlushCache"], unary(admin_pb2.FlushCacheRequest, as_it_is, admin.flush_cache)
            ),
            "ListOptimizations": endpoints.unary(
                may["ListOptimizations"], unary(admin_pb2.ListOptimizationsRequest, as_it_is, admin.list_optimizations)
            ),
            "SetOptimization": endpoints.unary(
                may["SetOptimization"], unary(admin_pb2.SetOptimizationRequest, as_it_is, admin.set_optimization)
            ),
            "Drain": endpoints.unary(may["Drain"], unary(admin_pb2.DrainRequest, as_it_is, admin.drain)),
            "Undrain": endpoints.unary(may["Undrain"], unary(admin_pb2.UndrainRequest, as_it_is, admin.undrain)),
            "Profile": endpoints.unary(may["Profile"], unary(admin_pb2.ProfileRequest, as_it_is, admin.profile)),
        }
        return Services((service(ADMIN, methods, observers),), (ADMIN,))
