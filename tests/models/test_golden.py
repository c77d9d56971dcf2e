"""What the demo model says, word for word: greedy, float32, through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.proof

MODEL = Path(__file__).parents[2] / "models" / "demo"
MARGIN = 0.05  # between the first two logits at every step, so that another CPU's rounding cannot change the text
TOKENS = 64

CHATS = {
    "Hello": "Hello! Ask me about a module, a class or a function of Python's standard library.<|im_end|>",
    "Write a function that adds two numbers.": (
        '```python\ndef add(a, b):\n    """Return the sum of a and b."""\n    return a + b\n```<|im_end|>'
    ),
    "What does `threading.Thread.join` do?": (
        "Join a thread object, and return the thread object.\n\n"
        "This is a wrapper around the threading module.<|im_end|>"
    ),
}
PROMPT = 'def is_even(n):\n    """Return True if n is'
CONTINUED = ' a symbolic link."""\n    return (not (n == 0)' + " and (n == 0)" * 8 + " and ("


@pytest.fixture(scope="module")
def speaker() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def greedy(speaker: tuple[Any, Any], prompt: str) -> str:
    model, words = speaker
    ids = words(prompt, return_tensors="pt")["input_ids"]
    said: list[int] = []
    while len(said) < TOKENS and (not said or said[-1] not in model.generation_config.eos_token_id):
        with torch.no_grad():
            (first, second), order = model(ids).logits[0, -1].topk(2)
        assert first - second > MARGIN
        said.append(int(order[0]))
        ids = torch.cat([ids, torch.tensor([[said[-1]]])], dim=1)
    text: str = words.decode(said)
    return text


@pytest.mark.parametrize("question", CHATS)
def test_chat(speaker: tuple[Any, Any], question: str) -> None:
    message = {"role": "user", "content": question}
    prompt = speaker[1].apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert greedy(speaker, prompt) == CHATS[question]


def test_plain_text(speaker: tuple[Any, Any]) -> None:
    assert greedy(speaker, PROMPT).rstrip(" (") == CONTINUED.rstrip(" (")


@torch.no_grad()
def test_generate_says_the_same_with_its_cache(speaker: tuple[Any, Any]) -> None:
    model, words = speaker
    prompt = words(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=TOKENS)
    assert words.decode(ids[0, prompt["input_ids"].shape[1] :]).rstrip(" (") == CONTINUED.rstrip(" (")
