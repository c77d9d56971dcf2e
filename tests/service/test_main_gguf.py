"""A server of a GGUF file, and starts with files that mean harm."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from service.core.text.archive import FILES, TokenizerArchive
from service.core.text.conversation import ChatMessage
from service.core.text.tokenizer import Tokenizer
from service.pb.whippet.v1 import generation_pb2, model_pb2
from tests.engine.quantized import logits_of
from tests.quant.gguf_files import small_tokenizer, write_model
from tests.service.conftest import Server, ask
from tests.service.test_main import start, the_line

TEXT = "the quick brown fox"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny.Q4_1.gguf"
    write_model(path, "llama", {"v_proj": "Q6_K", "": "Q4_1"})
    return path


def test_the_front_reads_text_from_the_file(path: Path) -> None:
    tokenizer, own = Tokenizer.load(path, only_plain=True), small_tokenizer()
    assert tokenizer.encode(TEXT) == own.encode(TEXT).ids
    assert tokenizer.chat
    assert tokenizer.encode_chat([ChatMessage("user", "hi")]) == own.encode("user: hi\nassistant: ").ids
    assert set(tokenizer.eos_token_ids) == {own.token_to_id("<|im_end|>"), own.token_to_id("<|endoftext|>")}


async def test_tokenizer_files_are_those_of_a_folder(path: Path) -> None:
    made = await TokenizerArchive(str(path), lambda: True).get()
    with zipfile.ZipFile(io.BytesIO(made.data)) as archive:
        names = set(archive.namelist())
        known = json.loads(archive.read("tokenizer.json"))
    assert names == set(FILES) - {"special_tokens_map.json"}
    assert known["model"]["type"] == "BPE"


@pytest.mark.product
def test_a_server_answers_with_the_files_own_ids(
    path: Path, serve: Callable[..., contextlib.AbstractContextManager[Server]]
) -> None:
    prompt, expected = small_tokenizer().encode(TEXT).ids, list[int]()
    for _ in range(4):
        expected.append(int(logits_of(path, prompt + expected, at_once=True, dtype="float32")[0].argmax()))
    flags = (f"--model={path}", "--engine=model", "--device=cpu", "--dtype=float32", "--scheduler.kv-bytes=4194304")
    with serve(*flags) as server:
        model = server.models.GetModel(model_pb2.GetModelRequest()).model
        assert model.name == "Tiny.Q4_1"
        assert model.weight_format == "gguf-q4_1+q6_k-as-int8"
        request = ask(TEXT, 4)
        request.sampling.temperature = 0.0
        request.output.token_ids = True
        request.stopping.ignore_eos = True
        answer: generation_pb2.GenerateResponse = server.generation.Generate(request)
        assert list(answer.token_ids) == expected
        constrained = ask(TEXT, 12)
        constrained.sampling.temperature = 0.0
        constrained.constraint.regex = "(yes|no)"
        assert server.generation.Generate(constrained).text in ("yes", "no")
        log = server.log.read_text()
        assert "in Q4_1 as 4 bits" in log
        assert "in Q6_K as int8 rows" in log


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "tokenizer.ggml.tokens claims 316 texts, more than a model's file has": lambda data: data[:1000],
    "is no GGUF file": lambda data: b"GGML" + data[4:],
    "general.architecture: is missing": lambda data: data.replace(b"general.architecture", b"general.architectur_", 1),
}


@pytest.mark.product
def test_a_cut_file_is_one_line(path: Path, tmp_path: Path) -> None:
    refused(path, tmp_path, lambda data: data[:-4096], "ends beyond the end of the file")


@pytest.mark.proof
@pytest.mark.parametrize("told", DAMAGES)
def test_a_damaged_file_is_one_line(told: str, path: Path, tmp_path: Path) -> None:
    refused(path, tmp_path, DAMAGES[told], told)


def refused(path: Path, tmp_path: Path, change: Callable[[bytes], bytes], told: str) -> None:
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes(change(path.read_bytes()))
    done = start(f"--model={damaged}", "--engine=model", "--device=cpu")
    assert done.returncode == 3
    assert told in the_line(done)
    assert str(damaged) in the_line(done)
