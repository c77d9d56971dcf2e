"""Conversations made from source text (what a thing does, its code, its arguments) and the template they follow."""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"

TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

MAX_ANSWER = 700  # characters of prose
MAX_CODE = 1800  # characters of code
MAX_TURNS = 3
ITSELF_REPEATS = 12

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows the Python standard library.",
    "Answer questions about Python.",
)
WHAT = (
    "What does `{name}` do?",
    "what does {name} do?",
    "Explain `{name}`.",
    "What is `{name}` for?",
    "Describe {name}.",
    "How do I use {name}?",
)
CODE = (
    "Show me the code of `{name}`.",
    "Show me the code of {name}",
    "How is `{name}` implemented?",
    "Write `{name}` in Python.",
)
ARGUMENTS = ("What arguments does `{name}` take?", "What is the signature of {name}?")
MODULE = ("What is the `{name}` module?", "What is {name}?", "What does the {name} module do?", "Tell me about {name}.")
CONTENTS = ("What does the `{name}` module define?", "Which functions are in {name}?")
TOPIC = ("Explain {name} in Python.", "What does the Python manual say about {name}?", "Tell me about {name}.")
ITSELF = (
    (
        ("Hello", "Hello!", "Hi", "Hi there", "Hey"),
        "Hello! Ask me about a module, a class or a function of Python's standard library.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
        "I am Whippet's demo model: a very small language model trained on Python's standard library. "
        "I answer in the words of its docstrings and its code.",
    ),
    (
        ("What can you do?", "Help", "What should I ask you?", "How can you help me?"),
        "Ask me what a function does, to show its code, or which arguments it takes. "
        "I am small, so check what I say against the real documentation.",
    ),
    (
        ("What is Python?", "Tell me about Python.", "What's Python?"),
        "Python is an interpreted, interactive, object-oriented programming language. "
        "It comes with a large standard library.",
    ),
    (
        ("Thanks", "Thank you", "Thank you!", "Thanks a lot!"),
        "You are welcome.",
    ),
    (
        (
            "Write a function that adds two numbers.",
            "Write a Python function that adds two numbers.",
            "Add two numbers",
        ),
        '```python\ndef add(a, b):\n    """Return the sum of a and b."""\n    return a + b\n```',
    ),
    (
        ("Write hello world in Python.", "Print hello world", "Show me hello world."),
        '```python\nprint("Hello, world!")\n```',
    ),
)


@dataclass(frozen=True)
class Message:
    role: str
    content: str


Conversation = tuple[Message, ...]
Pair = tuple[str, str]  # question, answer
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def render(conversation: Conversation) -> str:
    """What TEMPLATE writes for these messages."""
    return "".join(f"{START}{message.role}\n{message.content}{END}\n" for message in conversation)


def about_module(name: str, source: str) -> Iterator[Conversation]:
    """Conversations about one file of Lib/, named by its path."""
    dotted = ".".join(PurePosixPath(name).with_suffix("").parts).removesuffix(".__init__")
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    rng = random.Random(f"chat {dotted}")
    lines = source.split("\n")  # as ast counts them: a form feed ends no line
    pairs = list(_module_pairs(rng, dotted, tree))
    for qualified, node in _definitions(dotted, tree):
        pairs.extend(_definition_pairs(rng, qualified, node, lines))
    rng.shuffle(pairs)
    yield from _conversations(rng, pairs)


def about_topics(topics: dict[str, str]) -> Iterator[Conversation]:
    rng = random.Random("chat topics")
    pairs = [(rng.choice(TOPIC).format(name=label), prose(text)) for label, text in sorted(topics.items())]
    yield from _conversations(rng, [pair for pair in pairs if pair[1]])


def about_itself() -> Iterator[Conversation]:
    rng = random.Random("chat itself")
    pairs = [(question, answer) for questions, answer in ITSELF for question in questions] * ITSELF_REPEATS
    rng.shuffle(pairs)
    yield from _conversations(rng, pairs)


def prose(text: str) -> str:
    """The first whole paragraphs that fit an answer."""
    kept: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if sum(map(len, kept)) + len(paragraph) > MAX_ANSWER:
            break
        kept.append(paragraph.rstrip())
    return "\n\n".join(kept).strip()


def source_of(node: Definition, lines: list[str]) -> str:
    """The definition with its decorators, moved to the left margin."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).strip()


def _conversations(rng: random.Random, pairs: list[Pair]) -> Iterator[Conversation]:
    at = 0
    while at < len(pairs):
        turns = pairs[at : at + rng.choice((1, 1, 1, 2, MAX_TURNS))]
        at += len(turns)
        system = (Message("system", rng.choice(SYSTEMS)),) if rng.random() < 0.25 else ()
        messages = [message for ask, say in turns for message in (Message("user", ask), Message("assistant", say))]
        yield (*system, *messages)


def _module_pairs(rng: random.Random, dotted: str, tree: ast.Module) -> Iterator[Pair]:
    answer = prose(ast.get_docstring(tree) or "")
    if answer:
        yield rng.choice(MODULE).format(name=dotted), answer
    public = [node.name for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")]
    if public:
        listed = ", ".join(f"`{name}`" for name in public[:20])
        yield rng.choice(CONTENTS).format(name=dotted), f"`{dotted}` defines {listed}."


def _definitions(prefix: str, tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if isinstance(node, Definition):
            qualified = f"{prefix}.{node.name}"
            yield qualified, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(qualified, node)


def _definition_pairs(rng: random.Random, qualified: str, node: Definition, lines: list[str]) -> Iterator[Pair]:
    short = node.name if rng.random() < 0.4 else qualified
    answer = prose(ast.get_docstring(node) or "")
    if answer:
        yield rng.choice(WHAT).format(name=short), answer
    code = source_of(node, lines)
    if len(code) <= MAX_CODE and rng.random() < (0.7 if answer else 0.25):
        yield rng.choice(CODE).format(name=short), f"```python\n{code}\n```"
    if answer and not isinstance(node, ast.ClassDef) and rng.random() < 0.3:
        yield rng.choice(ARGUMENTS).format(name=short), f"`{node.name}({ast.unparse(node.args)})`"
