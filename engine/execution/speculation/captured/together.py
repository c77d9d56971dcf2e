"""When rounds are the way to go on for several sequences: where drafts bring each of them as much as plain steps do,
and all together more. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.execution.speculation.captured.depths import SOON, TRYING, fits_rounds
from engine.execution.speculation.captured.outlook import Outlook
from engine.execution.speculation.captured.rounds import RoundTold
from engine.scheduling.sequence_state import SequenceState

_MEMORY = 0.9  # of what a round brought, after the next
_PRIOR = 2.0  # rounds, as which what is taken for granted counts
_MARGIN = 1.1  # how much faster all must be by the table to begin: the plain steps under way are lost
_OTHERS = 1.05  # how much slower one may be for the others' sake
_TO_GO = 32  # tokens that each must have before it
_FIRST_REST, _LAST_REST = 128, 512  # tokens in plain steps, once rounds did not pay
_WATCHED_REST = 32  # the first, where the host sees by itself what rounds would bring


@dataclass(slots=True)
class Record:
    """What rounds bring a sequence, or would."""

    sequence: SequenceState
    tokens: float
    rest: int  # tokens, the next time
    rounds: float = _PRIOR
    lost: float = 0.0  # seconds in rounds against plain steps since it was furthest ahead of them
    fits: bool = False  # rounds can choose its tokens
    resumes_at: int = 0  # length of the sequence before which it is in no rounds

    @property
    def brings(self) -> float:
        """Tokens a round."""
        return self.tokens / self.rounds

    def add(self, tokens: int) -> None:
        """A round brought so many."""
        self.tokens = self.tokens * _MEMORY + tokens
        self.rounds = self.rounds * _MEMORY + 1


class Together:
    """A `claiming.Chooser` for a few sequences, whose rounds all are of one group."""

    def __init__(
        self, group: int, seconds: float, plain: Callable[[int], float], outlook: Outlook, turn: float = 0.0
    ) -> None:
        """`seconds` of a round, and of a plain step of so many rows. `turn`: seconds for which sequences stand still
        when they come from plain steps, or go back."""
        self._group = group
        self._seconds = seconds
        self._plain = plain
        self._outlook = outlook
        self._turn = turn
        self._records: dict[int, Record] = {}  # by slot
        self._step = 0.0  # seconds of a plain step of those that were asked about last

    def group(self, sequences: Items[SequenceState], *, continues: bool) -> int:
        """See `claiming.Chooser`."""
        self._step = self._plain(len(sequences))
        if not self._may_pay():
            return 0
        records = [self._record(one) for one in sequences]
        if not all(record.fits for record in records):
            return 0
        if continues:
            if self._pays(records, 1.0) or self._holds(records):
                return self._group
            self._rest(records)
            return 0
        for record in records:
            self._watch(record)
        if not all(self._ready(record) for record in records):
            return 0
        if self._pays(records, _MARGIN) and self._won_back(records):
            for record in records:
                record.lost = 0.0
            return self._group
        if self._outlook.tried:
            self._rest(records)
        return 0

    def most(self, sequence: SequenceState) -> int:
        """What it asks for, within the group."""
        most = self._group - 1
        return most if sequence.draft_limit is None else min(sequence.draft_limit, most)

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """Of rounds without a draft, too."""
        record = self._record(sequence)
        record.add(1 + one.accepted)
        record.lost = max(0.0, record.lost + self._seconds - (1 + one.accepted) * self._step)
        self._outlook.told(sequence, one)

    def _may_pay(self) -> bool:
        """Whether rounds bring more than plain steps at least where every draft is right."""
        return self._group * self._step >= self._seconds * _MARGIN

    def _pays(self, records: Items[Record], margin: float) -> bool:
        """Whether rounds bring all of them so many times what plain steps do, and each of them about as much."""
        plain, brings = self._step, [record.brings for record in records]
        faster = sum(brings) * plain > margin * len(records) * self._seconds
        return faster and min(brings) * plain * _OTHERS > self._seconds

    def _won_back(self, records: Items[Record]) -> bool:
        """Whether what it takes until a first round is soon made up for, or little beside what has been done."""
        brings = sum(record.brings for record in records) / len(records)
        plain, tokens = self._step, min(record.sequence.output_length for record in records)
        return self._switching(records) <= max(SOON * (plain - self._seconds / brings), TRYING * plain * tokens)

    def _holds(self, records: Items[Record]) -> bool:
        """Whether each has lost less than it would by going back and coming again."""
        return max(record.lost for record in records) < self._switching(records)

    def _switching(self, records: Items[Record]) -> float:
        """Seconds that it takes to come over, and to go back."""
        return self._outlook.behind([record.sequence for record in records]) + 2 * self._turn

    def _ready(self, record: Record) -> bool:
        sequence = record.sequence
        to_go = sequence.stopping.max_tokens - sequence.output_length
        return to_go >= _TO_GO and len(sequence.token_ids) >= record.resumes_at

    def _rest(self, records: Items[Record]) -> None:
        """None of them is in rounds for a while."""
        for record in records:
            sequence = record.sequence
            record.resumes_at = len(sequence.token_ids) + record.rest
            record.rest = min(2 * record.rest, _LAST_REST)
            if self._outlook.tried:
                record.tokens, record.rounds = self._outlook.hope(sequence, self.most(sequence)) * _PRIOR, _PRIOR

    def _watch(self, record: Record) -> None:
        """In plain steps: takes in what a draft would have brought."""
        found = self._outlook.seen(record.sequence, self.most(record.sequence))
        if found is not None:
            record.add(found)

    def _record(self, sequence: SequenceState) -> Record:
        record = self._records.get(sequence.slot)
        if record is None or record.sequence is not sequence:
            tokens = self._outlook.first(sequence, self.most(sequence)) * _PRIOR
            rest = _FIRST_REST if self._outlook.tried else _WATCHED_REST
            record = self._records[sequence.slot] = Record(sequence, tokens, rest)
        record.fits = record.fits or fits_rounds(sequence)  # for good: what is counted before `min_tokens` only ends
        return record
