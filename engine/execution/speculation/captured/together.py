"""When rounds are the way to go on for several sequences: where what is looked up brings each of them as much as plain
steps do, and all together more. Torch-free.

While they go on in plain steps, the host looks up what a round would have guessed and sees what comes: so it knows what
rounds would bring, and nobody is made to try them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.execution.speculation.captured.depths import fits_rounds
from engine.execution.speculation.captured.rounds import RoundTold
from engine.execution.speculation.lookup import PromptLookup
from engine.execution.speculation.proposer import Draft, Wish
from engine.scheduling.sequence_state import SequenceState

_MEMORY = 0.9  # of what a round brought, after the next
_NONE = 2.0  # rounds that brought one token each, as which a new sequence counts
_MARGIN = 1.1  # how much faster all must be by the table to begin: the plain steps under way are lost
_OTHERS = 1.05  # how much slower one may be for the others' sake
_TO_GO = 32  # tokens that each must have before it
_FIRST_REST, _LAST_REST = 128, 512  # tokens in plain steps, once rounds did not pay
_LONGEST_PAUSE = 31  # tokens between two looks at a text that repeats nothing: a look takes the host some microseconds


@dataclass(slots=True)
class Record:
    """What rounds bring a sequence, or would."""

    sequence: SequenceState
    tokens: float = _NONE
    rounds: float = _NONE
    fits: bool = False  # rounds can choose its tokens
    guess: Draft = ()  # what would have been drafted
    guessed_at: int = 0  # length of the sequence then; 0: nothing was
    pause: int = 0  # tokens after a guess that was wrong
    looks_at: int = 0  # length of the sequence at the next look
    rest: int = _FIRST_REST
    resumes_at: int = 0  # length of the sequence before which it is in no rounds

    @property
    def brings(self) -> float:
        """Tokens a round."""
        return self.tokens / self.rounds

    def add(self, tokens: int) -> None:
        """A round brought so many."""
        self.tokens = self.tokens * _MEMORY + tokens
        self.rounds = self.rounds * _MEMORY + 1

    def compare(self) -> None:
        """Takes in what the guess would have brought, once that is known."""
        came = self.sequence.token_ids[self.guessed_at : self.guessed_at + len(self.guess)]
        pairs = enumerate(zip(came, self.guess, strict=False))
        right = next((at for at, (token, guessed) in pairs if token != guessed), len(came))
        if right < len(came) or right == len(self.guess):
            self.add(1 + right)
            self.pause = 0 if right else min(2 * self.pause + 1, _LONGEST_PAUSE)
            self.looks_at = len(self.sequence.token_ids) + self.pause
            self.guessed_at = 0


class Together:
    """A `claiming.Chooser` for a few sequences, whose rounds all are of one group."""

    def __init__(self, group: int, seconds: float, plain: Callable[[int], float], lookup: PromptLookup) -> None:
        """`seconds` of a round, and of a plain step of so many rows."""
        self._group = group
        self._seconds = seconds
        self._plain = plain
        self._lookup = lookup
        self._records: dict[int, Record] = {}  # by slot

    def group(self, sequences: Items[SequenceState], *, continues: bool) -> int:
        """See `claiming.Chooser`."""
        if self._group * self._plain(len(sequences)) < self._seconds * _MARGIN:
            return 0  # not even if all were right
        records = [self._record(one) for one in sequences]
        if not all(record.fits for record in records):
            return 0
        if continues:
            if self._pays(records, 1.0):
                return self._group
            for record in records:
                self._rest(record)
            return 0
        for record in records:
            self._watch(record)
        ready = all(self._ready(record) for record in records)
        return self._group if ready and self._pays(records, _MARGIN) else 0

    def most(self, sequence: SequenceState) -> int:
        """What it asks for, within the group."""
        most = self._group - 1
        return most if sequence.draft_limit is None else min(sequence.draft_limit, most)

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """Of rounds without a draft, too."""
        record = self._record(sequence)
        record.add(1 + one.accepted)
        record.guessed_at = 0

    def _pays(self, records: Items[Record], margin: float) -> bool:
        """Whether rounds bring all of them so many times what plain steps do, and each of them about as much."""
        plain, brings = self._plain(len(records)), [record.brings for record in records]
        faster = sum(brings) * plain > margin * len(records) * self._seconds
        return faster and min(brings) * plain * _OTHERS > self._seconds

    def _ready(self, record: Record) -> bool:
        sequence = record.sequence
        to_go = sequence.stopping.max_tokens - sequence.output_length
        return to_go >= _TO_GO and len(sequence.token_ids) >= record.resumes_at

    def _rest(self, record: Record) -> None:
        record.resumes_at = len(record.sequence.token_ids) + record.rest
        record.rest = min(2 * record.rest, _LAST_REST)

    def _watch(self, record: Record) -> None:
        """In plain steps: what a draft would have brought, and the next one."""
        sequence = record.sequence
        length = len(sequence.token_ids)
        if record.guessed_at and length > record.guessed_at:
            record.compare()
        if not record.guessed_at and length >= record.looks_at:
            most = self.most(sequence)
            record.guess = self._lookup.propose((Wish(sequence, most),))[0] if most else ()
            record.guessed_at = length

    def _record(self, sequence: SequenceState) -> Record:
        record = self._records.get(sequence.slot)
        if record is None or record.sequence is not sequence:
            record = self._records[sequence.slot] = Record(sequence)
        record.fits = record.fits or fits_rounds(sequence)  # for good: what is counted before `min_tokens` only ends
        return record
