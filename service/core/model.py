"""The served model as the front sees it: name, tokenizer, and the engine's facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.api import Engine, EngineState, ModelInfo, SamplingParams
from service.core.constraints import ConstraintReader
from service.core.errors import InvalidRequest, Violation
from service.core.parsing.answer import AnswerParser
from service.core.parsing.formats import NO_FORMATS, AnswerFormats, prompt_tail
from service.core.request import ChatPrompt, ModelFacts, Origin, Prompt, Request, TextPrompt, TokenPrompt
from service.core.text import ChatTemplateError, Detokenizer, SamplingDefaults, Tokenizer, TokenTexts
from service.core.text.conversation import sent_texts
from service.core.text.sandbox.jobs import EncodeChat, EncodeText, JobRefused, pack, pack_ids, unpack_ids
from service.core.text.sandbox.processes import TextProcesses
from service.core.text.tokenizer import MOST_TEXT
from service.core.validation import too_long

GREEDY_BELOW = 1e-5  # temperatures under it would overflow the logits; they are greedy in all but name


@dataclass(frozen=True, slots=True)
class ModelDescription:
    facts: ModelFacts
    info: ModelInfo
    tokenizer_digest: str


class ServedModel:
    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        engine: Engine,
        processes: TextProcesses,
        formats: AnswerFormats = NO_FORMATS,
    ) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._engine = engine
        self._processes = processes
        self._formats = formats
        self.constraints = ConstraintReader(processes)
        self._known: tuple[ModelInfo, ModelFacts] | None = None

    @property
    def chat(self) -> bool:
        return self._tokenizer.chat

    def facts(self) -> ModelFacts:
        """Raises EngineUnavailable unless requests are accepted."""
        state, info = self._engine.state, self._engine.info
        if state is not EngineState.READY or info is None:
            raise self._engine.unavailable()
        if self._known is None or self._known[0] is not info:
            self._known = (info, self._facts(info))
        return self._known[1]

    async def encode(self, prompt: Prompt, facts: ModelFacts, origin: Origin) -> tuple[int, ...]:
        """Raises InvalidRequest where the template refuses the prompt or it is too long; and as TextProcesses.run."""
        if isinstance(prompt, TokenPrompt):
            return prompt.ids
        if isinstance(prompt, TextPrompt):
            least = self._tokenizer.least_tokens(prompt.text)
            if least >= facts.max_context:
                raise InvalidRequest((Violation(prompt.field, too_long(least, facts.max_context)),))
        return tuple(await self.tokenize(prompt, origin, facts.max_context - 1))

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, origin: Origin, most: int | None = None) -> Sequence[int]:
        """Raises InvalidRequest for more than `most` ids or MOST_TEXT, or where the template refuses; and as
        TextProcesses.run."""
        try:
            if isinstance(prompt, TextPrompt):
                _check_size(prompt, (prompt.text,))
                if self._tokenizer.here(prompt.text):
                    return self._tokenizer.encode(prompt.text)
                return await self._ids("encode", pack(EncodeText(prompt.text, most)), origin)
            _check_size(prompt, sent_texts(prompt.messages, prompt.options))
            if self._tokenizer.chat_here(prompt.messages, prompt.options):
                return self._tokenizer.encode_chat(prompt.messages, prompt.options)
            return await self._ids("encode_chat", pack(EncodeChat(prompt.messages, prompt.options, most)), origin)
        except (ChatTemplateError, JobRefused) as error:
            raise InvalidRequest((Violation(prompt.field, str(error)),)) from None

    async def detokenize(self, ids: list[int], origin: Origin) -> str:
        """Leaves special tokens out. Raises InvalidRequest, and as TextProcesses.run."""
        if self._tokenizer.decode_here(ids):
            return self._tokenizer.decode(ids)
        try:
            return (await self._processes.run("decode", pack_ids(ids), origin.deadline, origin.tenant)).decode()
        except JobRefused as error:
            raise InvalidRequest((Violation("token_ids", str(error)),)) from None

    async def _ids(self, kind: str, payload: bytes, origin: Origin) -> Sequence[int]:
        return unpack_ids(await self._processes.run(kind, payload, origin.deadline, origin.tenant))

    def detokenizer(self, request: Request) -> Detokenizer | None:
        return self.text_maker(request) if request.output.text or request.stops.strings else None

    def text_maker(self, request: Request) -> Detokenizer:
        stops = request.stops
        return Detokenizer(
            self._tokenizer,
            stops.strings,
            stops.include,
            stops.min_tokens,
            request.prompt.continues,
            request.output.skip_special,
        )

    @property
    def token_texts(self) -> TokenTexts:
        return self._tokenizer.token_texts

    def answer_parser(self, request: Request, ids: Sequence[int]) -> AnswerParser | None:
        """None where the model makes neither reasoning nor calls, or the reader wants them in the text."""
        prompt, formats = request.prompt, self._formats
        if not isinstance(prompt, ChatPrompt) or not _parses(request):
            return None
        tail = "" if formats.reasoning is None else prompt_tail(formats, self._tokenizer, ids)
        return formats.parser(bool(prompt.options.tools), prompt.continues, tail)

    def marks(self, request: Request) -> Mapping[int, str]:
        """Texts that stand for tokens without text."""
        marked = isinstance(request.prompt, ChatPrompt) and _parses(request) and request.output.skip_special
        return self._formats.marks if marked else {}

    def describe(self) -> ModelDescription:
        facts, info = self.facts(), self._engine.info
        if info is None:
            raise self._engine.unavailable()
        return ModelDescription(facts, info, self._tokenizer.digest)

    def _facts(self, info: ModelInfo) -> ModelFacts:
        return ModelFacts(
            name=self.name,
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            chat=self._tokenizer.chat,
            # those that the folder lists were checked; one of the tokenizer alone may be beyond what the model can say
            eos_token_ids=tuple(i for i in self._tokenizer.eos_token_ids if i < info.vocab_size),
            defaults=resolve_defaults(self._tokenizer.default_sampling),
            most_tokens=self._tokenizer.default_sampling.max_new_tokens,
        )


def _parses(request: Request) -> bool:
    return request.output.text and request.output.parse


def _check_size(prompt: TextPrompt | ChatPrompt, texts: Iterable[str]) -> None:
    size = 0
    for text in texts:
        size += len(text) if text.isascii() or len(text) > MOST_TEXT else len(text.encode())
        if size > MOST_TEXT:
            raise InvalidRequest((Violation(prompt.field, f"is larger than {MOST_TEXT} bytes"),))


def resolve_defaults(given: SamplingDefaults) -> SamplingParams:
    """As in Hugging Face's generate(), a model that does not ask to be sampled (`do_sample` false, or neither that nor
    `temperature` named) is greedy, and what it does not name is off."""
    if given.do_sample is False:
        temperature = 0.0
    elif given.temperature is not None:
        temperature = given.temperature
    else:
        temperature = 1.0 if given.do_sample else 0.0
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if given.top_k is None else given.top_k,
        top_p=1.0 if given.top_p is None else given.top_p,
        min_p=0.0 if given.min_p is None else given.min_p,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=0,
    )
