"""A draft model beside its target: which is refused, how it is counted, that answers stay the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import InvalidModel, Unsupported
from engine.execution.registry import EXECUTORS
from engine.execution.router import Role
from engine.execution.speculation.verify_executor import NO_DRAFT
from engine.kernels.gpu import GpuShape
from engine.loading.formats import read_folder
from engine.settings import EngineSettings
from engine.worker.build import make_runner, prepare
from engine.worker.offers import KERNELS_TRIAL, PLAIN_TRIAL, proposers
from engine.worker.required_kernels import KernelQuery, required_kernels
from tests.contract.answers import generate, progress, requests

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def make(name: str, tokenizer: str = "{}", **changes: object) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(json.dumps({**PLAIN_TRIAL, **changes}))
        (made / "tokenizer.json").write_text(tokenizer)
        return made

    return make


def settings_of(target: Path, draft: Path | None = None) -> EngineSettings:
    return EngineSettings(
        model=str(target),
        draft_model=None if draft is None else str(draft),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_sequences=8,
        kv_bytes=512 << 10,
    )


@pytest.mark.product
def test_answers_are_those_without_a_draft(folder: Folder) -> None:
    target, draft = folder("target"), folder("draft", num_hidden_layers=1, hidden_size=32)
    plain, drafted = settings_of(target), settings_of(target, draft)
    one, two = prepare(plain, progress), prepare(drafted, progress)
    assert one.digest == two.digest
    assert two.room.pages < one.room.pages, "the draft's pages are counted"
    asked = requests(8)
    runners = [make_runner(settings, made, progress) for settings, made in ((plain, one), (drafted, two))]
    assert generate(runners[0], asked, 40, 64) == generate(runners[1], asked, 40, 64)
    assert [runner.info.draft_model for runner in runners] == ["", "draft"]
    reasons = [{one.name: one.why_not for one in runner.info.proposers} for runner in runners]
    assert reasons == [
        {"prompt_lookup": "", "draft_model": "draft-model names none"},
        {"prompt_lookup": "", "draft_model": ""},
    ]


def test_a_draft_that_does_not_fit_is_refused_by_one_line(folder: Folder) -> None:
    target = folder("target")
    for draft, said in (
        (folder("other", tokenizer='{"other": 1}'), "its tokenizer.json is not that of"),
        (folder("small", vocab_size=300), "its vocabulary has 300 tokens, that of .* has 320"),
    ):
        with pytest.raises(Unsupported, match=f"draft-model .*{draft.name}: {said}") as refused:
            prepare(settings_of(target, draft), progress)
        assert len(str(refused.value).splitlines()) == 1
    empty = folder("empty")
    shutil.rmtree(empty)
    with pytest.raises(InvalidModel, match="empty"):
        prepare(settings_of(target, empty), progress)


def test_where_nobody_verifies_the_reason_is_told(folder: Folder) -> None:
    target = folder("target")
    settings = settings_of(target)
    info = make_runner(settings, prepare(settings, progress), progress, EXECUTORS[-1:]).info
    assert [one.why_not for one in info.proposers] == ["no executor in use verifies drafts"] * 2


def test_a_draft_models_kernels_are_foretold(folder: Folder) -> None:
    """Else each would be compiled when it is asked for, one after another."""
    target, draft = folder("target", **KERNELS_TRIAL), folder("draft", **KERNELS_TRIAL | {"hidden_size": 128})
    gpu = GpuShape(132, 227 << 10, overlap=True)
    settings = EngineSettings(model=str(target), device="cuda", max_sequences=8)
    config, form = read_folder(target, "auto")
    alone = required_kernels(settings, KernelQuery(config, form, gpu))
    beside = required_kernels(settings, KernelQuery(config, form, gpu, draft=read_folder(draft, "auto")))
    assert {name for name, _ in alone - beside} <= {"accept", "attention", "propose"}, "rounds of several look up"
    assert {name for name, _ in beside - alone} == {
        *("draft", "linear", "linear_residual", "gate_up", "head", "prefill_stream", "prefill_ends")
    }


@pytest.mark.parametrize(
    ("verifier", "no_draft", "lookup", "draft"),
    [
        (None, None, "no executor in use verifies drafts", "no executor in use verifies drafts"),
        ("speculation", None, "", ""),
        (Role.VERIFY, None, "the draft model guesses in its place", ""),
        (Role.VERIFY, "heads of 20", "", "heads of 20"),
        (Role.VERIFY, NO_DRAFT, "", NO_DRAFT),
    ],
)
def test_who_guesses_and_why_not_the_other(verifier: str | None, no_draft: str | None, lookup: str, draft: str) -> None:
    assert [one.why_not for one in proposers(verifier, no_draft)] == [lookup, draft]
