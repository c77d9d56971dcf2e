"""Implements Tokenize and Detokenize. They pass admission like any request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from service.core.admission.admission import Admission
from service.core.model import ServedModel
from service.core.request import ChatPrompt, Origin, TextPrompt


class Tokenization:
    def __init__(self, model: ServedModel, admission: Admission) -> None:
        self._model = model
        self._admission = admission

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, origin: Origin) -> Sequence[int]:
        with self._admission.admit(origin.tenant, None, origin.deadline):
            origin.record.admitted_at = time.monotonic()
            ids = await self._model.tokenize(prompt, origin)
            origin.record.prompt_tokens = len(ids)
            return ids

    async def detokenize(self, ids: list[int], origin: Origin) -> str:
        with self._admission.admit(origin.tenant, None, origin.deadline):
            origin.record.admitted_at = time.monotonic()
            return await self._model.detokenize(ids, origin)
