"""Reads a model's tokenizer from its folder: text and chats to token ids, and the folder's defaults."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from service.core.text.chat import ChatTemplate, choose_templates
from service.core.text.conversation import (
    NO_OPTIONS,
    ChatMessage,
    ChatOptions,
    ChatTemplateError,
    only_flags,
    template_variables,
    texts_in,
    with_texts,
)
from service.core.text.files import (
    TEMPLATE,
    TOOLS_TEMPLATE,
    ModelFiles,
    SamplingDefaults,
    one_line,
    read_eos,
    read_sampling,
)
from service.core.text.pieces import OpaquePieces, Pieces, byte_letters, read_pieces, read_tokens, with_special
from service.core.text.special import CONFIG, apply_special
from service.core.text.steps import is_plain, longest_token
from service.core.text.token_texts import TokenTexts
from service.core.validation import too_long

VOCABULARY = "tokenizer.json"
NO_VOCABULARY = "write it with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
SHORT = 2048  # characters or ids; a millisecond or two
MESSAGE = 64  # characters that a template is taken to put around a message
MOST_TEXT = 2 * 2**20  # bytes of a text, or of all messages of a chat: what a text process has memory for
BYTES_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


class Tokenizer:
    """Immutable once made; threads may share it."""

    def __init__(
        self,
        backend: Backend,
        templates: Mapping[str, ChatTemplate],
        digest: str,
        eos_token_ids: tuple[int, ...] = (),
        default_sampling: SamplingDefaults | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = templates.get("default")
        self._tools_template = templates.get("tool_use", self._template)
        self.digest = digest  # SHA-256 of everything that decides which ids a text becomes, hexadecimal
        self.eos_token_ids = eos_token_ids
        self.default_sampling = default_sampling or SamplingDefaults()
        tokens = read_tokens(backend)
        self.vocab_size = len(tokens)
        self.pieces: Pieces = read_pieces(backend, tokens)
        self._special = _special_pattern(backend)
        added = backend.get_added_tokens_decoder()
        self.added = {token.content: index for index, token in added.items()}
        self._special_texts = {index: token.content for index, token in added.items() if token.special}
        self.special = frozenset(self._special_texts)
        self.template_source = "".join(template.source for template in templates.values())
        self._longest = longest_token(backend, self.pieces)  # bytes
        self._plain = is_plain(backend)

    @classmethod
    def load(cls, folder: str | Path, only_plain: bool = False, template: Path | None = None) -> Self:
        """With `only_plain`, a chat template that is not plain is not compiled. The file `template` replaces the
        folder's own. Raises InvalidModel."""
        files = ModelFiles(Path(folder), template)
        vocabulary = files.read(VOCABULARY, NO_VOCABULARY)
        try:
            backend = Backend.from_buffer(vocabulary)
        except Exception as error:  # the library has no narrower type
            files.refuse(VOCABULARY, f"is no tokenizer ({one_line(error)})", NO_VOCABULARY)
        config = files.object(CONFIG)
        named = apply_special(files, backend, config)
        sources, templates = _read_templates(files, config, named, only_plain)
        generation = files.object("generation_config.json")
        eos = read_eos(files, generation)
        own_eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        if own_eos is not None and own_eos not in eos:
            eos = (*eos, own_eos)
        added = {index: str(token) for index, token in sorted(backend.get_added_tokens_decoder().items())}
        texts = (sources.get("default", ""), json.dumps([named, added], sort_keys=True), *_others(sources))
        digest = _digest(vocabulary, *(text.encode() for text in texts))
        sampling = read_sampling(files, generation)
        try:
            return cls(backend, templates, digest, eos, sampling)
        except ValueError as error:
            files.refuse(VOCABULARY, str(error))

    @classmethod
    def of_bytes(cls) -> Self:
        """One id per byte, for an engine without a model."""
        backend = Backend(models.BPE(vocab=byte_letters(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        templates = {"default": ChatTemplate(BYTES_TEMPLATE, {})}
        return cls(backend, templates, _digest(b"bytes", BYTES_TEMPLATE.encode()))

    @cached_property
    def all_pieces(self) -> Pieces:
        """Includes special tokens, unlike `pieces`."""
        return with_special(self.pieces, self._backend, self._special_texts)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.all_pieces)

    @property
    def chat(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        return self._encode(text, True)

    def encode_chat(
        self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS, most: int | None = None
    ) -> list[int]:
        """Special tokens that the caller spells out stay text; only the template's own count. Raises ChatTemplateError,
        also where there are plainly more than `most` ids."""
        template = self._tools_template if options.tools else self._template
        if template is None:
            raise ChatTemplateError("the model has no chat template; send text or token ids")
        if options.tools and not template.takes_tools:
            raise ChatTemplateError("tools: the model's chat template has no place for them, so it would not see any")
        variables = template_variables(messages, options, template.takes_lists)
        if options.tools or options.arguments or not all(message.simple for message in messages):
            texts = list(texts_in(variables))
        else:
            texts = [text for message in messages for text in (message.role, message.content)]
        mark = self._mark(texts)
        if mark is not None:
            variables = with_texts(variables, self._breaking(mark))
        rendered = template.render(variables, options.continue_final_message)
        least = self.least_tokens(rendered)
        if most is not None and mark is None and least > most:
            raise ChatTemplateError(too_long(least, most + 1))
        if mark is None:
            return self._encode(rendered, False)
        parts = rendered.replace(_escaped(mark), mark).split(mark)
        return [token_id for part in parts for token_id in self._encode(part, False)]

    def here(self, text: str) -> bool:
        """Whether `encode` may be called on the event loop."""
        return self._plain and len(text) <= SHORT

    def chat_here(self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS) -> bool:
        if options.tools or not all(message.simple for message in messages):
            return False  # a template may loop over these
        if self._template is None:
            return True
        if options.arguments and not only_flags(options.arguments):
            return False
        plain = self._plain and self._template.plain
        return plain and sum(len(one.role) + len(one.content) + MESSAGE for one in messages) <= SHORT

    def decode_here(self, ids: Sequence[int]) -> bool:
        return not isinstance(self.pieces, OpaquePieces) and len(ids) <= SHORT

    def least_tokens(self, text: str) -> int:
        """A lower bound, without copies; 0 where the tokenizer allows none."""
        if not self._longest:
            return 0
        size = len(text)
        if not text.isascii() and size <= MOST_TEXT:
            size = len(text.encode())
        return -(-size // self._longest)

    def decode(self, ids: Sequence[int]) -> str:
        """Leaves out special tokens and ids beyond the vocabulary. Ids are not negative."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= SHORT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Without offsets: a third less time and memory. A batch is the only way to say so.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _mark(self, texts: Sequence[str]) -> str | None:
        """Returns a text that none of the texts contains, if one of them spells out a special token."""
        special = self._special
        if special is None or not any(special.search(text) for text in texts):
            return None
        number = 0
        while any(f"\ufdd0{number}\ufdd1" in text or f"\\ufdd0{number}" in text for text in texts):
            number += 1
        return f"\ufdd0{number}\ufdd1"

    def _breaking(self, mark: str) -> Callable[[str], str]:
        special = self._special
        return lambda text: text if special is None else special.sub(lambda match: match[0] + mark, text)


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _others(sources: dict[str, str]) -> list[str]:
    return [text for name, text in sorted(sources.items()) if name != "default"]


def _read_templates(
    files: ModelFiles, config: dict[str, Any], special: dict[str, str], only_plain: bool
) -> tuple[dict[str, str], dict[str, ChatTemplate]]:
    name = CONFIG
    try:
        written = {"default": TEMPLATE, "tool_use": TOOLS_TEMPLATE}
        found = {key: files.text_or_none(path) for key, path in written.items()}
        sources = {key: text for key, text in found.items() if text is not None}
        if not sources:
            written = {}
            sources = {key: text for key, text in choose_templates(config.get("chat_template")).items() if key in found}
        templates = {}
        for key, text in sources.items():
            name = written.get(key, CONFIG)
            templates[key] = ChatTemplate(text, special, only_plain)
        return sources, templates
    except ValueError as error:
        files.refuse(name, f"the chat template is broken ({one_line(error)})", "correct it or delete it")


def _special_pattern(backend: Backend) -> re.Pattern[str] | None:
    """Matches the first character of any special token that has more than one."""
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    breakable = [re.escape(content) for content in special if len(content) > 1]
    return re.compile(f"(?=(?:{'|'.join(breakable)})).", re.DOTALL) if breakable else None
