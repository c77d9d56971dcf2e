"""Contracts of others, as they publish them: ours has nothing else, and misses no field of a request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from tests.gateways import run

pytestmark = pytest.mark.product

ROOT = Path(__file__).resolve().parents[2]
# Where they have it → the packages, and the requests of which every field must be known.
THEIRS = {
    "smg_grpc_proto.generated.vllm_engine_pb2 smg_grpc_proto.generated.common_pb2": (
        ("vllm.grpc.engine", "smg.grpc.common"),
        (
            "GenerateRequest",
            "SamplingParams",
            "TokenizedInput",
            "AbortRequest",
            "GetLoadsRequest",
            "GetTokenizerRequest",
        ),
    ),
    "tritonclient.grpc.service_pb2": (
        ("inference",),
        ("ModelInferRequest", "InferParameter", "InferTensorContents", "ModelReadyRequest", "ModelMetadataRequest"),
    ),
}
_PRINT = """
import importlib, sys
from google.protobuf.descriptor_pb2 import FileDescriptorSet
whole = FileDescriptorSet()
for name in sys.argv[1:]:
    importlib.import_module(name).DESCRIPTOR.CopyToProto(whole.file.add())
sys.stdout.buffer.write(whole.SerializeToString())
"""


def messages(found: FileDescriptorSet, packages: tuple[str, ...]) -> dict[str, DescriptorProto]:
    files = [file for file in found.file if file.package in packages]
    return {f"{file.package}.{one.name}": one for file in files for one in file.message_type}


def methods(found: FileDescriptorSet, packages: tuple[str, ...]) -> dict[str, tuple[str, str, bool, bool]]:
    return {
        f"{file.package}.{service.name}/{one.name}": (
            one.input_type,
            one.output_type,
            one.client_streaming,
            one.server_streaming,
        )
        for file in found.file
        if file.package in packages
        for service in file.service
        for one in service.method
    }


def shape(field: FieldDescriptorProto, message: DescriptorProto) -> tuple[object, ...]:
    group = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.name, field.number, field.type, field.label, field.type_name, field.proto3_optional, group


def shapes(message: DescriptorProto) -> Mapping[str, tuple[object, ...]]:
    return {field.name: shape(field, message) for field in message.field}


@pytest.mark.parametrize("theirs", THEIRS)
def test_what_we_have_is_what_they_have(theirs: str) -> None:
    packages, requests = THEIRS[theirs]
    published = FileDescriptorSet.FromString(run("-c", _PRINT, *theirs.split()))
    ours = FileDescriptorSet.FromString((ROOT / "service" / "pb" / "descriptors.binpb").read_bytes())
    assert methods(ours, packages).items() <= methods(published, packages).items()
    assert methods(ours, packages)
    expected = messages(published, packages)
    for name, message in messages(ours, packages).items():
        assert shapes(message).items() <= shapes(expected[name]).items(), name
        if name.rpartition(".")[2] in requests:
            assert shapes(message) == shapes(expected[name]), name
        nested = {one.name: shapes(one) for one in expected[name].nested_type}
        assert {one.name: shapes(one) for one in message.nested_type}.items() <= nested.items()
