"""Reflection, both versions of it: what a port has, as programs and people are shown it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as pb

from tests.service.conftest import ROOT, Refusal, Server, refused

pytestmark = pytest.mark.product

V1 = "grpc.reflection.v1.ServerReflection"
V1_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
VERSIONS = (V1, V1_ALPHA)
Request = pb.ServerReflectionRequest
BUF = ROOT / ".tools" / "node_modules" / ".bin" / "buf"
GRPCURL = Path(sys.executable).parent / "grpcurl"


def answers(server: Server, service: str, *requests: Request) -> list[pb.ServerReflectionResponse]:
    call = server.channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=Request.SerializeToString,
        response_deserializer=pb.ServerReflectionResponse.FromString,
    )
    return list(call(iter(requests), timeout=60))


def files(answer: pb.ServerReflectionResponse) -> list[FileDescriptorProto]:
    return [FileDescriptorProto.FromString(one) for one in answer.file_descriptor_response.file_descriptor_proto]


@pytest.mark.parametrize("service", VERSIONS)
def test_each_kind_of_question_has_its_answer(server: Server, service: str) -> None:
    listed, by_name, by_symbol, numbers, extension, unknown, nothing = answers(
        server,
        service,
        Request(host="here", list_services=""),
        Request(file_by_filename="whippet/v1/model.proto"),
        Request(file_containing_symbol="whippet.v1.GenerationService.Generate"),
        Request(all_extension_numbers_of_type="whippet.v1.Model"),
        Request(file_containing_extension=pb.ExtensionRequest(containing_type="whippet.v1.Model", extension_number=1)),
        Request(file_containing_symbol="whippet.v1.Nothing"),
        Request(),
    )
    assert (listed.valid_host, listed.original_request.host) == ("here", "here")
    assert {one.name for one in listed.list_services_response.service} == {
        "whippet.v1.GenerationService",
        "whippet.v1.ModelService",
        "inference.GRPCInferenceService",
        "vllm.grpc.engine.VllmEngine",
        "grpc.health.v1.Health",
        *VERSIONS,
    }
    first, *others = (file.name for file in files(by_name))
    assert first == "whippet/v1/model.proto"
    assert {"whippet/v1/generation.proto", "google/protobuf/duration.proto"} <= set(others)
    assert files(by_symbol)[0].name == "whippet/v1/generation.proto"
    assert numbers.all_extension_numbers_response.base_type_name == "whippet.v1.Model"
    assert not numbers.all_extension_numbers_response.extension_number
    codes = [one.error_response.error_code for one in (extension, unknown, nothing)]
    assert codes == [code.value[0] for code in (grpc.StatusCode.NOT_FOUND,) * 2 + (grpc.StatusCode.INVALID_ARGUMENT,)]


def test_what_is_told_is_complete(server: Server) -> None:
    """Whoever knows nothing but the answers can build every service and message of them."""
    for service in VERSIONS:
        [listed] = answers(server, service, Request(list_services=""))
        names = [one.name for one in listed.list_services_response.service]
        pool = descriptor_pool.DescriptorPool()
        told = answers(server, service, *(Request(file_containing_symbol=name) for name in names))
        for file in {file.name: file for answer in told for file in reversed(files(answer))}.values():
            pool.Add(file)
        for name in names:
            assert pool.FindServiceByName(name).methods
        assert (
            pool.FindServiceByName(V1).methods[0].input_type.full_name == "grpc.reflection.v1.ServerReflectionRequest"
        )


def test_comments_and_json_names_are_told(server: Server) -> None:
    wanted = ["generation", "model", "admin", "errors"]
    told = answers(server, V1, *(Request(file_by_filename=f"whippet/v1/{name}.proto") for name in wanted))
    for answer in told:
        file = files(answer)[0]
        described = {tuple(one.path) for one in file.source_code_info.location if one.leading_comments}
        for path, names in definitions(file):
            assert path in described, names
    request = next(one for one in files(told[0])[0].message_type if one.name == "GenerateRequest")
    assert {field.name: field.json_name for field in request.field}["request_id"] == "requestId"


def definitions(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Paths, as SourceCodeInfo counts them, of all that a person may ask for."""
    for i, message in enumerate(file.message_type):
        yield (4, i), message.name
        for j, field in enumerate(message.field):
            yield (4, i, 2, j), field.name
    for i, enum in enumerate(file.enum_type):
        for j, value in enumerate(enum.value):
            yield (5, i, 2, j), value.name
    for i, service in enumerate(file.service):
        for j, method in enumerate(service.method):
            yield (6, i, 2, j), method.name


@pytest.mark.parametrize("service", VERSIONS)
def test_bytes_that_are_no_request_end_the_call(server: Server, service: str) -> None:
    call = server.channel.stream_stream(f"/{service}/ServerReflectionInfo")
    refusal: Refusal = refused(call, iter([b"\xff\xff\xff"]), timeout=60)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_grpcurl_describes_with_comments_and_camel_case(server: Server) -> None:
    said = run(GRPCURL, "-plaintext", "-msg-template", server.data, "describe", "whippet.v1.GenerateRequest")
    assert "// Names the request in logs" in said
    assert '"requestId"' in said


def test_grpcurl_shows_the_details_of_a_refusal(server: Server) -> None:
    asked = '{"text": "a", "sampling": {"top_p": 7}, "stopping": {"max_tokens": -1}}'
    command = (GRPCURL, "-plaintext", "-d", asked, server.data, "whippet.v1.GenerationService/Generate")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 64 + grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "type.googleapis.com/google.rpc.BadRequest" in done.stderr
    assert '"field":"sampling.top_p"' in done.stderr.replace(" ", "")
    assert "@value" not in done.stderr


def test_buf_finds_its_way_by_the_newer_version(server: Server) -> None:
    flags = ("--protocol=grpc", "--http2-prior-knowledge", "--reflect-protocol=grpc-v1", "-d", '{"text": "a"}')
    said = run(BUF, "curl", *flags, f"http://{server.data}/whippet.v1.GenerationService/Tokenize")
    assert '"tokenIds"' in said
