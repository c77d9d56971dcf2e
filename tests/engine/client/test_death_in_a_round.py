"""An engine that is killed while it verifies a draft, with a real model on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import launch
from engine.api import EngineState
from engine.client import EngineClient
from engine.errors import EngineUnavailable
from engine.fake import plain_request
from engine.settings import EngineSettings
from engine.worker.offers import PLAIN_TRIAL
from tests.engine.client import dies_in_a_round
from tests.engine.client.test_supervisor import QUICK, ROOT, ids_of, until

pytestmark = pytest.mark.product

STEP = 5  # verifying steps of the first process
PERIODIC = (7, 8, 9) * 6  # something to look up
TOKENS = 120


def launched_with(died: Path, fd: int, mark: int, kind: str) -> subprocess.Popen[bytes]:
    """As `launch._launch`."""
    return subprocess.Popen(
        [
            *(sys.executable, dies_in_a_round.__file__, str(died), str(STEP)),
            *("--fd", str(fd), "--step-mark", str(mark), "--kind", kind),
        ],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[fd, mark],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
        start_new_session=True,
    )


async def test_what_each_stream_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has tokens is told to come again, and has none of the step that was not ended; who waits is answered by the
    next process; and the text is the one of no speculation."""
    (tmp_path / "config.json").write_text(json.dumps(dict(PLAIN_TRIAL)))
    monkeypatch.setattr(launch, "_launch", lambda *given: launched_with(tmp_path / "died", *given))
    settings = EngineSettings(
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        max_sequences=1,
        kv_bytes=4 << 20,
        threads=1,
        kind="model",
    )
    client = EngineClient(settings, backoff=QUICK)
    await client.start()
    try:
        begun = client.submit(plain_request(PERIODIC, TOKENS))
        waiting = client.submit(plain_request(PERIODIC[1:], TOKENS))
        heard: list[int] = []
        accepted = 0

        async def listen() -> None:
            nonlocal accepted
            async for events in begun:
                heard.extend(events.token_ids)
                accepted += events.draft_accepted

        with pytest.raises(EngineUnavailable) as told:
            await listen()
        assert told.value.retry_after > 0
        assert (tmp_path / "died").exists()
        after = await ids_of(waiting)
        await until(lambda: client.state is EngineState.READY)
        assert client.restarts == 1
        again = [await ids_of(client.submit(plain_request(one, TOKENS))) for one in (PERIODIC, PERIODIC[1:])]
        await client.set_optimization("speculation", False)
        plain = [await ids_of(client.submit(plain_request(one, TOKENS))) for one in (PERIODIC, PERIODIC[1:])]
        assert again == plain
        assert after == plain[1]
        assert len(plain[0]) == TOKENS
        assert accepted >= STEP - 1
        assert STEP < len(heard) < TOKENS
        assert heard == plain[0][: len(heard)]
        assert client.live == 0
    finally:
        await client.close()
