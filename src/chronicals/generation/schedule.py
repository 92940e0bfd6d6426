"""Schedule of the engine: sequences that have pages, and what is computed next.

A request's prompt is computed and stored once; its answers share the pages, and each copies the
last one if it is not full. Answers run in the order of the requests. When pages run out the
youngest one gives its own back and waits; later its tokens are computed again in a prefill pass,
and it goes on where it was. Random numbers depend on positions only, so nothing else changes.

In layers with a sliding window a page has a place from the pass that computes it on, until no later
token sees it; where these run out, the youngest gives its own back, too.

The oldest answer never gives its pages to another, so each answer ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from chronicals.generation.pages import PagePool
from chronicals.generation.requests import Answer, Request

STEPS_OF_GRAPHS = 8
"""Decode steps between two looks of the host, where a step is one launch of a graph.

A step of a 0.5B with 64 answers takes an H200 some 1.5 ms, and the host's work on what they drew
about as long as one.
"""


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of the engine, on which results do not depend, and how it computes.

    Attributes:
        cache_memory: most bytes of keys and values; None for a quarter of the free memory. No more
            are taken than the requests can use at once.
        page_size: tokens of a page.
        slots: most answers that run at once. An H200 multiplies some 160 rows in the time in which it
            reads a weight in 16 bits, and a small model's steps take as long as their launches; with
            512 a 0.5B makes four times the tokens/s that it makes with 64, an 8B twice.
        chunk_tokens: most tokens of a prefill pass. A 0.5B computes 64 prompts of 256 tokens in half the
            time that passes of 2,048 take, which are launches for the most part.
        steps_a_look: steps between two looks of the host at what was drawn; tokens behind an
            answer's end are dropped. By default 1, and ``STEPS_OF_GRAPHS`` where they are graphs.
        use_cuda_graphs: replay decode steps on a card.
        generation_exact: give the same bits as ``packed_log_probabilities``; in 16 bits on a card,
            in fp32 on the CPU.
        attention_backend: attention of decode steps, one of ``PAGED_BACKENDS``; by default the
            fastest that was measured. With ``generation_exact`` its own attends.
    """

    cache_memory: int | None = None
    page_size: int = 16
    slots: int = 512
    chunk_tokens: int = 8192
    steps_a_look: int | None = None
    use_cuda_graphs: bool = True
    generation_exact: bool = False
    attention_backend: str | None = None

    def steps(self, as_graphs: bool) -> int:
        """Return the most steps between two looks of the host, eager ones or graphs."""
        return self.steps_a_look or (STEPS_OF_GRAPHS if as_graphs else 1)


@dataclass(eq=False)
class Prompt:
    """The prompt of a request.

    Attributes:
        request: the request.
        order: its place among the requests.
        limit: most new tokens of an answer.
        pages: its pages; empty if it is not stored.
        computed: number of its tokens whose keys and values are in the pages.
        state: hidden state ``[D]`` of its last token, from which each answer's first token is
            drawn; None until it is computed.
        unfinished: number of its answers that have not ended.
        running: number of its answers that have pages.
    """

    request: Request
    order: int
    limit: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    state: Tensor | None = None
    unfinished: int = 0
    running: int = 0

    @property
    def ids(self) -> Sequence[int]:
        """Tokens to compute."""
        return self.request.prompt

    @property
    def wanted(self) -> int:
        """Number of tokens whose keys and values must be in pages."""
        return len(self.request.prompt)

    @property
    def age(self) -> tuple[int, int]:
        """Place in the order of sequences; older ones are smaller."""
        return self.order, -1


