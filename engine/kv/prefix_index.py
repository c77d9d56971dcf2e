"""Indexes full pages by a chain of hashes, so that other sequences can reuse their keys and values. Owns that index,
the users of its pages, and the order of eviction.

A page's hash is SHA-256 over its parent's hash and its sixteen token ids; the chain's root binds all that shapes keys
and values, and their tenant. Equal hashes are therefore equal tokens from the first on, under one model and one tenant.
Only full pages are shared, and none of them is ever written to.

A user of a page uses all before it in its chain. Unused pages stand in one list, the longest unused first, and of one
chain the deepest first: the first of the list is always a leaf.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from hashlib import sha256

from cache.api import BlockLayout
from engine.api import ModelInfo
from engine.kv.page_pool import PagePool
from engine.scheduling.sequence import CLOSED, PrefixPage, Sequence
from engine.settings import PAGE_SIZE

_PAGE = struct.Struct(f"<{PAGE_SIZE}I")
_SCHEMA = b"whippet prefix 1"


def kv_identity(info: ModelInfo, layout: BlockLayout) -> bytes:
    return repr((info.weights_digest, info.weight_format, info.dtype, layout)).encode()


def chain_root(identity: bytes, partition: bytes) -> bytes:
    """The parent of first pages."""
    return sha256(b"".join(struct.pack("<Q", len(part)) + part for part in (_SCHEMA, identity, partition))).digest()


def page_hash(parent: bytes, token_ids: Items[int]) -> bytes:
    """Hashes sixteen tokens behind `parent`. struct.error where one is no token id."""
    return sha256(parent + _PAGE.pack(*token_ids)).digest()


class PrefixIndex:
    def __init__(self, pool: PagePool, identity: bytes = b"", enabled: bool = True) -> None:
        self._pool = pool
        self._identity = identity
        self._enabled = enabled
        self._term = 0  # of enabled time; chains of an earlier one grow no more
        self._known: dict[bytes, PrefixPage] = {}
        self._idle: OrderedDict[PrefixPage, None] = OrderedDict()  # without users, first to go first

    @property
    def room(self) -> int:
        return self._pool.free + len(self._idle)

    @property
    def used(self) -> int:
        return self._pool.used - len(self._idle)

    @property
    def kept(self) -> int:
        """Unused pages, kept until their room is needed."""
        return len(self._idle)

    def set_enabled(self, enabled: bool) -> None:
        """Off: nothing is found or kept any more, and kept pages are dropped."""
        self._enabled = enabled
        if not enabled:
            self._term += 1
            self._forget(tuple(self._known.values()))

    # Pages

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Evicts unused pages where free ones do not suffice."""
        if count > self.room:
            return None
        lacking = count - self._pool.free
        if lacking > 0:
            gone = [self._idle.popitem(last=False)[0] for _ in range(lacking)]
            for page in gone:
                del self._known[page.hash]
                page.indexed = False
            self._pool.release([page.number for page in gone])
        return self._pool.allocate(count, after)

    def reclaimable(self, sequences: Items[Sequence], besides: Items[PrefixPage]) -> int:
        """The pages by which `room` would grow if these gave all of theirs back, except those in `besides`."""
        if not sequences:
            return 0
        own = 0
        uses: Counter[PrefixPage] = Counter()
        for sequence in sequences:
            shared = sequence.prefix.pages
            own += len(sequence.pages) - sum(map(_same, sequence.pages, shared))
            uses.update(shared)
        for page in besides:
            uses.pop(page, None)
        return own + sum(count == page.users for page, count in uses.items())

    def idle(self, pages: Items[PrefixPage]) -> int:
        """How many have no user, and count as room until they get one."""
        return sum(not page.users for page in pages)

    # Prefixes

    def find(self, sequence: Sequence) -> list[PrefixPage]:
        """The longest known chain with which a sequence without pages may begin. Leaves out its last token, which must
        be computed."""
        return self._known_from(sequence, 0)

    def begin(self, sequence: Sequence, found: Items[PrefixPage]) -> None:
        """Other pages are to be allocated afterwards."""
        sequence.prefix.term = self._term
        if found:
            self._use(sequence, found)

    def catch_up(self, sequence: Sequence) -> None:
        """Replaces empty pages of the sequence by equal ones that other sequences have computed since."""
        if not self._open(sequence) or sequence.computed != len(sequence.prefix.pages) * PAGE_SIZE:
            return
        found = self._known_from(sequence, len(sequence.prefix.pages))
        if not found:
            return
        first = len(sequence.prefix.pages)
        sequence.planned_pages = min(sequence.planned_pages, first)
        rest = sequence.pages[first:]
        del sequence.pages[first:]
        self._use(sequence, found)
        sequence.pages += rest[len(found) :]
        self._pool.release(rest[: len(found)])

    def next_page(self, sequence: Sequence) -> bytes | None:
        """The page that it computes next, if others may begin with that."""
        place = sequence.computed // PAGE_SIZE
        shared = place < (len(sequence.token_ids) - 1) // PAGE_SIZE and self._open(sequence)
        return sequence.prefix.hashes[place] if shared and self._hash(sequence, place + 1) else None

    def note(self, sequence: Sequence) -> None:
        """Where an equal page is indexed already, the sequence uses that one as well, so that its successors do not
        outlive it."""
        prefix = sequence.prefix
        full = sequence.computed // PAGE_SIZE
        if len(prefix.pages) >= full or not self._open(sequence) or not self._hash(sequence, full):
            return
        for place in range(len(prefix.pages), full):
            digest = prefix.hashes[place]
            page = self._known.get(digest)
            if page is None:
                page = self._known[digest] = PrefixPage(digest, sequence.pages[place], users=1)
                self._pool.retain([page.number])
                prefix.made.append(page)
            else:
                self._take(page)
            prefix.pages.append(page)

    def release(self, sequence: Sequence, sound: bool = True) -> None:
        """Not `sound`: what it computed must not be used."""
        pages = sequence.prefix.pages
        if not sound:
            self._forget(sequence.prefix.made)
        self._pool.release(sequence.pages)
        self._drop(pages)
        sequence.pages = []
        sequence.prefix.pages = []
        sequence.prefix.made = []

    def let_go(self, sequence: Sequence) -> bool:
        """Releases shared pages that equal the sequence's own, computed at the same time. Its chain no longer grows.
        False where there are none."""
        prefix = sequence.prefix
        pairs = zip(sequence.pages, prefix.pages, strict=False)
        first = next((place for place, (number, page) in enumerate(pairs) if number != page.number), None)
        if first is None:
            return False
        tail = prefix.pages[first:]
        # One in the index that this sequence goes on holding would be no room when it is unused.
        self._forget([page for page in prefix.made if page in tail])
        prefix.made = [page for page in prefix.made if page.indexed]
        prefix.pages = prefix.pages[:first]
        prefix.term = CLOSED
        self._drop(tail)
        return True

    def chain(self, sequence: Sequence) -> list[bytes]:
        """Hashes of all full pages with which a sequence may begin, if it may share any."""
        count = (len(sequence.token_ids) - 1) // PAGE_SIZE
        if not self._reads(sequence) or not self._hash(sequence, count):
            return []
        return sequence.prefix.hashes[:count]

    def root(self, sequence: Sequence) -> bytes:
        if not sequence.prefix.root:
            sequence.prefix.root = chain_root(self._identity, sequence.request.prefix_root)
        return sequence.prefix.root

    def known(self, digest: bytes) -> PrefixPage | None:
        return self._known.get(digest)

    def adopt(self, chain: Items[bytes], fill: Callable[[list[int], list[int]], None]) -> int:
        """Adds the unknown pages of a chain, filled by `fill(places in the chain, pages)`, as far as there is room
        beside it; returns their number."""
        missing = [place for place, digest in enumerate(chain) if digest not in self._known]
        if not self._enabled or not missing:
            return 0
        here = [page for digest in chain if (page := self._known.get(digest)) is not None]
        self._touch(here)
        missing = missing[: max(0, self.room - self.idle(here))]
        numbers = self.allocate(len(missing)) or []
        if not numbers:
            return 0
        try:
            fill(missing, numbers)
        except BaseException:
            self._pool.release(numbers)
            raise
        for place, number in zip(missing, numbers, strict=True):
            page = self._known[chain[place]] = PrefixPage(chain[place], number, users=0)
            self._idle[page] = None
        self._touch([page for digest in chain if (page := self._known.get(digest)) is not None])
        return len(numbers)

    def _open(self, sequence: Sequence) -> bool:
        return self._enabled and not sequence.request.bypass_prefix and sequence.prefix.term == self._term

    def _reads(self, sequence: Sequence) -> bool:
        """Returns whether the sequence may reuse pages of others. A scored prompt must compute every position."""
        request = sequence.request
        return self._enabled and not request.bypass_prefix and request.prompt_logprobs is None

    def _known_from(self, sequence: Sequence, first: int) -> list[PrefixPage]:
        if not self._reads(sequence):
            return []
        found: list[PrefixPage] = []
        for place in range(first, (len(sequence.token_ids) - 1) // PAGE_SIZE):
            if not self._hash(sequence, place + 1):
                break
            page = self._known.get(sequence.prefix.hashes[place])
            if page is None:
                break
            found.append(page)
        return found

    def _hash(self, sequence: Sequence, count: int) -> bool:
        hashes, ids = sequence.prefix.hashes, sequence.token_ids
        if len(hashes) >= count:
            return True
        parent = hashes[-1] if hashes else self.root(sequence)
        try:
            for place in range(len(hashes), count):
                parent = page_hash(parent, ids[place * PAGE_SIZE : (place + 1) * PAGE_SIZE])
                hashes.append(parent)
        except struct.error:  # no token id of any model; whoever computes it says so
            return False
        return True

    def _use(self, sequence: Sequence, found: Items[PrefixPage]) -> None:
        for page in found:
            self._take(page)
        numbers = [page.number for page in found]
        self._pool.retain(numbers)
        sequence.pages += numbers
        sequence.prefix.pages += found
        sequence.skip_to(len(sequence.prefix.pages) * PAGE_SIZE)

    def _take(self, page: PrefixPage) -> None:
        if not page.users:
            del self._idle[page]
        page.users += 1

    def _drop(self, pages: Items[PrefixPage]) -> None:
        """Removes a user from each, the deepest first."""
        for page in reversed(pages):
            page.users -= 1
            if page.users:
                continue
            if page.indexed:
                self._idle[page] = None
            else:
                self._pool.release([page.number])

    def _touch(self, pages: Items[PrefixPage]) -> None:
        for page in reversed(pages):
            if not page.users:
                self._idle.move_to_end(page)

    def _forget(self, pages: Collection[PrefixPage]) -> None:
        """Pages without users are free at once."""
        gone = [page for page in pages if page.indexed]
        for page in gone:
            del self._known[page.hash]
            page.indexed = False
        unused = [page for page in gone if not page.users]
        for page in unused:
            del self._idle[page]
        self._pool.release([page.number for page in unused])


def _same(number: int, page: PrefixPage) -> bool:
    return number == page.number
