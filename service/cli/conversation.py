"""Runs a conversation on a terminal, `whippet generate` without a prompt, until ctrl-D. Messages are kept in memory
alone, typed lines included."""

from __future__ import annotations

import contextlib
import re
import select
import sys

import grpc

from service.cli.asking import Asker
from service.cli.channel import INTERRUPTED, ServerAddress, complain, explain
from service.cli.output import TerminalOutput
from service.pb.whippet.v1 import generation_pb2 as pb

_PROMPT, _MORE = "> ", ". "
_COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?", re.DOTALL)
_WELCOME = "A conversation: ctrl-C stops an answer, ctrl-D ends, /help lists commands."
_HELP = """\
/system TEXT  a system message for what follows; without TEXT none
/reset        forget the messages; the system message stays
/exit         end, as ctrl-D
ctrl-C        stop an answer, of which the model remembers what came; without one, end
Lines that are pasted together are one message. A message may begin with / after a space."""


class ConversationTurns:
    def __init__(self, system: str | None) -> None:
        self.system = system
        self._messages: list[pb.ChatMessage] = []

    def asked(self, question: str) -> pb.Chat:
        """The question is kept once it has an answer."""
        system = [] if self.system is None else [pb.ChatMessage(role="system", content=self.system)]
        return pb.Chat(messages=[*system, *self._messages, _user(question)])

    def answered(self, question: str, text: str, reasoning: str) -> None:
        answer = pb.ChatMessage(role="assistant", content=text)
        if reasoning:
            answer.reasoning = reasoning
        self._messages += [_user(question), answer]

    def forget(self) -> None:
        self._messages.clear()


def _user(text: str) -> pb.ChatMessage:
    return pb.ChatMessage(role="user", content=text)


class Conversation:
    """`request` holds everything but the messages."""

    def __init__(
        self,
        channel: grpc.Channel,
        server: ServerAddress,
        request: pb.GenerateStreamRequest,
        turns: ConversationTurns,
        timeout: float | None,
    ) -> None:
        self._asker = Asker(channel, server, timeout)
        self._address = server.address
        self._request = request
        self._turns = turns

    def run(self) -> int:
        _edit_lines()
        sys.stderr.write(f"{_WELCOME}\n")
        while True:
            try:
                line = _read()
                if line is None or not self._obey_or_ask(line):
                    return 0
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                return INTERRUPTED
            except ValueError:  # UnicodeError: of input(), or of a message that is to be sent
                complain("that is not UTF-8 text", 0)

    def _obey_or_ask(self, line: str) -> bool:
        """False where the conversation should end."""
        command = _COMMAND.fullmatch(line.rstrip())
        if command is None:
            if line.strip():
                self._ask(line)
            return True
        name, text = command[1], command[2]
        if name == "exit":
            return False
        if name == "reset":
            self._turns.forget()
        elif name == "system":
            self._turns.system = text
        elif name == "help":
            sys.stdout.write(f"{_HELP}\n")
        else:
            complain(f"there is no /{name}: /help lists what there is", 0)
        return True

    def _ask(self, question: str) -> None:
        request = pb.GenerateStreamRequest()
        request.CopyFrom(self._request)
        request.chat.MergeFrom(self._turns.asked(question))
        out = TerminalOutput(live=True)
        ended = self._asker.ask(request, out)
        if ended.error is not None and not ended.interrupted:
            complain(explain(ended.error, self._address), 0)
            return
        if out.text:  # templates want turns to alternate, so a question without an answer is none
            self._turns.answered(question, out.text, out.reasoning)


def _edit_lines() -> None:
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def _read() -> str | None:
    """None at the end of input. Input that is already waiting belongs to the message, so that half a paste is never
    sent."""
    lines: list[str] = []
    try:
        lines.append(input(_PROMPT))
        while select.select([sys.stdin], [], [], 0)[0]:
            lines.append(input(_MORE))
    except EOFError:
        sys.stdout.write("\n")
    return "\n".join(lines) if lines else None
