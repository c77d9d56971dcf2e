"""Prints answers on stdout: piece by piece as they arrive, or as one JSON object."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

from google.protobuf.duration_pb2 import Duration

from service.pb.whippet.v1 import generation_pb2 as pb

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# What a terminal would obey. Text for other readers is left as it is.
_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


class PrintedAnswer:
    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.finish: pb.Finish | None = None
        self._calls: dict[int, pb.ToolCall] = {}

    def take(self, message: pb.GenerateStreamResponse) -> None:
        self.reasoning += message.reasoning
        self.text += message.text
        if message.HasField("finish"):
            self.finish = message.finish
        for delta in message.tool_calls:
            call = self._calls.setdefault(delta.index, pb.ToolCall(id=delta.id, name=delta.name))
            call.arguments += delta.arguments

    def object(self) -> dict[str, Any]:
        finish = self.finish or pb.Finish()
        stop = finish.WhichOneof("matched_stop")
        usage, timings = finish.usage, finish.timings
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": [
                {"id": call.id, "name": call.name, "arguments": call.arguments}
                for _, call in sorted(self._calls.items())
            ],
            "finish": {
                "reason": pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
                "stop": getattr(finish, stop) if stop else None,
            },
            "usage": {field.name: getattr(usage, field.name) for field in usage.DESCRIPTOR.fields},
            "timings": {field.name: _seconds(getattr(timings, field.name)) for field in timings.DESCRIPTOR.fields},
            "cache_source": pb.CacheSource.Name(finish.cache_source).removeprefix("CACHE_SOURCE_").lower(),
            "sampling": {
                field.name: _short(getattr(finish.sampling, field.name))
                for field in finish.sampling.DESCRIPTOR.fields
                if field.name != "logit_bias"
            },
        }


class TerminalOutput:
    """`live`: piece by piece; of several answers the first incomplete one, and the others behind it. Reasoning is
    printed on a terminal alone."""

    def __init__(self, live: bool, answers: int = 1) -> None:
        self._live = live
        self._terminal = live and sys.stdout.isatty()
        self._dims = self._terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
        self._last = "\n"  # character on the terminal
        self._thinking = False
        self._wanted = answers
        self._answers = [PrintedAnswer()]  # that have begun, or come before one that has
        self._showing = -1  # which of them
        self._info = pb.PromptInfo()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")

    @property
    def text(self) -> str:
        return self._answers[0].text

    @property
    def reasoning(self) -> str:
        return self._answers[0].reasoning

    @property
    def cut_short(self) -> bool:
        finishes = [answer.finish for answer in self._answers if answer.finish is not None]
        return any(finish.reason == pb.FINISH_REASON_LENGTH for finish in finishes)

    def take(self, message: pb.GenerateStreamResponse) -> None:
        if message.HasField("prompt_info"):
            self._info = message.prompt_info
        self._wanted = max(self._wanted, message.index + 1)
        if self._showing < 0:
            self._show_next()
        self._answer(message.index).take(message)
        if message.index != self._showing:
            return
        self._show(message.reasoning, message.text)
        while self._answer(self._showing).finish is not None and self._showing + 1 < self._wanted:
            self._show_next()

    def _answer(self, index: int) -> PrintedAnswer:
        while len(self._answers) <= index:
            self._answers.append(PrintedAnswer())
        return self._answers[index]

    def close(self) -> None:
        self._think(False)
        if not self._live:
            sys.stdout.write(json.dumps(self._object(), ensure_ascii=False))
        sys.stdout.write("\n")
        sys.stdout.flush()

    def end_line(self) -> None:
        self._think(False)
        if self._last != "\n":
            self._write("\n")

    def _show_next(self) -> None:
        """Several are separated by their numbers on a terminal, by an empty line elsewhere."""
        self._showing += 1
        if self._live and self._wanted > 1:
            self.end_line()
            if self._showing:
                self._write("\n")
            if self._terminal:
                self._write(f"{self._showing + 1} of {self._wanted}:\n")
        answer = self._answer(self._showing)
        self._show(answer.reasoning, answer.text)

    def _show(self, reasoning: str, text: str) -> None:
        if self._terminal and reasoning:
            self._think(True)
            self._write(reasoning)
        if self._live and text:
            self._think(False)
            self._write(text)

    def _think(self, begins: bool) -> None:
        if begins == self._thinking:
            return
        self._thinking = begins
        if self._dims:
            sys.stdout.write(_DIM if begins else _PLAIN)
        if not begins:
            self._write("\n" if self._last == "\n" else "\n\n")

    def _write(self, text: str) -> None:
        printable = text.translate(_HARMLESS) if self._terminal else text
        sys.stdout.write(printable)
        sys.stdout.flush()
        self._last = printable[-1]

    def _object(self) -> dict[str, Any]:
        first, *more = (answer.object() for answer in self._answers)
        found = {"request_id": self._info.request_id, "model": self._info.model, **first}
        return {**found, "more_answers": more} if more else found


def _short(value: float) -> float:
    """Formats a 32-bit float as it was written: 0.7, not 0.699999988079071."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