@dataclass(eq=False)
class Sample:
    """An answer that is being generated, or waits for pages.

    Attributes:
        prompt: its prompt.
        number: its number within the request.
        key: key of its random numbers.
        answer: what is generated so far.
        pages: pages of the prompt's and its own tokens; empty while it waits.
        computed: number of tokens, the prompt's included, whose keys and values are in the pages.
        unread: number of tokens that are drawn and that the host has yet to read.
    """

    prompt: Prompt
    number: int
    key: int
    answer: Answer = field(default_factory=Answer)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    unread: int = 0

    @property
    def ids(self) -> Sequence[int]:
        """Tokens of the prompt and of the answer."""
        return [*self.prompt.request.prompt, *self.answer.tokens]

    @property
    def drawn(self) -> int:
        """Number of tokens of the answer, with those that the host has yet to read."""
        return len(self.answer.tokens) + self.unread

    @property
    def wanted(self) -> int:
        """Number of tokens whose keys and values must be in pages before the next step.

        The last token's are made in that step.
        """
        return len(self.prompt.request.prompt) + max(self.drawn - 1, 0)

    @property
    def left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.prompt.limit - self.drawn

    @property
    def age(self) -> tuple[int, int]:
        """Place in the order of sequences; older ones are smaller."""
        return self.prompt.order, self.number


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a sequence, which are computed in one prefill pass."""

    of: Prompt | Sample
    start: int
    end: int


@dataclass(frozen=True)
class Copy:
    """A page that is copied to another before the next pass."""

    source: int
    target: int


class Schedule:
    """The sequences of a call of the engine.

    Args:
        answers: all answers, the oldest first.
        pool: the pages.
        settings: sizes.

    Attributes:
        waiting, running: answers without and with pages, the oldest first.
        copies: pages to copy before the next pass.
        evictions: number of answers that gave their pages back and had to be computed again.
    """

    def __init__(self, answers: Sequence[Sample], pool: PagePool, settings: EngineSettings):
        self.waiting = [*answers]
        self.running = list[Sample]()
        self.copies = list[Copy]()
        self.evictions = 0
        self._prompts = list(dict.fromkeys(one.prompt for one in answers))
        self._pool = pool
        self._page_size = settings.page_size
        self._slots = settings.slots
        self._chunk_tokens = settings.chunk_tokens
        for one in answers:
            one.prompt.unfinished += 1

    def pages_of(self, tokens: int) -> int:
        """Return how many pages ``tokens`` tokens take."""
        return -(-tokens // self._page_size)

    def admit(self) -> None:
        """Give pages to waiting prompts and answers in order, as long as there is room."""
        slots = self._slots - len(self.running)
        for one in [*self.waiting][: max(slots, 0)]:
            prompt = one.prompt
            if not prompt.pages:
                count = self.pages_of(prompt.wanted)
                chunk = min(prompt.wanted, self._chunk_tokens)
                if not self._has_room(count, self.pages_of(chunk)):
                    return
                prompt.pages = self._pool.take(count)
            if prompt.computed == prompt.wanted and not self._begin(one):
                return

    def _has_room(self, count: int, placed: int) -> bool:
        """Return whether pages are left for the running answers' next tokens, too.

        Without these, what is given pages now would soon have to give them back.

        Args:
            count: pages that are taken.
            placed: how many of them need a place in layers with a window.
        """
        running = len(self.running)
        has_places = all(window.has_room(placed + running) for window in self._pool.windows)
        return has_places and len(self._pool.free) >= count + running

    def _begin(self, one: Sample) -> bool:
        """Let an answer run on its prompt's pages, if there is room for its own tokens."""
        prompt = one.prompt
        whole, partly = divmod(prompt.wanted, self._page_size)
        alone = prompt.unfinished == 1
        own = self.pages_of(one.wanted) - whole
        if alone:
            own -= bool(partly)
        copied = bool(partly) and not alone
        if not self._has_room(own, int(copied)):
            return False
        fresh = self._pool.take(own)
        if alone:  # nobody else will need the prompt's pages, so none is copied
            one.pages = [*prompt.pages, *fresh]
            for window in self._pool.windows:
                window.hand_over(prompt, one)
            prompt.pages = []
            prompt.computed = 0
        else:
            one.pages = [*self._pool.share(prompt.pages[:whole]), *fresh]
            for window in self._pool.windows:
                window.share(prompt, one, whole)
                window.extend(one, prompt.wanted)
        if copied:
            self.copies.append(Copy(prompt.pages[whole], fresh[0]))
        one.computed = prompt.wanted
        prompt.running += 1
        self.waiting.remove(one)
        self.running.append(one)
        return True

    def chunks(self) -> list[Chunk]:
        """Return what the next prefill pass computes, the oldest sequences first."""
        found = list[Chunk]()
        room = self._chunk_tokens
        stored: list[Prompt | Sample] = [one for one in self._prompts if one.pages]
        for one in sorted([*stored, *self.running], key=lambda one: one.age):
            end = self._placed(one, min(one.wanted, one.computed + room))
            if end > one.computed:
                found.append(Chunk(one, one.computed, end))
                room -= end - one.computed
        return found

    def _placed(self, one: Prompt | Sample, end: int) -> int:
        """Give places to a sequence's tokens up to ``end``, or to fewer; returns up to which.

        The youngest loses its own where there is none at all; that may be the sequence itself.
        """
        windows = self._pool.windows
        while one.pages:
            reached = min([end, *(window.reach(one) for window in windows)])
            if reached > one.computed or reached == end:
                for window in windows:
                    window.extend(one, reached)
                return reached
            self.evict_youngest()
        return 0

    def advance(self, one: Prompt | Sample, computed: int) -> None:
        """Note that a sequence's first ``computed`` tokens are in pages now.

        Those that are behind a window from here on give their places back.
        """
        one.computed = computed
        for window in self._pool.windows:
            window.leave(one)

    def beginning(self) -> list[Sample]:
        """Return answers that run and have no token yet."""
        return [one for one in self.running if not one.drawn]

    def decoding(self) -> list[Sample]:
        """Return answers that can take a step: all their tokens but the last are in pages."""
        return [
            one for one in self.running if one.drawn and one.left and one.computed == one.wanted
        ]

    def make_room(self, steps: int) -> None:
        """Give pages for ``steps`` further tokens to all that decode; the youngest may lose theirs."""
        for one in sorted(self.decoding(), key=lambda one: one.age):
            end = one.computed + steps
            while one.pages:
                missing = self.pages_of(end) - len(one.pages)
                has_places = all(window.reach(one) >= end for window in self._pool.windows)
                if has_places and missing <= len(self._pool.free):
                    one.pages += self._pool.take(max(missing, 0))
                    for window in self._pool.windows:
                        window.extend(one, end)
                    break
                self.evict_youngest()

    def evict_youngest(self) -> None:
        """Take the pages of the youngest answer, or of a younger prompt that no answer runs on."""
        unused = [one for one in self._prompts if one.pages and not one.running]
        holders: list[Prompt | Sample] = [*unused, *self.running]
        youngest = max(holders, key=lambda one: one.age)
        if isinstance(youngest, Sample):
            self.running.remove(youngest)
            self.waiting.append(youngest)
            self.waiting.sort(key=lambda one: one.age)
            youngest.prompt.running -= 1
            self.evictions += 1
        self._forget(youngest)

    def finish(self, one: Sample) -> None:
        """Take the pages of an answer that has ended, and its prompt's after the last one.

        It may wait: its last tokens were read after its pages had gone to another.
        """
        if one in self.waiting:
            self.waiting.remove(one)
        else:
            self.running.remove(one)
            one.prompt.running -= 1
        self._forget(one)
        one.prompt.unfinished -= 1
        if not one.prompt.unfinished:
            self._forget(one.prompt)

    def _forget(self, one: Prompt | Sample) -> None:
        for window in self._pool.windows:
            window.forget(one)
        self._pool.release(one.pages)
        one.computed = 0
        if isinstance(one, Prompt):
            one.state = None
