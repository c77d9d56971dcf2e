"""Proofs for how answers to chats are taken apart."""

from __future__ import annotations

import asyncio

from service.config.settings import Settings
from service.core.parsing.formats import choose
from service.core.text import Tokenizer
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.config.proofs import FAKE, Proof, Tools, becomes
from tests.service.conftest import ROOT, ask


async def thinks(settings: Settings, tools: Tools) -> bool:
    """Whether a server sends what comes after the beginning of reasoning as reasoning."""
    messages = [pb.ChatMessage(role="assistant", content="<think>")]
    request = ask("", 8, chat=pb.Chat(messages=messages, continue_final_message=True))

    def answer() -> pb.GenerateResponse:
        with tools.serve(*tools.flags) as server:
            response: pb.GenerateResponse = server.generation.Generate(request, timeout=60)
            return response

    found = await asyncio.to_thread(answer)
    assert bool(found.reasoning) != bool(found.text)
    return bool(found.reasoning)


async def calls(settings: Settings, tools: Tools) -> str | None:
    form = choose(settings.chat, Tokenizer.of_bytes()).calls
    return None if form is None else form.name


async def prompt(settings: Settings, tools: Tools) -> str:
    """What a server makes of a chat, without its special tokens."""
    (tools.folder / "short.jinja").write_text("{{ messages[0].content }}, in short")
    request = pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")]))

    def render() -> str:
        with tools.serve(*tools.flags) as server:
            ids = server.generation.Tokenize(request, timeout=60).token_ids
            return str(server.generation.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=60).text)

    return await asyncio.to_thread(render)


SMALL = (f"--model={ROOT / 'models' / 'demo'}", "--engine=fake")
PROOFS = {
    "chat-template": Proof(
        "{folder}/short.jinja", prompt, becomes("user\nhello\nassistant\n", "hello, in short"), SMALL
    ),
    "chat.reasoning-format": Proof("think", thinks, becomes(False, True), FAKE),
    "chat.tool-format": Proof("mistral", calls, becomes(None, "mistral"), FAKE),
}
