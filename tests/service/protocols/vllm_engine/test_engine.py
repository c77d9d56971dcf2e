"""vllm.grpc.engine through a real channel: the same tokens as whippet.v1 gives, and what is not served named."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.pb.smg.grpc.common import tokenizer_pb2
from service.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from service.pb.vllm.grpc.engine import vllm_engine_pb2_grpc
from service.pb.whippet.v1 import admin_pb2
from tests.service.conftest import Refusal, Server, ask, refused
from tests.service.tenants import metadata, write_tokens
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
IDS = list(b"hello")
ACME = metadata("acme")
DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"


def stub(server: Server) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(server.channel)


def question(stream: bool = False, ids: list[int] | None = None, **sampling: Any) -> pb.GenerateRequest:
    """Greedy, eight tokens, unless `sampling` says otherwise."""
    params = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return pb.GenerateRequest(
        stream=stream,
        tokenized=pb.TokenizedInput(input_ids=IDS if ids is None else ids),
        sampling_params=pb.SamplingParams(**params),
    )


def answers(server: Server, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
    return list(stub(server).Generate(request, timeout=60, **options))


def whole(server: Server, request: pb.GenerateRequest) -> pb.GenerateComplete:
    (one,) = answers(server, request)
    return one.complete


def test_the_tokens_are_those_of_the_other_protocol(server: Server) -> None:
    asked = ask("", 8, token_ids={"ids": IDS}, output={"token_ids": True, "logprobs": 2})
    asked.sampling.temperature = 0
    expected = server.generation.Generate(asked, timeout=60)
    found = whole(server, question(logprobs=2))
    assert list(found.output_ids) == list(expected.token_ids)
    assert (found.finish_reason, found.prompt_tokens, found.completion_tokens) == ("length", 5, 8)
    logs = found.output_logprobs
    assert list(logs.token_ids) == list(expected.token_ids)
    assert list(logs.token_logprobs) == [one.logprob for one in expected.logprobs]
    assert [(list(one.token_ids), list(one.values)) for one in logs.top_logprobs] == [
        ([top.token_id for top in one.top], [top.logprob for top in one.top]) for one in expected.logprobs
    ]
    assert not whole(server, question(logprobs=0)).output_logprobs.top_logprobs
    assert not whole(server, question()).HasField("output_logprobs")


def test_chunks_have_all_tokens_and_the_end_repeats_the_last(server: Server) -> None:
    expected = whole(server, question(logprobs=1))
    *chunks, end = answers(server, question(stream=True, logprobs=1))
    assert {one.WhichOneof("response") for one in chunks} == {"chunk"}
    assert [i for one in chunks for i in one.chunk.token_ids] == list(expected.output_ids)
    assert [x for one in chunks for x in one.chunk.output_logprobs.token_logprobs] == list(
        expected.output_logprobs.token_logprobs
    )
    assert all(
        one.chunk.completion_tokens == len(one.chunk.token_ids) and one.chunk.prompt_tokens == 5 for one in chunks
    )
    assert list(end.complete.output_ids) == list(chunks[-1].chunk.token_ids)
    assert (end.complete.finish_reason, end.complete.completion_tokens) == ("length", 8)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_said_of_the_prompt_comes_once_and_whole(server: Server, stream: bool) -> None:
    ids = list(b"a prompt that is longer than a page of tokens" * 6)
    asked = ask("", 2, token_ids={"ids": ids}, output={"prompt_logprobs": 20})
    expected = server.generation.Generate(asked, timeout=60).prompt_logprobs
    messages = answers(server, question(stream, ids, prompt_logprobs=20, max_tokens=2))
    told = [getattr(one, one.WhichOneof("response") or "").input_logprobs for one in messages]
    (found,) = [one for one in told if one.token_ids]
    assert told.index(found) == 0
    assert list(found.token_ids) == ids
    assert not found.token_logprobs[0].HasField("value")
    assert [one.value for one in found.token_logprobs[1:]] == [one.logprob for one in expected]
    assert [list(one.token_ids) for one in found.top_logprobs] == [
        [],
        *([top.token_id for top in one.top] for one in expected),
    ]
    (end,) = answers(server, question(False, ids, prompt_logprobs=0, max_tokens=0))
    assert (len(end.complete.input_logprobs.token_ids), len(end.complete.output_ids)) == (len(ids), 0)
    assert not end.complete.input_logprobs.top_logprobs


def test_several_answers_are_told_apart(server: Server) -> None:
    alone = [list(whole(server, question(temperature=1.0, seed=number)).output_ids) for number in (3, 4, 5)]
    ends = [one.complete for one in answers(server, question(temperature=1.0, seed=3, n=3))]
    assert [list(one.output_ids) for one in sorted(ends, key=lambda one: one.index)] == alone
    assert {one.prompt_tokens for one in ends} == {len(IDS)}
    messages = answers(server, question(stream=True, temperature=1.0, seed=3, n=3))
    chunks = [one.chunk for one in messages if one.HasField("chunk")]
    assert [[i for one in chunks if one.index == number for i in one.token_ids] for number in range(3)] == alone
    assert sorted(one.complete.index for one in messages if one.HasField("complete")) == [0, 1, 2]
    assert "sampling_params.n" in refused(stub(server).Generate, question(n=17)).fields


def test_text_is_tokenized_here(server: Server) -> None:
    request = question()
    request.text = "hello"
    assert whole(server, request) == whole(server, question())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_the_answer_and_is_named(server: Server, stream: bool) -> None:
    ids = list(whole(server, question(max_tokens=40)).output_ids)
    stop = next(i for i in ids[3:] if 32 < i < 127 and i not in ids[:3])
    place = ids.index(stop) + 1
    for name, wish in (
        ("matched_stop_str", {"stop": [chr(stop)]}),
        ("matched_token_id", {"stop_token_ids": [stop]}),
    ):
        end = answers(server, question(stream=stream, max_tokens=40, **wish))[-1].complete
        if name == "matched_stop_str":
            assert end.completion_tokens == place
            assert end.matched_stop_str == chr(stop)
        assert end.WhichOneof("matched_stop") == name
        assert end.finish_reason == "stop"


def test_more_tokens_than_the_context_leaves_are_as_many_as_it_does(server: Server) -> None:
    most = stub(server).GetModelInfo(pb.GetModelInfoRequest(), timeout=60).max_context_length
    ids = [7] * (most - 3)
    assert whole(server, question(ids=ids, max_tokens=1_000_000)).completion_tokens == 3
    request = question(max_tokens=1_000_000)
    request.text = "x" * (most - 3)
    assert whole(server, request).completion_tokens == 3


LACKING = {
    "kv_transfer_params": {"kv_transfer_params": {}},
    "kv_transfer_params_json": {"kv_transfer_params_json": ""},
    "mm_inputs": {"mm_inputs": {}},
    "extra_mm_inputs": {"extra_mm_inputs": [{}]},
    "media_refs": {"media_refs": {}},
    "data_parallel_rank": {"data_parallel_rank": 1},
    "sampling_params.structural_tag": {"sampling_params": {"structural_tag": "x"}},
    "sampling_params.truncate_prompt_tokens": {"sampling_params": {"truncate_prompt_tokens": -1}},
}


@pytest.mark.parametrize("field", LACKING)
def test_what_is_lacking_is_refused_by_name(server: Server, field: str) -> None:
    request = question()
    request.MergeFrom(pb.GenerateRequest(**LACKING[field]))  # type: ignore[arg-type]
    refusal = refused(stub(server).Generate, request)
    assert refusal.code is grpc.StatusCode.UNIMPLEMENTED
    assert field in refusal.message
    assert refusal.reason == "UNIMPLEMENTED_OPTION"


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"regex": "[0-9]{2}x"}, "[0-9]{2}x"),
        ({"choice": {"choices": ["left", "right"]}}, "left|right"),
        ({"grammar": 'root ::= "a" "b"'}, "ab"),
        ({"json_schema": '{"const": {"a": 1}}'}, '\\{"a": 1\\}'),
        ({"json_object": False}, "(?s).{8}"),
    ],
)
def test_constraints_are_kept_to(server: Server, constraint: dict[str, Any], expected: str) -> None:
    assert re.fullmatch(expected, bytes(whole(server, question(**constraint, max_tokens=8)).output_ids).decode())


def test_a_constraint_that_cannot_be_used_is_named_as_this_protocol_has_it(server: Server) -> None:
    refusal = refused(stub(server).Generate, question(json_schema='{"type": "strin"}'))
    assert refusal.fields == {"sampling_params.json_schema"}


def test_what_is_wrong_is_named_as_this_protocol_has_it(server: Server) -> None:
    wrong = {
        "top_p": 1.5,
        "min_p": 2.0,
        "temperature": -1.0,
        "repetition_penalty": -1.0,
        "presence_penalty": 3.0,
        "frequency_penalty": -3.0,
        "logprobs": -1,
        "max_tokens": 0,
        "stop": [""],
        "stop_token_ids": [256],
        "logit_bias": {256: 1.0},
    }
    request = question(ids=[256], **wrong)
    request.request_id = "no\nline"
    refusal = refused(stub(server).Generate, request)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    lists = {"stop": "stop[0]", "stop_token_ids": "stop_token_ids[0]", "logit_bias": "logit_bias[256]"}
    names = {f"sampling_params.{lists.get(name, name)}" for name in wrong}
    assert refusal.fields == names | {"request_id", "tokenized.input_ids[0]"}
    assert refused(stub(server).Generate, pb.GenerateRequest()).fields == {"input"}
    late = question(max_tokens=4096, min_tokens=4095)
    assert refused(stub(server).Generate, late).fields == {"sampling_params.min_tokens"}
    assert refused(stub(server).Generate, question(ids=[1] * 4096)).fields == {"tokenized.input_ids"}


def test_the_server_tells_of_itself(server: Server) -> None:
    one = stub(server)
    assert one.HealthCheck(pb.HealthCheckRequest(), timeout=60).healthy
    model = one.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    assert (model.served_model_name, model.vocab_size, model.is_generation) == ("fake", 256, True)
    assert json.loads(model.default_sampling_params_json) == {"temperature": 0.0}
    info = one.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
    assert (info.server_type, info.max_num_seqs, info.is_paused) == ("whippet", 8, False)
    (load,) = one.GetLoads(pb.GetLoadsRequest(), timeout=60).loads
    assert load.max_running_requests == 8
    assert load.max_total_num_tokens > 0
    health = health_pb2_grpc.HealthStub(server.channel)
    asked = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
    assert health.Check(asked, timeout=60).status == health_pb2.HealthCheckResponse.SERVING
    nobody = refused(one.GetTokenizer, tokenizer_pb2.GetTokenizerRequest())
    assert nobody.code is grpc.StatusCode.UNIMPLEMENTED


def test_its_answers_count_as_load_and_its_probes_do_not(server: Server) -> None:
    def ended() -> int:
        return server.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=60).ended_calls["OK"]

    before = ended()  # a call is counted before its answer leaves
    stub(server).HealthCheck(pb.HealthCheckRequest(), timeout=60)
    whole(server, question())
    assert ended() == before + 1


@pytest.fixture(scope="module")
def slow(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tenants; an answer of 4,000 tokens takes minutes. It has the demo model's tokenizer."""
    tokens = write_tokens(tmp_path_factory.mktemp("tokens"))
    with serve("--fake.step-time=0.05", f"--auth.tokens-file={tokens}", f"--model={DEMO}") as one:
        yield one


