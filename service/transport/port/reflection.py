"""Serves grpc.reflection.v1 and v1alpha, which differ in name alone, without tokens. Messages are bounded as on other
services, and malformed ones end the call with a status."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2 as pb

from service.core.errors import InvalidRequest, ServiceError, Violation
from service.observability.record import Observers, RecordBuilder
from service.transport.call.context import Context
from service.transport.call.described import DescribedFiles
from service.transport.call.inbox import Inbox
from service.transport.call.rpc import Method, abort_with, service

V1 = "grpc.reflection.v1.ServerReflection"
V1_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
_METHOD = "ServerReflectionInfo"


def handlers(
    names: Sequence[str], contract: bytes, inbox: Inbox, observers: Observers
) -> list[grpc.GenericRpcHandler[bytes, bytes]]:
    """`contract`: a FileDescriptorSet, with comments."""
    everything = sorted((*names, V1, V1_ALPHA))
    files = DescribedFiles(everything, FileDescriptorSet.FromString(contract), (_v1_file(), _error_details_file()))

    async def info(record: RecordBuilder, context: Context) -> None:
        try:
            while (data := await _next(inbox, context)) is not None:
                request = pb.ServerReflectionRequest.FromString(data)
                await context.write(_answer(request, everything, files).SerializeToString())
        except DecodeError:
            wrong = Violation("", "the bytes are no ServerReflectionRequest")
            await inbox.drain(context)
            await abort_with(InvalidRequest((wrong,)), record, context)
        except ServiceError as error:
            await inbox.drain(context)
            await abort_with(error, record, context)

    return [service(name, {_METHOD: Method(info, streams=True)}, observers) for name in (V1, V1_ALPHA)]


async def _next(inbox: Inbox, context: Context) -> bytes | None:
    with inbox.open(context, "") as incoming:
        return await incoming.next()


def _v1_file() -> FileDescriptorProto:
    """grpcio has v1alpha alone."""
    alpha = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(alpha)
    return Parse(MessageToJson(alpha).replace("v1alpha", "v1"), FileDescriptorProto())


def _error_details_file() -> FileDescriptorProto:
    """Lets clients that use reflection alone print a refusal's details."""
    details = FileDescriptorProto()
    error_details_pb2.DESCRIPTOR.CopyToProto(details)
    return details


def _answer(
    request: pb.ServerReflectionRequest, services: Sequence[str], files: DescribedFiles
) -> pb.ServerReflectionResponse:
    response = pb.ServerReflectionResponse(valid_host=request.host, original_request=request)
    asked = request.WhichOneof("message_request")
    if asked == "list_services":
        response.list_services_response.service.extend(pb.ServiceResponse(name=name) for name in services)
    elif asked in ("file_by_filename", "file_containing_symbol"):
        name = request.file_by_filename or files.file_of(request.file_containing_symbol)
        found = files.with_dependencies(name)
        if found is None:
            return _refused(response, grpc.StatusCode.NOT_FOUND)
        response.file_descriptor_response.file_descriptor_proto.extend(found)
    elif asked == "all_extension_numbers_of_type" and files.is_message(request.all_extension_numbers_of_type):
        response.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
    elif asked is None:
        return _refused(response, grpc.StatusCode.INVALID_ARGUMENT)
    else:  # no file has extensions
        return _refused(response, grpc.StatusCode.NOT_FOUND)
    return response


def _refused(response: pb.ServerReflectionResponse, code: grpc.StatusCode) -> pb.ServerReflectionResponse:
    response.error_response.error_code, response.error_response.error_message = code.value
    return response
