"""Writes the text that `whippet quantize` calibrates on by default, quant/calibration.txt:

python -m scripts.calibration_text HOST:PORT

A running server's model writes it: SmolLM2-135M-Instruct (Apache-2.0) wrote the committed one. So no person owns it.
Half of it are answers to what models are asked for, half goes on from openings of other kinds of prose. The same model
writes the same text again: every answer has a seed.
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
ANSWERS, TOKENS, AT_ONCE = 84, 400, 8
CONTINUATIONS, CONTINUED = 2, 256  # of each opening, and tokens of each
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
OPENINGS = (
    "CHAPTER I.\n\nThe rain had not ceased for three days when Mrs. Harcourt at last resolved to write to her brother;",
    'CHAPTER XII.\n\n"You are mistaken, sir," said she, rising from her chair, "and I must beg that you will',
    "It was generally agreed in the village that the new vicar was a man of sense, and",
    "My dear Eliza,\n\nYour letter of the ninth reached me only this morning, and I hasten to",
    '"But surely," cried Tom, "you cannot mean to leave us before the ball!"\n\nHis cousin coloured, and',
    "The old house stood at the end of the lane, and nobody could remember who had",
    "He had been a soldier for twenty years, and what he had seen of men did not",
    "The carriage stopped, the steps were let down, and the ladies, who had expected nothing less than",
    "She walked home alone along the shore, thinking over all that had been said, and",
    "There is a kind of pride which the world forgives, and another which",
    "The question whether the state may limit the liberty of its citizens for their own good has",
    "What is property? We are told that it is the fruit of labour. Yet",
    "Those who defend authority commonly argue as follows. First, that without it",
    "The workers' associations of the nineteenth century differed from the guilds in that",
    "It is often objected that equality and freedom cannot both be had. This objection rests on",
    "By capitalism we mean here an economic system in which",
    "Critics of the theory have replied that (a) it ignores the role of institutions, and (b)",
    "The history of democracy is in large part the history of",
    "A tax, as the older economists defined it, is",
    "Let us consider, then, what follows if we deny that the mind is",
    "Fellow citizens,\n\nWe meet today at a time when",
    "Gentlemen of the jury, the facts of this case are few. On the night of",
    "I was born in 1794, the third son of a wool merchant, and my earliest memory is of",
    "We left the harbour on the fourth of May with a fair wind. On the second day",
    "March 3rd. Cold, with a north wind all day. Went to",
    "The battle began at dawn. The left wing, under General",
    "The cathedral, begun in the twelfth century and never finished, is remarkable for",
    "The cell membrane consists of two layers of lipids, in which",
    "In 1687 Newton showed that the motion of the planets could be derived from",
    "Theorem 2. Let f be a continuous function on a closed interval. Then",
    "Abstract. We study the effect of temperature on the growth of",
    "The common heron is found in marshes and along slow rivers; it nests in",
    "WASHINGTON -- The committee voted on Tuesday to delay",
    "The team lost three of its last four games, and the coach said that",
    "The tenant shall, upon notice of not less than thirty (30) days,",
    "2.1 Installation. Before you connect the unit to the mains, make sure that",
    "Take a pound of flour, half a pound of butter, and the yolks of four eggs;",
    "KING. What news from the north?\n\nMESSENGER. My lord,",
    "O wind, that over the grey water blows,\n",
    "Q. When did you first see the defendant?\nA.",
    "The patient, a 54-year-old woman, presented with",
    "The film opens with a long shot of an empty street, and",
    "lol i never thought id say this but",
    "Re: Re: problem with the build\n\n> it fails on line 40\n\nThat is because",
    'def merge(left, right):\n    """Merges two sorted lists."""\n',
    "#include <stdio.h>\n\nint main(void)\n{\n",
    "| Country | Capital | Population |\n| --- | --- | --- |\n",
    "According to tradition, the sage had seven pupils. To the first he said,",
)


def prompts() -> list[str]:
    """Combines every form with every subject so that neighbours differ in both."""
    pairs = zip(itertools.cycle(FORMS), (SUBJECTS[i * 5 % len(SUBJECTS)] for i in range(ANSWERS)), strict=False)
    return [f"{form} {subject}." for form, subject in pairs]


def answer(stub: GenerationServiceStub, number: int, prompt: str) -> str:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingOptions(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=number),
        stopping=pb.StoppingOptions(max_tokens=TOKENS),
    )
    return str(stub.Generate(request, timeout=3600).text).strip()


def continuation(stub: GenerationServiceStub, number: int, opening: str) -> str:
    request = pb.GenerateRequest(
        text=opening,
        sampling=pb.SamplingOptions(temperature=1.0, top_p=0.98, seed=number),
        stopping=pb.StoppingOptions(max_tokens=CONTINUED),
    )
    return opening + str(stub.Generate(request, timeout=3600).text).rstrip()


def without_addresses(text: str) -> str:
    """Removes lines with an address: an invented one may exist."""
    return "\n".join(line for line in text.split("\n") if not _ADDRESS.search(line))


def main(address: str) -> int:
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(AT_ONCE) as pool:
        stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        texts = [
            *pool.map(lambda one: answer(stub, *one), enumerate(prompts())),
            *pool.map(lambda one: continuation(stub, *one), enumerate(OPENINGS * CONTINUATIONS)),
        ]
        TARGET.write_text(without_addresses("\n\n".join(texts)) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
