"""grpc.reflection.v1alpha: what services a port has. No token is needed.

The answers are grpcio's; reading is ours, so that it is bounded, and that bytes which are no request end the call with
a status instead of a traceback in the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as SERVICE

from service.core.errors import InvalidRequest, ServiceError, Violation
from service.observability.record import Observers, RecordBuilder
from service.transport.inbox import Inbox
from service.transport.rpc import Method, abort_with, service
from service.transport.writer import Context

_METHOD = "ServerReflectionInfo"
_REQUEST = reflection_pb2.ServerReflectionRequest


def handlers(names: Sequence[str], inbox: Inbox, observers: Observers) -> grpc.GenericRpcHandler[bytes, bytes]:
    """The service of a port that has `names`."""
    servicer = ReflectionServicer((*names, SERVICE))

    async def requests(context: Context) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        while True:
            with inbox.open(context, "") as incoming:
                data = await incoming.next()
            if data is None:
                return
            yield _REQUEST.FromString(data)

    async def info(record: RecordBuilder, context: Context) -> None:
        try:
            async for response in servicer.ServerReflectionInfo(requests(context), context):
                await context.write(response.SerializeToString())
        except DecodeError:
            wrong = Violation("", f"the bytes are no {_REQUEST.DESCRIPTOR.full_name}")
            await abort_with(InvalidRequest((wrong,)), record, context)
        except ServiceError as error:
            await abort_with(error, record, context)

    return service(SERVICE, {_METHOD: Method(info, streams=True)}, observers)
