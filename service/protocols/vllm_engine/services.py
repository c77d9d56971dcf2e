"""Maps RPCs to methods, and to the right that each needs."""

from __future__ import annotations

from service.observability.record import Observers
from service.pb.smg.grpc.common import tokenizer_pb2
from service.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from service.protocols.bodies import as_it_is, streamed, unary
from service.protocols.seam import Services, UseCases
from service.protocols.vllm_engine.servicer import VllmEngineServicer
from service.transport.call.auth import ALL_RIGHTS, Right, Rights
from service.transport.call.inbox import Inbox
from service.transport.call.rpc import Endpoints, Guard, service
from service.transport.call.status import ResourceTypes
from service.transport.call.writer import StallWatch

ENGINE = "vllm.grpc.engine.VllmEngine"
RESOURCES = ResourceTypes(model="vllm.grpc.engine.Model", request="vllm.grpc.engine.GenerateRequest")

_GENERATE: Rights = frozenset((Right.GENERATE,))
_LOOK: Rights = frozenset((Right.VIEW, Right.ADMIN))  # at what is there beside one's own requests


class VllmEngine:
    counted = frozenset((f"{ENGINE}/Generate",))

    def data_services(
        self, cases: UseCases, guard: Guard, inbox: Inbox, watch: StallWatch, observers: Observers
    ) -> Services:
        endpoints, engine = Endpoints(guard, inbox, RESOURCES), VllmEngineServicer(cases, watch)
        methods = {
            "Generate": endpoints.stream(
                _GENERATE, streamed(pb.GenerateRequest, engine.read, engine.generate), cases.admission.check_unread
            ),
            "Abort": endpoints.unary(_GENERATE, unary(pb.AbortRequest, as_it_is, engine.abort)),
            "HealthCheck": endpoints.unary(ALL_RIGHTS, unary(pb.HealthCheckRequest, as_it_is, engine.health_check)),
            "GetModelInfo": endpoints.unary(ALL_RIGHTS, unary(pb.GetModelInfoRequest, as_it_is, engine.get_model_info)),
            "GetServerInfo": endpoints.unary(_LOOK, unary(pb.GetServerInfoRequest, as_it_is, engine.get_server_info)),
            "GetLoads": endpoints.unary(_LOOK, unary(pb.GetLoadsRequest, as_it_is, engine.get_loads)),
            "GetTokenizer": endpoints.stream(
                _GENERATE, streamed(tokenizer_pb2.GetTokenizerRequest, as_it_is, engine.get_tokenizer)
            ),
        }
        return Services((service(ENGINE, methods, observers),), (ENGINE,), (ENGINE,))

    def admin_services(self, cases: UseCases, guard: Guard, inbox: Inbox, observers: Observers) -> Services:
        return Services((), ())
