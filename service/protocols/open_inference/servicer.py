"""Implements the RPCs: parse, run the use case, render."""

from __future__ import annotations

import grpc
from msgspec.structs import replace

from service.core.answers.delivery import AnswerMessage
from service.core.request import Origin, PromptFacts
from service.observability.record import Observers
from service.pb.inference import grpc_service_pb2 as pb
from service.protocols.bodies import WholeOutlet, decode
from service.protocols.open_inference import render
from service.protocols.open_inference.parse import NAMES, VERSION, ParsedInference, check_model, read_infer
from service.protocols.sampling_fields import fields_called
from service.protocols.seam import UseCases
from service.protocols.shape import check_shape
from service.transport.call.inbox import Inbox
from service.transport.call.rpc import Call
from service.transport.call.status import ResourceTypes, failure_of
from service.transport.call.writer import StallWatch, Writer
from service.version import version

SERVICE = "inference.GRPCInferenceService"
RESOURCES = ResourceTypes(model="inference.Model", request="inference.ModelInferRequest")


class _Pieces:
    """Writes no headers: they belong to the stream, which has many requests."""

    def __init__(self, writer: Writer, question: ParsedInference) -> None:
        self._writer = writer
        self._question = question

    async def begin(self, prompt: PromptFacts) -> None:
        pass

    async def send(self, message: AnswerMessage) -> None:
        await self._writer.write(render.piece(message, self._question).SerializeToString())


class OpenInferenceServicer:
    def __init__(self, cases: UseCases, inbox: Inbox, watch: StallWatch, observers: Observers) -> None:
        self._cases = cases
        self._inbox = inbox
        self._watch = watch
        self._observers = observers

    async def server_live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not self._cases.objection)

    async def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        known = request.name == self._cases.model.name and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=known and not self._cases.objection)

    async def server_metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="whippet", version=version())

    async def model_metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        facts = self._cases.model.facts()
        check_model(request.name, request.version, facts)
        return render.model_metadata(facts)

    def read(self, message: pb.ModelInferRequest) -> ParsedInference:
        return read_infer(message, self._cases.model.facts(), streams=False)

    async def infer(self, question: ParsedInference, call: Call) -> pb.ModelInferResponse:
        outlet = WholeOutlet(call.context, lambda found: render.whole(found, question))
        with fields_called(NAMES):
            await self._cases.generator.answer(question.request, call.origin, outlet)
        return outlet.response

    async def stream_infer(self, call: Call) -> None:
        """Each request has its own record, beside the stream's."""
        with Writer(call.context, self._watch, call.origin.record) as writer:
            while await self._next(call, writer):
                pass

    async def _next(self, call: Call, writer: Writer) -> bool:
        with self._inbox.open(call.context, call.origin.tenant) as incoming:
            data = await incoming.next()
            if data is None:
                return False
            self._inbox.occupy(call.incoming)  # between its requests, too
            record = self._observers.begin(f"{SERVICE}/ModelStreamInfer", call.context.invocation_metadata() or ())
            record.tenant, record.bytes_in, record.read_at = call.origin.tenant, len(data), record.arrived_at
            code = "CANCELLED"
            try:
                await self._answer(data, replace(call.origin, arrived_at=record.arrived_at, record=record), writer)
                code = "OK"
            finally:
                self._observers.end(record, code)
        return True

    async def _answer(self, data: bytes, origin: Origin, writer: Writer) -> None:
        """A refusal is sent in the stream, which goes on."""
        request_id = ""
        try:
            check_shape(pb.ModelInferRequest, data)
            message = decode(pb.ModelInferRequest, data)
            request_id = message.id
            question = read_infer(message, self._cases.model.facts(), streams=True)
            generator = self._cases.generator
            answer = generator.stream if question.streamed else generator.answer
            with fields_called(NAMES):
                await answer(question.request, origin, _Pieces(writer, question))
        except (grpc.aio.InternalError, grpc.aio.BaseError):
            raise
        except Exception as error:
            failure = failure_of(error, RESOURCES)
            origin.record.code, origin.record.reason = failure.code.name, failure.reason
            if failure.code is grpc.StatusCode.INTERNAL:
                raise
            await writer.write(render.failed(request_id, failure.message).SerializeToString())
