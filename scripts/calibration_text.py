"""Writes the text that `whippet quantize` calibrates on by default, quant/calibration.txt:

python -m scripts.calibration_text HOST:PORT

A running server's model writes it: SmolLM2-135M-Instruct (Apache-2.0) wrote the committed one. So no person owns it,
and it is of the kinds that models are asked for. The same model writes the same text again: every answer has a seed.
"""

from __future__ import annotations

import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

TARGET = Path(__file__).resolve().parents[1] / "quant" / "calibration.txt"
ANSWERS, TOKENS, AT_ONCE = 168, 400, 8
_ADDRESS = re.compile(r"https?:|www\.|\S@\S")
FORMS = (
    "Explain to a beginner",
    "Write a short article about",
    "Write a letter to a friend about",
    "Write a dialogue between two people about",
    "List ten facts about",
    "Tell a story about",
    "Write a news report about",
    "Give step by step instructions for",
    "Compare two opinions on",
    "Write a small Python program about",
    "Write the minutes of a meeting about",
    "Answer five questions that a customer may ask about",
)
SUBJECTS = (
    "bread and how it rises",
    "the tides of the sea",
    "a bank account",
    "learning to ride a bicycle",
    "the history of a small town",
    "repairing a washing machine",
    "stars and planets",
    "a visit to the doctor",
    "sorting a list of names",
    "a train journey through mountains",
    "voting in an election",
    "growing tomatoes",
    "a lost dog",
    "prices that rise",
    "how a computer stores numbers",
    "the rules of chess",
    "rain and drought",
    "renting a flat",
    "music of the eighteenth century",
    "a broken bridge",
    "translating a poem",
    "insurance for a car",
    "the human heart",
    "working from home",
    "ships and harbours",
    "a recipe for soup",
    "fractions and percentages",
    "electric cars",
)


def prompts() -> list[str]:
    """Combines every form with every subject so that neighbours differ in both."""
    pairs = zip(
        itertools.cycle(FORMS), (SUBJECTS[(i * 5 + i // 84) % len(SUBJECTS)] for i in range(ANSWERS)), strict=False
    )
    return [f"{form} {subject}." for form, subject in pairs]


def answer(stub: GenerationServiceStub, number: int, prompt: str) -> str:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingOptions(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=number),
        stopping=pb.StoppingOptions(max_tokens=TOKENS),
    )
    return str(stub.Generate(request, timeout=3600).text).strip()


def without_addresses(text: str) -> str:
    """Removes lines with an address: an invented one may exist."""
    return "\n".join(line for line in text.split("\n") if not _ADDRESS.search(line))


def main(address: str) -> int:
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(AT_ONCE) as pool:
        stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        texts = pool.map(lambda one: answer(stub, *one), enumerate(prompts()))
        TARGET.write_text(without_addresses("\n\n".join(texts)) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
