"""One call of the engine: prefill passes, decode steps, and what is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.generation.decode_graphs import DecodeGraphs, Slots
from chronicals.generation.drawing import Choices, draw
from chronicals.generation.exact import ExactPass
from chronicals.generation.expert_notes import ExpertNotes
from chronicals.generation.pages import SCRATCH_PAGE, LayerPages, PagePool
from chronicals.generation.passes import (
    ChunkKeys,
    DecodePass,
    Latents,
    Pass,
    PrefillPass,
    run_pass,
)
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import Chunk, EngineSettings, Prompt, Sample, Schedule
from chronicals.generation.sharing import PromptSharing
from chronicals.kernels.host_memory import received, sent
from chronicals.kernels.token_draws import Drawn
from chronicals.models import Head, input_device, read_head
from chronicals.patching import residual_dtypes

LOGIT_ROWS = 512
"""Rows of logits that exist at once: 150 MB in 16 bits with a vocabulary of 150,000.

Each such chunk reads the head's weights again: with 64 rows, 512 answers of a 0.5B took 16 % longer.
"""

SAME_COST_ROWS = 64
"""Rows up to which a decode step takes about as long as that of one row: it reads the weights."""


class NotFinite(ValueError):
    """The logits of a request are not finite."""


class Look:
    """Tokens that some steps of answers have drawn, on their way to the host.

    Args:
        samples: the answers.
        drawn: what each step drew; rows behind those of the answers are padding.

    Attributes:
        samples: the answers, each of which has as many ``unread`` tokens as there are steps.
        last_tokens: int64 ``[N]``, the tokens of the last step, on the device.
    """

    def __init__(self, samples: Sequence[Sample], drawn: Sequence[Drawn]):
        self.samples = samples
        self.last_tokens = drawn[-1].tokens
        columns = [torch.stack(steps, 1) for steps in zip(*drawn)]
        self._columns = [received(column) for column in columns]
        self._has_arrived = None
        if self.last_tokens.is_cuda:
            self._has_arrived = torch.cuda.Event()
            self._has_arrived.record()
        for one in samples:
            one.unread += len(drawn)

    @property
    def rows(self) -> dict[Sample, int]:
        """The row of each answer."""
        return {one: row for row, one in enumerate(self.samples)}

    def values(self) -> list[list[list[Any]]]:
        """Return the fields of ``Drawn``, each by answer and step; the host waits until they are there."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        return [column.tolist() for column in self._columns]


