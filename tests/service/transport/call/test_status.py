"""The table of statuses: complete, bounded and silent about internals."""

from __future__ import annotations

import base64
import inspect
import urllib.parse

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from engine import errors as engine_errors
from service.core import errors
from service.core.errors import InvalidRequest, Violation
from service.protocols.whippet_v1.services import RESOURCES
from service.transport.call.status import RpcFailure, failure_of

C = grpc.StatusCode
EXPECTED = {
    InvalidRequest((Violation("a", "b"),)): (C.INVALID_ARGUMENT, {"BadRequest"}),
    errors.UnknownModel("m", "served"): (C.NOT_FOUND, {"ResourceInfo"}),
    errors.UnknownRequest("r"): (C.NOT_FOUND, {"ResourceInfo"}),
    errors.DuplicateRequest("r"): (C.ALREADY_EXISTS, {"ErrorInfo"}),
    errors.Unimplemented("f", "m"): (C.UNIMPLEMENTED, {"ErrorInfo"}),
    errors.Overloaded("m", "QUEUE_FULL", 0.25): (C.RESOURCE_EXHAUSTED, {"ErrorInfo", "RetryInfo"}),
    errors.CacheUnavailable("m", 1.0): (C.UNAVAILABLE, {"ErrorInfo", "RetryInfo"}),
    errors.Draining(1.0): (C.UNAVAILABLE, {"ErrorInfo", "RetryInfo"}),
    errors.ShuttingDown(): (C.FAILED_PRECONDITION, {"ErrorInfo"}),
    errors.Unauthenticated("m", "TOKEN_UNKNOWN"): (C.UNAUTHENTICATED, {"ErrorInfo"}),
    errors.PermissionDenied(("view", "admin")): (C.PERMISSION_DENIED, {"ErrorInfo"}),
    errors.StreamStalled("m"): (C.ABORTED, {"ErrorInfo"}),
    errors.MessageStalled("m"): (C.ABORTED, {"ErrorInfo"}),
    errors.AnswerTooLarge("m"): (C.RESOURCE_EXHAUSTED, {"ErrorInfo"}),
    engine_errors.Unsupported("m"): (C.UNIMPLEMENTED, {"ErrorInfo"}),
    engine_errors.EngineUnavailable("m", 2.0): (C.UNAVAILABLE, {"ErrorInfo", "RetryInfo"}),
    engine_errors.EngineFailed("m"): (C.INTERNAL, {"ErrorInfo"}),
    engine_errors.OutOfMemory("m"): (C.RESOURCE_EXHAUSTED, {"ErrorInfo"}),
    engine_errors.ConstraintTooCostly("m"): (C.FAILED_PRECONDITION, {"ErrorInfo"}),
    engine_errors.ConstraintUnmet("m"): (C.FAILED_PRECONDITION, {"ErrorInfo"}),
    engine_errors.Quarantined("m"): (C.FAILED_PRECONDITION, {"ErrorInfo"}),
    engine_errors.DeadlineExceeded("m"): (C.DEADLINE_EXCEEDED, set()),
    engine_errors.Aborted("m"): (C.ABORTED, {"ErrorInfo"}),
    engine_errors.InvalidModel("m"): (C.INTERNAL, {"ErrorInfo"}),  # never leaves the start of a server
    ValueError("the prompt was: secret"): (C.INTERNAL, {"ErrorInfo"}),
}
KINDS = {
    kind.DESCRIPTOR.name: kind
    for kind in (
        error_details_pb2.BadRequest,
        error_details_pb2.ErrorInfo,
        error_details_pb2.RetryInfo,
        error_details_pb2.ResourceInfo,
    )
}


def details(failure: RpcFailure) -> dict[str, object]:
    packed = dict(failure.trailers).get("grpc-status-details-bin")
    if packed is None:
        return {}
    assert isinstance(packed, bytes)
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (failure.code.value[0], failure.message)
    found = {}
    for detail in status.details:
        name = detail.TypeName().rpartition(".")[2]
        message = KINDS[name]()
        assert detail.Unpack(message)
        found[name] = message
    return found


@pytest.mark.parametrize("error", EXPECTED, ids=lambda error: type(error).__name__)
def test_each_error_has_its_status(error: Exception) -> None:
    code, kinds = EXPECTED[error]
    failure = failure_of(error, RESOURCES)
    assert failure.code is code
    assert set(details(failure)) == kinds
    assert ("grpc-retry-pushback-ms" in dict(failure.trailers)) == ("RetryInfo" in kinds)


def test_no_error_is_forgotten() -> None:
    known = {type(error) for error in EXPECTED}
    for module in (errors, engine_errors):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Exception) and kind not in (errors.ServiceError, engine_errors.EngineError):
                assert kind in known, kind


def test_subclasses_share_the_status_of_their_parent() -> None:
    class Special(engine_errors.Aborted):
        pass

    assert failure_of(Special("x"), RESOURCES).code is C.ABORTED


def test_a_foreign_error_tells_nothing() -> None:
    failure = failure_of(ValueError("the prompt was: secret"), RESOURCES)
    assert "secret" not in repr(failure)
    assert failure.code is C.INTERNAL


@pytest.mark.parametrize(("seconds", "milliseconds"), [(0.0001, 1), (0.25, 250), (1.0, 1000), (10.0, 10_000)])
def test_both_ways_of_asking_for_patience_agree(seconds: float, milliseconds: int) -> None:
    failure = failure_of(errors.Overloaded("m", "QUEUE_FULL", seconds), RESOURCES)
    retry = details(failure)["RetryInfo"]
    assert retry.retry_delay.ToMilliseconds() == milliseconds  # type: ignore[attr-defined]
    assert dict(failure.trailers)["grpc-retry-pushback-ms"] == str(milliseconds)


@given(st.lists(st.builds(Violation, st.text(max_size=300), st.text(max_size=300)), min_size=1, max_size=200))
def test_trailers_stay_small_whatever_is_wrong(violations: list[Violation]) -> None:
    failure = failure_of(InvalidRequest(tuple(violations)), RESOURCES)
    packed = dict(failure.trailers)["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    assert len(base64.b64encode(packed)) + len(urllib.parse.quote(failure.message)) < 7500  # clients take 8 KiB
    found = details(failure)["BadRequest"].field_violations  # type: ignore[attr-defined]
    assert 1 <= len(found) <= len(violations)
    if len(found) < len(violations):
        assert found[-1].description == "and more"
