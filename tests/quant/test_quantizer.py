"""Whole folders: quality against rounding to nearest, names as other writers have them, stops and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from quant.checkpoint.awq import write_gemm
from quant.checkpoint.errors import BadFile, NotFinite
from quant.checkpoint.formats import format_name, read_spec
from quant.checkpoint.safetensors import Checkpoint
from quant.checkpoint.spec import AwqSpec, Int8Spec, PackedScheme, PackedSpec
from quant.checkpoint.tensors import layer_linears
from quant.decoder import Decoder
from quant.errors import CannotQuantize
from quant.evaluate import Comparison, Evaluation, evaluate
from quant.metrics import Interval
from quant.quantizer import DEFAULT_BUDGET, QuantizeOptions, quantize
from quant.report import QuantizeReport
from quant.rounding import round_groups

pytestmark = pytest.mark.product

CPU = torch.device("cpu")


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total


class Stop(Exception):
    """A run that is killed."""


class StopAt:
    """Progress that stops a run once, and keeps what it heard."""

    def __init__(self, stage: str, done: int) -> None:
        self.at = (stage, done)
        self.heard: list[tuple[str, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.heard.append((stage, done))
        if self.at == (stage, done):
            raise Stop


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Token i is written as the word ti."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def source(stored, reference, tmp_path_factory):
    """A trained model in bfloat16: the stored 8-bit one, widened. Its text is beside it."""
    folder = tmp_path_factory.mktemp("source")
    decoder = Decoder.open(stored / "bnb-int8-tiny")
    tensors = {
        name: tensor
        for name, tensor in load_file(stored / "bnb-int8-tiny" / "model.safetensors").items()
        if tensor.dtype == torch.bfloat16
    }
    for index in range(decoder.config.layers):
        for name, linear in decoder.linears(index):
            tensors[f"model.layers.{index}.{name}.weight"] = linear.weight.dequantize(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((stored / "bnb-int8-tiny" / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"stays behind")
    write_tokenizer(folder, 2048)
    (folder / "text").mkdir()
    (folder / "text" / "text.txt").write_text(" ".join(f"t{i}" for i in reference["eval_ids"][:4096].tolist()))
    return folder


def small(source: Path, **changes) -> QuantizeOptions:
    """Enough to stop and go on with."""
    return options(source, **{"samples": 4, "held_out": 2, "length": 64, **changes})


def options(source: Path, **changes) -> QuantizeOptions:
    given = {"group": 64, "text": source / "text" / "text.txt", "samples": 24, "held_out": 6, "length": 128}
    return QuantizeOptions(**{**given, **changes})


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """One uninterrupted run: its folder and report."""
    out = tmp_path_factory.mktemp("made") / "out"
    return out, quantize(source, out, options(source), quiet)


@pytest.fixture(scope="module")
def unstopped(source, tmp_path_factory):
    """The small run, uninterrupted."""
    out = tmp_path_factory.mktemp("unstopped") / "out"
    return out, quantize(source, out, small(source), quiet)


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(path, framework="pt") as file:
        return {
            name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
            for name in file.keys()  # noqa: SIM118
        }


@pytest.mark.proof
def test_it_loses_less_than_rounding_to_nearest(source, made, reference, tmp_path):
    out, report = made
    plain, decoder = Checkpoint(source), Decoder.open(source)
    tensors = {name: plain.tensor(name).half() for name in plain.names() if "_proj" not in name}
    for index in range(decoder.config.layers):
        for name, linear in decoder.linears(index):
            for stem, tensor in write_gemm(round_groups(linear.weight.dequantize(torch.float32), 64)).items():
                tensors[f"model.layers.{index}.{name}.{stem}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((out / "config.json").read_text())
    windows = reference["eval_ids"][8192:12288].view(32, 128).long()  # read by neither
    nearest = evaluate(tmp_path, windows, source, quiet, CPU).comparison
    ours = evaluate(out, windows, source, quiet, CPU).comparison
    assert nearest is not None
    assert ours is not None
    assert ours.kl < 0.8 * nearest.kl
    assert abs(ours.perplexity_change.value) < 0.01
    assert report.evaluation.comparison is not None
    assert report.evaluation.comparison.kl == pytest.approx(ours.kl, rel=0.5)


def test_the_folder_is_what_autoawq_writes(source, stored, tmp_path):
    quantize(source, tmp_path / "out", small(source, group=128), quiet)
    assert header(tmp_path / "out" / "model.safetensors") == header(stored / "awq-tiny" / "model.safetensors")
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((stored / "awq-tiny" / "config.json").read_text())
    assert ours["quantization_config"] == theirs["quantization_config"]
    assert ours["dtype"] == "float16"


def test_the_folder_is_whole(source, made):
    out, _ = made
    found = sorted(file.name for file in out.iterdir())
    assert found == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "quantization.json",
        "quantization.md",
        "tokenizer.json",
    ]
    assert read_spec(out) == AwqSpec("gemm", 64)
    assert (source / "model.safetensors").is_file()


def test_the_report_tells_of_every_layer(made):
    out, report = made
    written = json.loads((out / "quantization.json").read_text())
    assert written["options"]["group"] == 64
    assert written["options"]["text"].startswith("text.txt, SHA-256 ")
    assert len(written["layers"]) == 4
    assert all(len(layer["linears"]) == 7 and layer["seconds"] > 0 for layer in written["layers"])
    assert all(loss["error"] < loss["nearest"] for layer in written["layers"] for loss in layer["linears"])
    assert all(0 < layer["error"] < 0.2 for layer in written["layers"])
    assert written["bytes"] == (out / "model.safetensors").stat().st_size < 0.6 * written["source_bytes"]
    assert written["evaluation"]["comparison"]["kl"] == report.evaluation.comparison.kl
    text = (out / "quantization.md").read_text()
    assert [line.split()[1] for line in text.splitlines() if line.startswith("| ")] == [
        *("measure", "---", "perplexity", "mean", "top-1", "greedy"),
        *("layer", "---", "0", "1", "2", "3"),
    ]


@pytest.mark.parametrize(
    ("stage", "done", "first"),
    [("layers", 1, 1), *(pytest.param(*at, marks=pytest.mark.proof) for at in [("layers", 4, 4), ("model", 2, None)])],
)
def test_a_killed_job_goes_on_and_ends_the_same(source, unstopped, tmp_path, stage, done, first):
    killed = StopAt(stage, done)
    with pytest.raises(Stop):
        quantize(source, tmp_path / "out", small(source), killed)
    assert not (tmp_path / "out" / "quantization.json").exists()
    again = StopAt("never", 0)
    report = quantize(source, tmp_path / "out", small(source), again)
    layers = [count for heard, count in again.heard if heard == "layers"]
    assert layers == ([] if first is None else list(range(first, 5)))
    out, expected = unstopped
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert report.evaluation == expected.evaluation
    assert not (tmp_path / "out" / ".partial").exists()


@pytest.mark.proof
@pytest.mark.parametrize("fails_at", [3, 6, 11])
def test_a_write_that_fails_loses_at_most_its_layer(source, unstopped, tmp_path, monkeypatch, fails_at):
    """The disk is full at the n-th file: nothing half written is ever taken for whole."""
    calls = 0

    def full(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(28, "No space left on device")
        save_file(*_, **__)

    monkeypatch.setattr("quant.shards.save_file", full)
    out = tmp_path / "out"
    stopped = 0
    for _ in range(2):
        try:
            quantize(source, out, small(source), quiet)
            break
        except OSError:
            stopped += 1
    assert stopped == 1
    assert (out / "model.safetensors").read_bytes() == (unstopped[0] / "model.safetensors").read_bytes()


@pytest.mark.proof
def test_a_job_without_a_layer_gives_way_to_other_options(source, unstopped, tmp_path):
    with pytest.raises(Stop):
        quantize(source, tmp_path / "out", small(source, group=128), StopAt("layers", 0))
    quantize(source, tmp_path / "out", small(source), quiet)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (unstopped[0] / "model.safetensors").read_bytes()


def test_other_options_do_not_go_on(source, tmp_path):
    with pytest.raises(Stop):
        quantize(source, tmp_path / "out", small(source), StopAt("layers", 1))
    with pytest.raises(CannotQuantize, match="unfinished job"):
        quantize(source, tmp_path / "out", small(source, group=32), quiet)
    state = tmp_path / "out" / ".partial" / "state.json"
    state.write_text("{}")
    with pytest.raises(CannotQuantize, match="unfinished job"):
        quantize(source, tmp_path / "out", small(source), quiet)


def test_a_source_that_changed_is_another_job(source, tmp_path):
    model = copy_with(source, tmp_path / "m", {})
    with pytest.raises(Stop):
        quantize(model, tmp_path / "out", small(source), StopAt("layers", 1))
    save_file({**load_file(model / "model.safetensors")}, model / "model.safetensors")  # the same, written again
    with pytest.raises(CannotQuantize, match="unfinished job"):
        quantize(model, tmp_path / "out", small(source), quiet)


def test_a_job_whose_state_is_gone_is_refused(source, tmp_path):
    with pytest.raises(Stop):
        quantize(source, tmp_path / "out", small(source), StopAt("layers", 2))
    for file in (tmp_path / "out" / ".partial").glob("hidden-*"):
        file.unlink()
    with pytest.raises(CannotQuantize, match="start again"):
        quantize(source, tmp_path / "out", small(source), quiet)


@pytest.mark.proof
def test_a_job_killed_before_it_began_goes_on(source, unstopped, tmp_path):
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    quantize(source, tmp_path / "out", small(source), quiet)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (unstopped[0] / "model.safetensors").read_bytes()


def test_nothing_is_written_over(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(CannotQuantize, match="there already"):
        quantize(source, tmp_path / "out", options(source), quiet)
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotQuantize, match="there already"):
        quantize(source, tmp_path / "file", options(source), quiet)


def test_eight_bits(source, stored, tmp_path):
    report = quantize(source, tmp_path / "out", options(source, format="int8"), quiet)
    assert read_spec(tmp_path / "out") == Int8Spec()
    assert header(tmp_path / "out" / "model.safetensors") == header(stored / "bnb-int8-tiny" / "model.safetensors")
    assert report.evaluation.windows == 6
    found = report.evaluation.comparison
    assert found is not None
    assert abs(found.perplexity_change.value) < 0.002
    assert found.kl < 1e-3
    assert report.layers[0]["error"] < 0.012
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_budget_keeps_in_eight_bits_what_loses_most(source, tmp_path):
    killed = StopAt("layers", 2)
    asked = small(source, group=None, budget=5.25)
    with pytest.raises(Stop):
        quantize(source, tmp_path / "out", asked, killed)
    again = StopAt("never", 0)
    report = quantize(source, tmp_path / "out", asked, again)
    assert "parts" in {stage for stage, _ in killed.heard} - {stage for stage, _ in again.heard}  # measured once
    found = report.plan
    assert found is not None
    spec = read_spec(tmp_path / "out")
    assert isinstance(spec, PackedSpec)
    assert spec.schemes[0] == PackedScheme(("Linear",), 4, found["group"], symmetric=False)
    eight = tuple(f"model.layers.{index}.{name}" for index, names in found["eight"].items() for name in names)
    assert spec.schemes[1] == PackedScheme(eight, 8, -1, symmetric=True)
    assert spec.ignore == ("lm_head",)
    assert format_name(spec) == f"compressed-tensors-int4-g{found['group']}-int8"
    checkpoint, decoder = Checkpoint(tmp_path / "out"), Decoder.open(source)
    stems = ("weight_packed", "weight_scale", "weight_zero_point")
    held = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names() if name.endswith(stems))
    weights = sum(k * n for k, n in layer_linears(decoder.config).values()) * decoder.config.layers
    assert 8 * held / weights == pytest.approx(found["bits"])
    assert 4.5 < found["bits"] <= 5.25
    losses = {(i, loss["name"]): loss for i, layer in enumerate(report.layers) for loss in layer["linears"]}
    assert {f"model.layers.{i}.{name}" for (i, name), loss in losses.items() if loss["bits"] == 8} == set(eight)
    assert f"Linears: {found['bits']:.2f} bits a weight, in groups of" in (tmp_path / "out/quantization.md").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": 4.0, "group": None}, "this model takes 4.16 at least"),
        ({"budget": 5.0, "format": "int8"}, "own engine, format awq"),
        ({"budget": 5.0, "engine": "autoawq"}, "own engine, format awq"),
        ({"budget": 5.0, "group": 48}, "choose one of 128, 64, 32"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(source, tmp_path, changes, said):
    with pytest.raises(CannotQuantize, match=said):
        quantize(source, tmp_path / "out", small(source, **changes), quiet)


FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    "olmo2": {"attention_bias": True, "eos_token_id": 2},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_by_its_own_text(tmp_path, family):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1}
    torch.manual_seed(2)
    config = AutoConfig.for_model(family, **{**sizes, **heads, "initializer_range": 0.2, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            tensor.data.normal_(0, 0.5)
    model.save_pretrained(tmp_path / "source")
    write_tokenizer(tmp_path / "source", 64)
    asked = QuantizeOptions(group=32, own_text=True, samples=24, held_out=8, length=64, seed=5)
    heard: list[str] = []
    report = quantize(tmp_path / "source", tmp_path / "out", asked, lambda stage, done, total: heard.append(stage))
    assert heard.index("samples") < heard.index("layers") < heard.index("greedy")
    assert report.evaluation.tokens == 6 * 31  # a fifth of the windows, as long as the model's positions
    expected = set(Checkpoint(tmp_path / "source").names())
    found = {
        name.replace(".qweight", ".weight")
        for name in Checkpoint(tmp_path / "out").names()
        if not name.endswith((".qzeros", ".scales"))
    }
    assert found == expected
    assert report.evaluation.comparison is not None
    assert report.evaluation.comparison.kl < 0.15  # random weights: every token is about as likely as every other
    assert all(loss["error"] < loss["nearest"] for layer in report.layers for loss in layer["linears"])


def copy_with(source: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text((source / name).read_text())
    save_file({**load_file(source / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return folder


def test_tensors_that_would_be_left_behind_stop_the_job(source, tmp_path):
    model = copy_with(source, tmp_path / "m", {"model.layers.0.mlp.router.weight": torch.ones(1)})
    with pytest.raises(CannotQuantize, match=r"model\.layers\.0\.mlp\.router\.weight"):
        quantize(model, tmp_path / "out", options(source), quiet)


def test_tensors_that_follow_from_the_config_are_dropped(source, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    model = copy_with(source, tmp_path / "m", {name: torch.ones(16)})
    quantize(model, tmp_path / "out", small(source), quiet)
    assert name not in Checkpoint(tmp_path / "out").names()


def test_numbers_that_float16_cannot_hold_stop_the_job(source, tmp_path):
    big = torch.full((256,), 1e6, dtype=torch.bfloat16)
    model = copy_with(source, tmp_path / "m", {"model.norm.weight": big})
    with pytest.raises(CannotQuantize, match=r"model\.norm\.weight does not fit float16"):
        quantize(model, tmp_path / "out", small(source), quiet)


def test_damaged_weights_stop_the_job(source, tmp_path):
    weight = torch.full((384, 256), float("nan"), dtype=torch.bfloat16)
    model = copy_with(source, tmp_path / "m", {"model.layers.1.mlp.up_proj.weight": weight})
    with pytest.raises(NotFinite, match="NaN"):
        quantize(model, tmp_path / "out", small(source), quiet)


def test_text_that_the_model_writes_is_written_once(source, tmp_path):
    asked = small(source, text=None, own_text=True, length=16)
    with pytest.raises(Stop):
        quantize(source, tmp_path / "out", asked, StopAt("layers", 0))
    again = StopAt("never", 0)
    quantize(source, tmp_path / "out", asked, again)
    assert "samples" not in {stage for stage, _ in again.heard}


def test_without_group_and_text_the_default_budget_and_the_text_that_ships(source, tmp_path):
    report = quantize(source, tmp_path / "out", small(source, group=None, text=None), quiet)
    assert report.options["budget"] == DEFAULT_BUDGET
    assert 4.625 < report.plan["bits"] <= DEFAULT_BUDGET
    assert report.plan["group"] == 32
    assert report.options["text"].startswith("calibration.txt, SHA-256 ")


@pytest.mark.parametrize(
    ("width", "group", "said"),
    [
        (96, 64, "mlp.down_proj has 96 inputs, not whole groups of 64: --group 32 fits this model"),
        (100, 128, "mlp.down_proj has 100 inputs, not whole groups of 128: --format int8 fits this model"),
    ],
)
def test_a_group_that_does_not_fit_is_refused_before_work(source, tmp_path, width, group, said):
    model = copy_with(source, tmp_path / "m", {})
    config = json.loads((source / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": width}))
    with pytest.raises(CannotQuantize, match=said):
        quantize(model, tmp_path / "out", small(source, group=group), quiet)
    assert not (tmp_path / "out").exists()


def test_inputs_that_no_group_divides_stay_in_eight_bits(source, tmp_path):
    narrow = {
        f"model.layers.{index}.mlp.{name}.weight": Checkpoint(source).tensor(f"model.layers.{index}.mlp.{name}.weight")
        for index in range(4)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    narrow = {name: one[:, :100].contiguous() if "down" in name else one[:100] for name, one in narrow.items()}
    model = copy_with(source, tmp_path / "m", narrow)
    config = json.loads((source / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    report = quantize(model, tmp_path / "out", small(source, group=None, budget=6), quiet)
    assert report.plan is not None
    assert all("mlp.down_proj" in names for names in report.plan["eight"].values())
    assert len(report.plan["eight"]) == 4


def comparison(kl: float) -> Comparison:
    return Comparison(9.0, Interval(0.01, 0.0, 0.02), kl, 0.98, 30.0, 32)


@pytest.mark.parametrize(
    ("kept", "advised", "not_advised"),
    [
        ({"format": "awq", "group": 128}, "--group 64 or 32), or 8 bits", "original"),
        ({"format": "awq", "group": 32}, "8 bits (--format int8) lose less", "maller groups"),
        ({"format": "awq", "group": None, "budget": 4.75}, "A larger --budget", "maller groups"),
        ({"format": "int8", "group": None}, "serve the original", "8 bits"),
    ],
)
def test_what_is_advised_loses_less_than_what_was_made(kept, advised, not_advised):
    missed = QuantizeReport(kept, 2, 1, (), Evaluation(3, 9, 9.1, comparison(0.5)))
    assert missed.misses()
    assert advised in missed.markdown()
    assert not_advised not in missed.markdown()
    met = QuantizeReport(kept, 2, 1, (), Evaluation(3, 9, 9.1, comparison(0.001)))
    assert met.misses() == ()
    assert advised not in met.markdown()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"own_text": True}, "choose one of --text and --own-text"),
        ({"group": 16}, "groups of 16"),
        ({"group": -1}, "groups of -1"),
        ({"samples": 0}, "one window"),
        ({"length": 1}, "two tokens"),
        ({"engine": "bitsandbytes"}, "does not write awq"),
        ({"engine": "autoawq", "format": "int8"}, "does not write int8"),
    ],
)
def test_options_that_cannot_be_are_refused_before_work(source, tmp_path, changes, said):
    with pytest.raises(CannotQuantize, match=said):
        quantize(source, tmp_path / "out", options(source, **changes), quiet)
    assert not (tmp_path / "out").exists()


def test_a_quantized_model_is_not_quantized_again(source, made, tmp_path):
    with pytest.raises(CannotQuantize, match="already"):
        quantize(made[0], tmp_path / "out", options(source), quiet)


def test_a_text_that_is_not_there(source, tmp_path):
    with pytest.raises(BadFile, match=r"gone\.txt"):
        quantize(source, tmp_path / "out", options(source, text=tmp_path / "gone.txt"), quiet)
