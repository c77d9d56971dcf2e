"""A model folder that changes under a running server: the new model is never served with the old tokenizer."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from engine.api import EngineState
from engine.client import EngineClient, texts_digest
from engine.errors import EngineUnavailable, InvalidModel
from engine.fake import plain_request
from tests.engine.client.test_supervisor import FAKE, PATIENCE, QUICK, ROOT, pid_of, works_again

pytestmark = pytest.mark.product

DEMO = ROOT / "models" / "demo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The text side of a model, which is all that a fake engine is given."""
    for file in DEMO.glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def client_of(folder: Path) -> EngineClient:
    return EngineClient(replace(FAKE, model=str(folder)), texts=texts_digest(str(folder)), backoff=QUICK)


async def test_an_engine_that_dies_finds_the_same_folder(folder: Path) -> None:
    client = client_of(folder)
    await client.start()
    os.kill(pid_of(client), signal.SIGKILL)
    await works_again(client)
    await client.close()


@pytest.mark.proof
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
async def test_a_folder_replaced_before_a_restart_is_not_served(folder: Path, name: str) -> None:
    client = client_of(folder)
    await client.start()
    ended = asyncio.ensure_future(client.ended())
    with (folder / name).open("a") as file:
        file.write(" ")
    made = [events.token_ids async for events in client.submit(plain_request((1, 2), 5))]
    assert sum(map(len, made)) == 5  # what is loaded is served
    pid = pid_of(client)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InvalidModel, match="replaced since this server started"):
        await asyncio.wait_for(ended, PATIENCE)
    assert client.state is EngineState.STOPPED
    with pytest.raises(EngineUnavailable, match="files were replaced") as caught:
        client.submit(plain_request((1,)))
    assert str(folder) not in str(caught.value)  # callers need not know where it lies
    await client.close()


async def test_nor_one_replaced_between_the_tokenizer_and_the_first_engine(folder: Path) -> None:
    client = client_of(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModel, match="tokenizer"):
        await client.start()
    await client.close()


async def test_other_weights_are_refused() -> None:
    client = EngineClient(FAKE, backoff=QUICK)
    await client.start()
    assert client.info is not None
    client.on_ready(replace(client.info, total_pages=7))
    with pytest.raises(InvalidModel, match="weights were replaced"):
        client.on_ready(replace(client.info, weights_digest="other"))
    await client.close()