def load(server: Server) -> admin_pb2.GetLoadResponse:
    return server.admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=ACME, timeout=60)


def begun(server: Server, name: str, stream: bool) -> Any:
    """A long answer of acme's that runs."""
    request = question(stream=stream, max_tokens=4000, ignore_eos=True)
    request.request_id = name
    call = stub(server).Generate(request, metadata=ACME, timeout=120)
    wait_for(lambda: load(server).running == 1)
    return call


def abort(server: Server, *names: str, tenant: str = "acme") -> None:
    stub(server).Abort(pb.AbortRequest(request_ids=names), metadata=metadata(tenant), timeout=60)


def left(call: Any, server: Server) -> None:
    """It was ended by an Abort, and nothing of it is left."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert Refusal.of(caught.value).code is grpc.StatusCode.ABORTED
    wait_for(lambda: load(server).used_pages == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_abort_ends_an_answer_that_nobody_cancels(slow: Server, stream: bool) -> None:
    call = begun(slow, f"left alone {stream}", stream)
    abort(slow, "nobody", f"left alone {stream}")
    left(call, slow)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_answer_leaves_nothing(slow: Server, stream: bool) -> None:
    begun(slow, f"cancelled {stream}", stream).cancel()
    wait_for(lambda: load(slow).used_pages == 0)


def test_a_tenant_ends_its_own_answers_alone_and_a_drain_is_seen(slow: Server) -> None:
    call = begun(slow, "mine", True)
    abort(slow, "mine", tenant="bravo")
    next(call)
    assert refused(stub(slow).HealthCheck, pb.HealthCheckRequest()).code is grpc.StatusCode.UNAUTHENTICATED
    slow.admin.Drain(admin_pb2.DrainRequest(timeout=Duration(nanos=1)), metadata=ACME, timeout=60)
    health = stub(slow).HealthCheck(pb.HealthCheckRequest(), metadata=ACME, timeout=60)
    assert (health.healthy, health.message) == (False, "the server is draining")
    slow.admin.Undrain(admin_pb2.UndrainRequest(), metadata=ACME, timeout=60)
    abort(slow, "mine")
    left(call, slow)


def test_the_tokenizer_is_the_folders(slow: Server) -> None:
    pieces = list(stub(slow).GetTokenizer(tokenizer_pb2.GetTokenizerRequest(), metadata=ACME, timeout=60))
    check_archive(pieces)


def check_archive(pieces: list[tokenizer_pb2.GetTokenizerChunk]) -> None:
    """They are the folder's own files, and none but those that a tokenizer is made of."""
    data = b"".join(piece.data for piece in pieces)
    assert [bool(piece.sha256) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sorted(archive.namelist()) == [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        for name in archive.namelist():
            assert archive.read(name) == (DEMO / name).read_bytes()
