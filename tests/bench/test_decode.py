"""The decode benchmark end to end on the demo model, a few tokens each, and its arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench import decode, own_server
from bench.pace import PacedAnswer, figures, first_tokens, quantile
from engine.api import GREEDY, SamplingParams
from service.core.text import Tokenizer
from service.pb.whippet.v1 import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[list[str], dict[str, Any]]:
    assert decode.main(["--threads=1", "--rounds=2", "--first=2", "--device=cpu", *argv]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    return table, {**record["figures"], **record}


@pytest.mark.proof
def test_through_engine_and_server(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (f"--model={DEMO}", "--dtype=float32", "--context", "8", "40", "--tokens=6", "--grpc", "--revision=abc")
    table, record = run(capsys, *flags)
    assert (record["bench"], record["revision"], record["engine"]["decoder"]) == ("decode", "abc", "eager")
    for arm in ("engine", "served"):
        for context in ("8", "40"):
            row = record[arm]["contexts"][context]
            assert row["tokens_per_second"] > 0
            assert 0 < row["us_p50"] <= row["us_p95"] <= row["us_p99"]
        assert record[arm]["first_token"]["ms_p50"] > 0
    one, other = (record["engine"]["contexts"][context]["bytes"] for context in ("8", "40"))
    width = 2 * 6 * 2 * 64 * 4  # layers, key-value heads, head size, float32
    assert other - one == 32 * width
    served_row, row = (record[arm]["contexts"]["8"] for arm in ("served", "engine"))
    assert served_row["of_engine"] == pytest.approx(
        served_row["tokens_per_second"] / row["tokens_per_second"], abs=1e-3
    )
    assert any("first token" in line for line in table)


@pytest.mark.proof
def test_from_a_config_alone_and_with_a_roofline(
    bf16_units: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = (f"--model={tmp_path}", "--load-format=dummy", "--tokens=4", "--context=8", "--bandwidth=0.001")
    _, record = run(capsys, *flags, "--temperature=0.8", "--top-k=5")
    engine = record["engine"]
    row = engine["contexts"]["8"]
    assert row["roofline"] == pytest.approx(row["bytes"] * row["tokens_per_second"] / 1e9, rel=1e-2)
    # An untied table is looked up, not read: matrices of one layer and the head.
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = 4 * config["head_dim"], 2 * 2 * config["head_dim"]
    matrices = hidden * (queries + keys + queries + 3 * inner) + config["vocab_size"] * hidden
    assert row["bytes"] == pytest.approx((2 if bf16_units else 4) * matrices, rel=2e-2)
    assert record["settings"]["top_k"] == 5


def test_a_request_over_grpc_asks_for_what_the_engine_is_asked() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=7,
    )
    message = pb.GenerateStreamRequest.FromString(own_server.request([5, 6], 9, sampling))
    assert list(message.token_ids.ids) == [5, 6]
    assert (message.stopping.max_tokens, message.stopping.ignore_eos) == (9, True)
    assert message.sampling.HasField("seed")
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
        assert getattr(message.sampling, name) == pytest.approx(getattr(sampling, name), rel=1e-6)
    assert message.cache.bypass_prefix


@pytest.mark.proof
def test_a_long_prompt_goes_out_in_frames_that_a_server_takes() -> None:
    ports = ["--engine=fake", "--fake.max-context=20000", "--fake.vocab-size=151936"]
    sampling = replace(GREEDY, seed=7)
    with own_server.server(ports) as running:
        answer = own_server.ask(running, [150_000] * 8192, 5, sampling)
        assert answer.tokens == 5
        with pytest.raises(RuntimeError, match="status 3"):
            own_server.ask(running, [1] * 20_000, 5, sampling)
        with pytest.raises(ValueError, match="window"):
            own_server.ask(running, [150_000] * 30_000, 5, sampling)


def test_a_folder_without_a_tokenizer_gets_one_of_its_size(tmp_path: Path) -> None:
    model = tmp_path / "plain"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 9001}))
    (model / "model.safetensors").write_bytes(b"")
    made = own_server.with_tokenizer(model, tmp_path / "made")
    assert Tokenizer.load(made).vocab_size == 9001
    assert (made / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    assert own_server.with_tokenizer(DEMO, tmp_path / "unused") == DEMO


def test_figures_by_hand() -> None:
    answers = [
        PacedAnswer(0.0, [(1.0, 1), (2.0, 4), (2.5, 1)], cpu=3.0),
        PacedAnswer(5.0, [(5.5, 1), (8.5, 5)], cpu=1.5),
    ]
    assert [one.tokens for one in answers] == [6, 6]
    assert [one.first for one in answers] == [1.0, 0.5]
    assert answers[0].gaps() == [0.25, 0.25, 0.25, 0.25, 0.5]
    assert answers[1].gaps() == pytest.approx([0.6] * 5)
    found = figures(answers)
    assert found["tokens_per_second"] == pytest.approx((5 / 1.5 + 5 / 3) / 2, abs=0.05)
    assert (found["us_p50"], found["us_p99"]) == (600000.0, 600000.0)
    assert found["cpu"] == 1.0
    assert found["tokens_an_arrival"] == pytest.approx((2.5 + 5) / 2)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert first_tokens([0.001, 0.003, 0.002]) == {"ms_p50": 2.0, "ms_p95": 3.0}


def test_the_configs_have_the_shapes_of_the_models() -> None:
    sizes = {}
    for folder in sorted((ROOT / "bench" / "models").iterdir()):
        config = json.loads((folder / "config.json").read_text())
        inner, hidden = config["intermediate_size"], config["hidden_size"]
        head = config.get("head_dim") or hidden // config["num_attention_heads"]
        heads = config["num_attention_heads"] + config["num_key_value_heads"]
        layer = hidden * (2 * heads * head + 3 * inner)
        tables = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
        sizes[folder.name] = round((config["num_hidden_layers"] * layer + tables) / 1e9, 2)
    small = {"gemma3-1b": 1.0, "smollm2-135m": 0.13, "smollm2-135m-awq": 0.13}
    llama = {"llama-3.1-8b": 8.03, "llama-70b-awq": 70.55}
    assert sizes == {
        **small,
        **llama,
        "mistral-7b": 7.24,
        "mistral-7b-awq": 7.24,
        "qwen3-0.6b": 0.6,
        "qwen3-0.6b-awq": 0.6,
    }
