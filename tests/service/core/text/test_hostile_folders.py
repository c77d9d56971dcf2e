"""Model folders that mean harm, or are damaged in odd ways: refused at the load, in a bound of time and memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidModel
from service.core.text import NO_OPTIONS, ChatMessage, ChatOptions, Tokenizer
from service.core.text.files import MAX_BYTES
from service.core.text.sandbox.jobs import EncodeChat, EncodeText, JobRefused, pack
from service.core.text.sandbox.processes import SMALL_LIMITS, JobFailed, TextProcesses

DEMO = Path("models/demo")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo's text side."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def change(file: Path, how: Change) -> None:
    value = json.loads(file.read_text())
    how(value)
    file.write_text(json.dumps(value))


@pytest.mark.parametrize("number", [2**22, 10**9, 2**31, 2**32 - 1, 2**32, 2**64, -1])
def test_an_id_out_of_all_bounds(model: Path, number: int) -> None:
    change(model / "tokenizer.json", lambda value: value["model"]["vocab"].update(odd=number))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidModel, match=r"tokenizer\.json"):
        Tokenizer.load(model)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB; a table would take gigabytes


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("ids", [8192, [2, 8192], 10**12, [2**64]])
def test_an_end_of_text_beyond_the_vocabulary(model: Path, name: str, ids: int | list[int]) -> None:
    change(model / "generation_config.json", lambda value: value.pop("eos_token_id", None))
    change(model / name, lambda value: value.update(eos_token_id=ids))
    with pytest.raises(InvalidModel, match=rf"{name}: an eos_token_id is beyond the vocabulary of 8192"):
        Tokenizer.load(model)


def test_a_token_without_end(model: Path) -> None:
    change(model / "tokenizer.json", lambda value: value["model"]["vocab"].update({"x" * 5000: 8192}))
    with pytest.raises(InvalidModel, match="5000 characters"):
        Tokenizer.load(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
def test_what_is_no_regular_file_is_not_waited_for(model: Path, name: str, kind: str) -> None:
    file = model / name
    file.unlink()
    change(
        model / "generation_config.json", lambda value: value.pop("eos_token_id", None)
    ) if name == "config.json" else 0
    with socket.socket(socket.AF_UNIX) as listener:
        match kind:
            case "fifo":
                os.mkfifo(file)
            case "device":
                file.symlink_to("/dev/zero")
            case "folder":
                file.mkdir()
            case "socket":
                here = os.open(model, os.O_RDONLY)
                listener.bind(f"/proc/self/fd/{here}/{name}")  # a name short enough
                os.close(here)
        with pytest.raises(InvalidModel, match=name):
            Tokenizer.load(model)


def test_a_file_without_end(model: Path) -> None:
    os.truncate(model / "tokenizer.json", MAX_BYTES + 1)
    with pytest.raises(InvalidModel, match="larger than"):
        Tokenizer.load(model)


@pytest.mark.proof
def test_many_added_tokens_cost_no_more_than_each_alone(model: Path) -> None:
    table = {str(8192 + n): {"content": f"<|{n}|>", "special": True} for n in range(10_000)}  # minutes, one by one
    change(model / "tokenizer_config.json", lambda value: value.update(added_tokens_decoder=table))
    assert Tokenizer.load(model).vocab_size == 18_192


@pytest.mark.parametrize("template", ["{{ 'a' * 10**10 }}", "{{ 'a' | center(10000000000) }}"])
async def test_constants_are_folded_and_rendered_under_a_limit(model: Path, template: str) -> None:
    change(model / "tokenizer_config.json", lambda value: value.update(chat_template=template))
    processes = TextProcesses(str(model))
    await processes.start()
    with pytest.raises(JobRefused, match="more memory"):
        await processes.run("encode_chat", pack(EncodeChat((ChatMessage("user", "x"),), NO_OPTIONS, None)))
    await processes.close()
    tokenizer = Tokenizer.load(model, only_plain=True)  # as the front does
    assert tokenizer.chat
    assert not tokenizer.chat_here([])


@pytest.mark.product
async def test_a_tokenizer_that_panics_is_a_failure_and_no_more(model: Path) -> None:
    def hostile(value: dict[str, Any]) -> None:
        value["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"

    change(model / "tokenizer.json", hostile)
    processes = TextProcesses(str(model))
    await processes.start()
    for _ in range(2):
        with pytest.raises(JobFailed, match="PanicException"):
            await processes.run("encode", pack(EncodeText("a" * 40 + "b", None)))
    assert await processes.run("encode", pack(EncodeText("fine", None)))
    await processes.close()
    assert not Tokenizer.load(model, only_plain=True).here("a")


@pytest.mark.product
async def test_tools_make_no_template_longer_than_its_limits(model: Path) -> None:
    """A template that loops over tools in tools is ended by the clock, one that repeats them by its size."""
    tools = ChatOptions(tools=json.dumps([{"name": "f" * 20}] * 1000))
    loops = "{% for a in tools %}{% for b in tools %}{% for c in tools %}{% endfor %}{% endfor %}{% endfor %}"
    grows = "{% for a in tools %}{% for b in tools %}{{ tools }}{% endfor %}{% endfor %}"
    for template, seconds, limit in ((loops, 1.0, "takes more than 1 seconds"), (grows, 60.0, "too long once")):
        change(model / "tokenizer_config.json", lambda value, text=template: value.update(chat_template=text))
        processes = TextProcesses(str(model), small=replace(SMALL_LIMITS, seconds=seconds))
        await processes.start()
        with pytest.raises(JobRefused, match=limit):
            await processes.run("encode_chat", pack(EncodeChat((ChatMessage("user", "x"),), tools, None)))
        await processes.close()