class Call:
    """One call of the engine.

    Args:
        model: a causal language model within ``attending_pages``.
        settings: sizes.
        layers: pages of each attention module.
        pool: the pages that may be used.
        samples: the answers to generate, the oldest first.
        latents: latents of the passes.
        sharing: what it takes to read a prompt once for several answers.
        graphs: replay decode steps; None where every step runs eagerly.

    Attributes:
        schedule: what runs, and what waits.
        computed_tokens: tokens that prefill passes computed.
    """

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        layers: dict[nn.Module, LayerPages],
        pool: PagePool,
        samples: Sequence[Sample],
        latents: Latents,
        sharing: PromptSharing,
        graphs: DecodeGraphs | None = None,
    ):
        self.model = model
        self.settings = settings
        self.computed_tokens = 0
        self.schedule = Schedule(samples, pool, settings)
        self._layers = layers
        self._pool = pool
        self._latents = latents
        self._sharing = sharing
        self._graphs = graphs
        self._samples = samples
        self._device = input_device(self.model)
        self._head: Head = read_head(self.model)
        self._residuals = residual_dtypes(self.model)
        self._unread: Look | None = None
        requests = [one.prompt.request for one in samples]
        penalties = {request.sampling.repetition_penalty for request in requests}
        # the host reads a look while the next one is computed; eager steps wait for the host
        # anyway, and a penalty needs all tokens of a text
        self._reads_behind = graphs is not None and penalties <= {None, 1.0}
        self._longest = max(len(one.prompt.request.prompt) + one.prompt.limit for one in samples)
        self._notes = ExpertNotes.of(model, samples, self._longest, self._device)

    @property
    def is_unfinished(self) -> bool:
        """True while an answer has not ended."""
        return bool(self.schedule.waiting or self.schedule.running)

    @property
    def have_begun(self) -> bool:
        """True if every answer has a token."""
        return all(one.answer.tokens for one in self._samples)

    def stop(self, reason: Any) -> None:
        """End all answers now."""
        for one in (*self.schedule.waiting, *self.schedule.running):
            one.answer.ended = reason

    def run(self, each: Callable[[int, int, list[int]], None] | None, end: float | None) -> None:
        """Take steps until all answers have ended, or until a time of ``time.monotonic``."""
        while self.is_unfinished:
            if end is not None and time.monotonic() >= end:
                look, self._unread = self._unread, None
                if look is not None:
                    self._read(look, each)
                if self.have_begun:
                    self.stop("time")
                    break
            self.step(each)
        if self._notes is not None:
            self._notes.deliver()

    def step(self, each: Callable[[int, int, list[int]], None] | None) -> None:
        """Queue first tokens, or a prefill pass, or decode steps; read what was drawn.

        Where the host reads one look behind, it does so while the device computes the next one.
        """
        schedule = self.schedule
        schedule.admit()
        self._copy_pages()
        began = schedule.beginning()
        chunks = [] if began else schedule.chunks()
        if chunks:
            self._prefill(chunks)
        if began:
            look = self._first_tokens(began)
        elif chunks:  # all that have room begin together, and share each reading of the weights
            look = None
        else:
            look = self._decode()
        if self._reads_behind:
            look, self._unread = self._unread, look
        if look is not None:
            self._read(look, each)
        elif not chunks and self._unread is None:
            schedule.evict_youngest()

    def _copy_pages(self) -> None:
        """Copy shared pages to which an answer will write."""
        copies = self.schedule.copies
        if not copies:
            return
        self._pool.send()
        sources, targets = (
            self._pool.in_layers(torch.tensor(pages, device=self._device))
            for pages in zip(*((copy.source, copy.target) for copy in copies))
        )
        for layer in self._layers.values():
            layer.copy(sources[layer.window], targets[layer.window])
        copies.clear()

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Run a pack of chunks; keep the hidden state of each prompt's last token."""
        as_tensor = self._as_tensor
        ids = list[int]()
        positions = list[int]()
        places = list[int]()
        bounds = [0]
        for chunk in chunks:
            ids += chunk.of.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            places += self._places(chunk.of.pages, chunk.start, chunk.end)
            bounds.append(len(ids))
        self._pool.send()
        written = self._in_layers(as_tensor(places))
        over: Pass
        if self.settings.generation_exact:
            each = self._exact_tables(chunks)
            over = ExactPass(self._layers, self._latents, written, *each)
        else:
            over = PrefillPass(
                self._layers,
                self._latents,
                written,
                torch.tensor(bounds, dtype=torch.int32, device=self._device),
                max(chunk.end - chunk.start for chunk in chunks),
                self._chunk_keys(chunks) if any(chunk.start for chunk in chunks) else None,
            )
        states = self._states(as_tensor(ids), as_tensor(positions), over)
        self.computed_tokens += len(ids)
        for chunk, last in zip(chunks, bounds[1:]):
            self.schedule.advance(chunk.of, chunk.end)
            if isinstance(chunk.of, Prompt) and chunk.end == chunk.of.wanted:
                chunk.of.state = states[last - 1].clone()

    def _chunk_keys(self, chunks: Sequence[Chunk]) -> dict[int | None, ChunkKeys]:
        """Return the keys that chunks see in the layers of each window, and in those without."""
        found = dict[int | None, ChunkKeys]()
        for window in (None, *self._pool.windows):
            places = list[int]()
            counts = list[int]()
            for chunk in chunks:
                first = 0 if window is None else window.first_seen(chunk.start)
                places += self._places(chunk.of.pages, first, chunk.end)
                counts.append(chunk.end - first)
            size = None if window is None else window.window
            at = self._in_layers(self._as_tensor(places))[size]
            ends = [0, *accumulate(counts)]
            cu = torch.tensor(ends, dtype=torch.int32, device=self._device)
            found[size] = ChunkKeys(at, cu, max(counts))
        return found

    def _exact_tables(self, chunks: Sequence[Chunk]) -> tuple[dict[int | None, Tensor], Tensor]:
        """Return block tables ``[T, L]`` and numbers of keys of each token of chunks."""
        width = _power_of_two(max(len(chunk.of.pages) for chunk in chunks))
        table = list[list[int]]()
        lengths = list[int]()
        for chunk in chunks:
            pages = chunk.of.pages
            table += [pages + [SCRATCH_PAGE] * (width - len(pages))] * (chunk.end - chunk.start)
            lengths += range(chunk.start + 1, chunk.end + 1)
        return self._pool.in_layers(self._as_tensor(table)), self._as_tensor(lengths)

    def _first_tokens(self, began: Sequence[Sample]) -> Look:
        """Draw the first token of answers from the last hidden states of their prompts."""
        states = [one.prompt.state for one in began]
        slots = self._slots(began)
        drawn = self._draw(torch.stack(states), slots, slots.positions)  # type: ignore[arg-type]
        return Look(began, [drawn])

    def _decode(self) -> Look | None:
        """Take steps with all answers that can, as many as none of them ends within."""
        schedule = self.schedule
        most = self.settings.steps(as_graphs=self._graphs is not None)
        steps = min([most, *(one.left for one in schedule.decoding())])
        schedule.make_room(steps)
        decoding = schedule.decoding()
        if not decoding:
            return None
        slots = self._slots(decoding, self._bucket(len(decoding)))
        self._pool.send()
        if self._graphs is None:
            drawn = [self.decode_step(slots) for _ in range(steps)]
        else:
            drawn = self._graphs.take(slots, steps, self.decode_step)
        for one in decoding:
            schedule.advance(one, one.computed + steps)
        return Look(decoding, drawn)

    def decode_step(self, slots: Slots) -> Drawn:
        """Compute the next token of each answer; writes it into ``slots``.

        Reads and writes tensors of static shapes only, and the host waits for nothing.
        """
        size = self.settings.page_size
        page = slots.pages.gather(1, (slots.positions // size)[:, None])[:, 0]
        places = self._in_layers(page * size + slots.positions % size)
        tables = self._pool.in_layers(slots.pages)
        lengths = slots.positions + 1
        over: Pass
        if self.settings.generation_exact:
            over = ExactPass(self._layers, self._latents, places, tables, lengths)
        else:
            backend = self.settings.attention_backend
            paged = self._layers, self._latents, places
            over = DecodePass(
                *paged,
                tables,
                lengths,
                slots.shared,
                backend,
                residuals=self._residuals,
            )
        with nullcontext() if self._notes is None else self._notes.taken(slots):
            states = self._states(slots.ids, slots.positions, over)
        drawn = self._draw(states, slots, slots.positions + 1)
        slots.ids.copy_(drawn.tokens)
        slots.positions.add_(1)
        if slots.seen is not None:
            slots.seen.scatter_(1, drawn.tokens[:, None], True)
        return drawn

    def _draw(self, states: Tensor, slots: Slots, positions: Tensor) -> Drawn:
        """Draw from the logits of hidden states ``[N, D]``, some rows at a time."""
        parts = list[Drawn]()
        for start in range(0, len(states), LOGIT_ROWS):
            end = min(start + LOGIT_ROWS, len(states))
            logits = self._head.narrow_logits(states[start:end])
            seen = None if slots.seen is None else slots.seen[start:end]
            parts.append(draw(logits, slots.choices.rows(start, end), positions[start:end], seen))
        return parts[0] if len(parts) == 1 else Drawn(*map(torch.cat, zip(*parts)))

    def _slots(self, samples: Sequence[Sample], count: int | None = None) -> Slots:
        """Return the tensors of these answers, and of padding up to ``count``.

        Positions are those of the last tokens, or behind the prompt if there is none yet.
        """
        padding = (count or len(samples)) - len(samples)
        ids = [(one.answer.tokens or [0])[-1] for one in samples] + [0] * padding
        positions = [one.wanted for one in samples] + [0] * padding
        width = self._width(max(len(one.pages) for one in samples))
        table = [one.pages + [SCRATCH_PAGE] * (width - len(one.pages)) for one in samples]
        table += [[SCRATCH_PAGE] * width] * padding
        sampling = [one.prompt.request.sampling for one in samples]
        keys = [one.key for one in samples]
        choices = Choices.of(
            [*sampling, *[Sampling()] * padding], [*keys, *[0] * padding], self._device
        )
        seen = self._seen(samples, len(ids)) if choices.penalises else None
        last = self._as_tensor(ids)
        if self._unread is not None:
            rows = self._unread.rows
            sources = [rows[one] if one.unread else -1 for one in samples] + [-1] * padding
            at = self._as_tensor(sources)
            last = torch.where(at < 0, last, self._unread.last_tokens[at.clamp(min=0)])
        shared = self._sharing.shared_pages(
            samples, len(ids), self.settings.page_size, self._device
        )
        as_tensor = self._as_tensor
        noted = None
        if self._notes is not None:
            noted = as_tensor(self._notes.rows([*samples, *[None] * padding]))
        return Slots(last, as_tensor(positions), as_tensor(table), choices, seen, shared, noted)

    def _seen(self, samples: Sequence[Sample], rows: int) -> Tensor:
        """Return which tokens of the vocabulary each text has, bool ``[N, V]``."""
        size = self._head.table.shape[0]
        seen = torch.zeros(rows, size, dtype=torch.bool, device=self._device)
        for row, one in enumerate(samples):
            seen[row, self._as_tensor(one.ids)] = True
        return seen

    def _read(self, look: Look, each: Callable[[int, int, list[int]], None] | None) -> None:
        """Add the tokens of a look to their answers, up to the end of each; the host waits here."""
        columns = look.values()
        for row, one in enumerate(look.samples):
            answer = one.answer
            if answer.ended:  # at the look before, when this one was under way
                continue
            tokens, chosen, full, entropies, finite = (column[row] for column in columns)
            one.unread -= len(tokens)
            before = len(answer.tokens)
            count = self._append(one, tokens)
            if not all(finite[:count]):
                raise NotFinite(
                    f"{one.prompt.request}, token {before + finite.index(False) + 1}: the model's "
                    "predictions are not finite; its weights are damaged or overflow: take an "
                    "earlier checkpoint, or download it again"
                )
            answer.log_probabilities += chosen[:count]
            answer.full_log_probabilities += full[:count]
            answer.entropies += entropies[:count]
            if each is not None:
                each(one.prompt.order, one.number, one.answer.tokens)

    def _append(self, one: Sample, tokens: Sequence[int]) -> int:
        """Add tokens to an answer up to its end, and return how many were added."""
        for count, token in enumerate(tokens, 1):
            one.answer.tokens.append(token)
            if self._has_ended(one):
                self.schedule.finish(one)
                return count
        return len(tokens)

    def _has_ended(self, one: Sample) -> bool:
        """Return whether an answer's last token ends it; notes why."""
        request = one.prompt.request
        answer = one.answer
        if request.ending.is_reached(answer.tokens):
            answer.ended = "stop"
        elif len(answer.tokens) == one.prompt.limit:
            asked = one.prompt.limit == request.max_new_tokens
            answer.ended = "length" if asked else "positions"
        return bool(answer.ended)

    def _states(self, ids: Tensor, positions: Tensor, over: Pass) -> Tensor:
        return run_pass(self.model, ids, positions, over)

    def _places(self, pages: Sequence[int], start: int, end: int) -> list[int]:
        """Return where tokens ``start`` to ``end`` of a sequence are in its pages."""
        size = self.settings.page_size
        return [pages[n // size] * size + n % size for n in range(start, end)]

    def _in_layers(self, places: Tensor) -> dict[int | None, Tensor]:
        """Return where places in pages are in the layers of each window, and in those without."""
        return self._pool.tokens_in_layers(places, self.settings.page_size)

    def _bucket(self, count: int) -> int:
        """Return the number of slots of a step for ``count`` answers.

        A power of two; as graphs, of up to ``SAME_COST_ROWS`` every second one.
        """
        slots = _power_of_two(count)
        pads = self._graphs is not None and self._graphs.has_free_padding
        if pads and slots <= SAME_COST_ROWS:
            slots = _power_of_four_below(SAME_COST_ROWS, slots)
        return min(slots, max(self.settings.slots, count))

    def _width(self, pages: int) -> int:
        """Return the width of the block table for so many pages of the longest answer.

        A power of two; as graphs, the one that the longest of all answers needs at its end, or a
        fourth of it, and so on: each width takes a graph of its own.
        """
        if self._graphs is None:
            return _power_of_two(pages)
        most = _power_of_two(max(self.schedule.pages_of(self._longest), pages))
        return _power_of_four_below(most, pages)

    def _as_tensor(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return sent(values, torch.int64, self._device)


def _power_of_four_below(most: int, count: int) -> int:
    """Return the least of ``most``, ``most`` / 4, ``most`` / 16 and so on that is not below ``count``."""
    while most // 4 >= count:
        most //= 4
    return most


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (count - 1).bit_length()
