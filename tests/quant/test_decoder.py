"""The float32 forward: stored logits of real checkpoints, and transformers on random models of every family."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from quant.checkpoint.errors import BadTensor
from quant.decoder import Decoder

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
MODELS = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_theta": 100.0}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral-wide": ("mistral", {"sliding_window": None, "num_key_value_heads": 6}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
}


def logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return decoder.logits(decoder.hidden(ids))


@pytest.mark.parametrize(
    ("model", "expected", "tolerance"),
    [
        ("awq-tiny", "awq_dense_fp32", 2e-3),
        ("awq-tiny", "autoawq_fp16", 1e-2),
        ("bnb-int8-tiny", "int8_dense_fp32", 1e-4),
    ],
)
def test_stored_checkpoints_give_their_logits(stored, reference, model, expected, tolerance):
    found = logits(Decoder.open(stored / model), reference["input_ids"])[0]
    assert (found - reference[expected].float()).abs().max() < tolerance
    assert torch.equal(found.argmax(-1), reference[expected].argmax(-1))


def test_a_stored_layer_is_what_autoawq_made_of_it(stored, reference):
    found = Decoder.open(stored / "awq-tiny").layer(0)["self_attn.q_proj.weight"]
    assert torch.equal(found.half(), reference["q_proj"])


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """The same random weights in transformers and in a folder of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes = MODELS[request.param]
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, tensor in theirs.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # made 0 or 1, which would hide a mistake
            tensor.data.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp(request.param)
    tied = config.tie_word_embeddings
    tensors = {
        name: tensor.contiguous()
        for name, tensor in theirs.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors")
    written = {**config.to_dict(), "architectures": [type(theirs).__name__]}
    (folder / "config.json").write_text(json.dumps(written, default=str))
    return theirs, Decoder.open(folder)


@torch.no_grad()
def test_every_family_agrees_with_transformers(pair):
    theirs, ours = pair
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(4))
    expected = theirs(ids).logits
    assert (logits(ours, ids) - expected).abs().max() < 2e-4 * expected.abs().max()


@torch.no_grad()
def test_generation_with_kept_keys_is_generation_without(pair):
    _, ours = pair
    prompts = torch.randint(0, 97, (2, 6), generator=torch.Generator().manual_seed(5))
    found = ours.generate(prompts, 8, lambda scores: scores.argmax(-1))
    ids = prompts
    for _ in range(8):
        ids = torch.cat((ids, logits(ours, ids)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(found, ids)


def test_more_tokens_than_are_kept_in_flight(stored, reference, monkeypatch):
    decoder = Decoder.open(stored / "awq-tiny")
    ids = reference["eval_ids"][:96].view(6, 16)
    whole = decoder.hidden(ids)
    monkeypatch.setattr("quant.decoder._TOKENS_AT_ONCE", 32)
    seen: list[tuple[int, int]] = []
    assert torch.allclose(decoder.hidden(ids, lambda done, total: seen.append((done, total))), whole, atol=1e-5)
    assert seen == [(done, 12) for done in range(1, 13)]


def test_the_head_is_computed_by_tiles(stored, reference, monkeypatch):
    decoder = Decoder.open(stored / "awq-tiny")
    hidden = decoder.hidden(reference["input_ids"])
    whole = decoder.logits(hidden)
    monkeypatch.setattr("quant.decoder._VOCAB_AT_ONCE", 300)
    assert torch.allclose(decoder.logits(hidden), whole, atol=1e-5)


def test_large_models_are_not_kept(stored, monkeypatch):
    monkeypatch.setattr("quant.decoder._KEEP_BELOW", 0)
    decoder = Decoder.open(stored / "awq-tiny")
    assert decoder.layer(0) is not decoder.layer(0)


def test_a_folder_whose_config_names_another_size(stored, tmp_path):
    config = json.loads((stored / "awq-tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    (tmp_path / "model.safetensors").symlink_to((stored / "awq-tiny" / "model.safetensors").resolve())
    with pytest.raises(BadTensor, match=r"mlp\.gate_proj"):
        Decoder.open(tmp_path).layer(0)
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 2049}))
    with pytest.raises(BadTensor, match="embed_tokens"):
        Decoder.open(tmp_path)
