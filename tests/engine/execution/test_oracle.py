"""The engine against transformers: random small models of each family and option, float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.runner import ModelRunner
from engine.settings import EngineSettings
from engine.worker.build import build

pytestmark = [pytest.mark.product, pytest.mark.filterwarnings("ignore")]  # transformers' own

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 24}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-mqa-tied": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "rms_norm_eps": 1e-5}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral-full": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("MistralConfig", {"sliding_window": 21}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2-window-unused": ("Qwen2Config", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-layer-types": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-yarn": ("Qwen3Config", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3-yarn-mscale": (
        "Qwen3Config",
        {"head_dim": 32, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "qwen3-yarn-factor": (
        "Qwen3Config",
        {"head_dim": 32, "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "sliding_window": 9, "sliding_window_pattern": 2}),
    "gemma3-wide-heads": (
        "Gemma3TextConfig",
        {**GEMMA, "head_dim": 256, "num_key_value_heads": 1, "query_pre_attn_scalar": 168, "sliding_window": 16},
    ),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "sliding_window": 21,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo2-biases": ("Olmo2Config", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "granite": ("GraniteConfig", {**GRANITE, "tie_word_embeddings": True}),
    "granite-biases": (
        "GraniteConfig",
        {**GRANITE, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
    ),
}
PROMPTS = (5, 40, 17, 33, 64, 3)  # tokens
NEW = 32


def make(name: str, folder: Path, **save: object) -> Any:
    """The oracle, saved to a folder; nothing in it is neutral, neither norms nor biases."""
    import transformers

    kind, options = CASES[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, kind)(**{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
            elif key.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.uniform_(0.5, 2.0)
    model.save_pretrained(folder, **save)
    return model


def load(folder: Path, **settings: Any) -> ModelRunner:
    return build(
        EngineSettings(model=str(folder), device="cpu", dtype="float32", max_sequences=8, **settings),
        lambda stage, done, total: None,
    )


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, SMALL["vocab_size"], (size,), generator=generator).tolist() for size in PROMPTS]


def reference(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of the whole text at once."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    logits = reference(model, prompt + output[:-1])[len(prompt) - 1 :]
    assert output == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_ids_equal_transformers(name: str, tmp_path: Path, request_of: Any, drive: Any) -> None:
    model = make(name, tmp_path)
    runner = load(tmp_path)
    texts = prompts()

    alone = drive(runner, [request_of(texts[0], NEW, logprobs=SMALL["vocab_size"])]).answers[0]
    assert len(alone.token_ids) == NEW
    assert_greedy(model, texts[0], alone.token_ids)
    logits = reference(model, texts[0] + alone.token_ids[:-1])[len(texts[0]) - 1 :]
    expected = logits.double().log_softmax(-1)
    for place, one in enumerate(alone.logprobs):
        ids, values = zip(*one.top, strict=True)
        ours = torch.empty(SMALL["vocab_size"], dtype=torch.float64)
        ours[list(ids)] = torch.tensor(values, dtype=torch.float64)
        assert one.logprob == pytest.approx(float(ours[alone.token_ids[place]]))
        error = (ours - expected[place]).abs().max() / logits[place].abs().max()
        assert float(error) < 1e-4

    # Six at once, prompts in pieces of at most 13 tokens, and too few pages for all of them.
    driven = drive(runner, [request_of(text, NEW) for text in texts], budget=13, pages=9)
    assert driven.preemptions > 0
    assert driven.answers[0].token_ids == alone.token_ids
    for text, answer in zip(texts, driven.answers, strict=True):
        assert len(answer.token_ids) == NEW
        assert_greedy(model, text, answer.token_ids)


def test_greedy_ids_equal_those_of_generate(tmp_path: Path, request_of: Any, drive: Any) -> None:
    model = make("qwen3-tied", tmp_path)
    text = prompts()[2]
    with torch.inference_mode():
        found = model.generate(torch.tensor([text]), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    assert drive(load(tmp_path), [request_of(text, NEW)]).answers[0].token_ids == found[0, len(text) :].tolist()


def test_sharded_equals_whole(tmp_path: Path, request_of: Any, drive: Any) -> None:
    make("qwen3-biases", tmp_path / "whole")
    make("qwen3-biases", tmp_path / "parts", max_shard_size="40KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    asked = [request_of(prompts()[1], 16, logprobs=3)]
    whole, parts = (drive(load(tmp_path / name), asked).answers for name in ("whole", "parts"))
    assert whole == parts


def test_a_config_of_transformers_4_reads_the_same(tmp_path: Path, request_of: Any, drive: Any) -> None:
    make("qwen3-yarn", tmp_path)
    asked = [request_of(prompts()[1], 32)]
    new = drive(load(tmp_path), asked).answers
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))
    assert drive(load(tmp_path), asked).answers == new


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_theirs(dtype: Any, tmp_path: Path, request_of: Any, drive: Any) -> None:
    model = make("qwen3-tied", tmp_path)
    runner = build(EngineSettings(model=str(tmp_path), device="cpu", dtype=dtype), lambda stage, done, total: None)
    text = prompts()[1]
    answer = drive(runner, [request_of(text, 12, logprobs=SMALL["vocab_size"])]).answers[0]
    whole = text + answer.token_ids[:-1]
    half = model.to(getattr(torch, dtype))
    theirs = reference(half, whole)[len(text) - 1 :].log_softmax(-1)
    exact = reference(half.float(), whole)[len(text) - 1 :].log_softmax(-1)
    ours = torch.empty_like(exact)
    for place, one in enumerate(answer.logprobs):
        ids, values = zip(*one.top, strict=True)
        ours[place, list(ids)] = torch.tensor(values)
    assert float((ours - exact).square().mean()) <= 1.2 * float((theirs - exact).square().mean())


@pytest.mark.parametrize("published", [False, True], ids=["written by 5", "as published"])
def test_the_text_part_of_a_model_that_also_takes_images_is_served(
    published: bool, tmp_path: Path, request_of: Any, drive: Any
) -> None:
    """Its config is nested, and its tensors have other names beside those for images, which are not read."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(3)
    text = {**SMALL, **GEMMA, "sliding_window": 9, "sliding_window_pattern": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
    model.save_pretrained(tmp_path)
    if published:
        held = load_file(tmp_path / "model.safetensors")
        names = {name: name.replace("model.language_model.", "language_model.model.") for name in held}
        names |= {name: name.removeprefix("model.") for name in held if "language_model" not in name}
        save_file({names[name]: tensor for name, tensor in held.items()}, tmp_path / "model.safetensors")
    prompt = prompts()[1]
    found = drive(load(tmp_path), [request_of(prompt, NEW)]).answers[0]
    assert_greedy(model, prompt, found.token_ids)
