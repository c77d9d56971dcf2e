"""Reasons of refusals: the code, the contract and docs/clients.md have the same ones, with the same codes."""

from __future__ import annotations

import re

import grpc
import pytest

from engine import errors as engine_errors
from scripts.figures import ROOT
from service.core import errors
from service.core.errors import Reason
from service.pb.whippet.v1 import errors_pb2
from service.transport.call.status import DOMAIN, failure_of

PROTO = (ROOT / "protos" / "whippet" / "v1" / "errors.proto").read_text("utf-8")
PAGE = (ROOT / "docs" / "clients.md").read_text("utf-8")
# Reason → code, whether "later" helps.
CONTRACT = {
    name: (code, "ater" in what)
    for code, what, name in re.findall(r"  // ([A-Z_]+): (.*)\n  ERROR_REASON_(\w+) = \d+;", PROTO)
}
ROW = re.compile(r"^\| ([A-Z_]+) \| (`[A-Z_`, ]+`) \| (yes|no) \|$", re.MULTILINE)


def test_the_contract_names_what_the_code_says() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert names - {"UNSPECIFIED"} == {reason.value for reason in Reason} == set(CONTRACT)
    assert all(reason.name == reason.value for reason in Reason)


def test_the_page_has_the_same_table() -> None:
    told = {
        name: (code, later == "yes")
        for code, names, later in ROW.findall(PAGE)
        for name in names.replace("`", "").split(", ")
    }
    assert told == CONTRACT
    assert f"`{DOMAIN}`" in PAGE


@pytest.mark.parametrize(
    "error",
    [
        errors.DuplicateRequest("r"),
        errors.Unimplemented("f", "m"),
        errors.Overloaded("m", Reason.QUEUE_FULL, 1.0),
        errors.Draining(1.0),
        errors.ShuttingDown(),
        errors.CacheUnavailable("m", 1.0),
        errors.Unauthenticated("m", Reason.TOKEN_UNKNOWN),
        errors.PermissionDenied(("admin",)),
        errors.StreamStalled("m"),
        errors.MessageStalled("m"),
        errors.AnswerTooLarge("m"),
        engine_errors.EngineUnavailable("m", 1.0),
        engine_errors.EngineFailed("m"),
        engine_errors.OutOfMemory("m"),
        engine_errors.Quarantined("m"),
        engine_errors.Aborted("m"),
        engine_errors.ConstraintTooCostly("m"),
        engine_errors.ConstraintUnmet("m"),
        ValueError("m"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_reason_comes_with_its_code_and_hint(error: Exception) -> None:
    failure = failure_of(error, None)
    pushed_back = any(key == "grpc-retry-pushback-ms" for key, _ in failure.trailers)
    assert CONTRACT[failure.reason] == (failure.code.name, pushed_back)
    assert isinstance(failure.code, grpc.StatusCode)
