"""Maps RPCs to methods, and to the right that each needs."""

from __future__ import annotations

from service.observability.record import Observers
from service.pb.inference import grpc_service_pb2 as pb
from service.protocols.bodies import as_it_is, unary
from service.protocols.open_inference.servicer import RESOURCES, SERVICE, OpenInferenceServicer
from service.protocols.seam import Services, UseCases
from service.transport.call.auth import ALL_RIGHTS, Right, Rights
from service.transport.call.inbox import Inbox
from service.transport.call.rpc import Endpoints, Guard, service
from service.transport.call.writer import StallWatch

_GENERATE: Rights = frozenset((Right.GENERATE,))


class OpenInference:
    counted = frozenset((f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"))

    def data_services(
        self, cases: UseCases, guard: Guard, inbox: Inbox, watch: StallWatch, observers: Observers
    ) -> Services:
        endpoints = Endpoints(guard, inbox, RESOURCES)
        servicer = OpenInferenceServicer(cases, inbox, watch, observers)
        looks = {
            "ServerLive": unary(pb.ServerLiveRequest, as_it_is, servicer.server_live),
            "ServerReady": unary(pb.ServerReadyRequest, as_it_is, servicer.server_ready),
            "ModelReady": unary(pb.ModelReadyRequest, as_it_is, servicer.model_ready),
            "ServerMetadata": unary(pb.ServerMetadataRequest, as_it_is, servicer.server_metadata),
            "ModelMetadata": unary(pb.ModelMetadataRequest, as_it_is, servicer.model_metadata),
        }
        methods = {
            **{name: endpoints.unary(ALL_RIGHTS, body) for name, body in looks.items()},
            "ModelInfer": endpoints.unary(
                _GENERATE, unary(pb.ModelInferRequest, servicer.read, servicer.infer), cases.admission.check_unread
            ),
            "ModelStreamInfer": endpoints.stream(_GENERATE, servicer.stream_infer, many=True),
        }
        return Services((service(SERVICE, methods, observers),), (SERVICE,), (SERVICE,))

    def admin_services(self, cases: UseCases, guard: Guard, inbox: Inbox, observers: Observers) -> Services:
        return Services((), ())
