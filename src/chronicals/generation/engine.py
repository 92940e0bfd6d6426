"""The engine: requests in, tokens and their log-probabilities out, by the model's own modules.

Prompts are computed in packs of chunks, then all running answers take steps together, a token each.
What has ended makes room at once. The model may be in training: no copy of it is made, and after a
call it is as before.

    with room for all           every prompt once, every answer a token a step
    with less                   the youngest answers wait, and go on where they were
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.generation.drawing import Choices, Drawn, draw, stream_keys
from chronicals.generation.pages import SCRATCH_PAGE, LayerPages, LayerSizes, PagePool
from chronicals.generation.passes import (
    PROBED_TOKENS,
    DecodePass,
    Latents,
    Pass,
    PrefillPass,
    Probe,
    attending_pages,
    run_pass,
)
from chronicals.generation.requests import Answer, Request, new_tokens_within
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import Chunk, Prompt, Sample, Schedule
from chronicals.kernels.host_memory import available_memory
from chronicals.models import (
    Head,
    UnknownHead,
    in_evaluation,
    input_device,
    prove_packability,
    read_head,
    why_neighbours_matter,
    within_adapters,
)
from chronicals.models.presentation import AS_FORWARD

logger = logging.getLogger(__name__)

LOGIT_ROWS = 64
"""Rows of logits that exist at once: 40 MB of fp32 with a vocabulary of 150,000."""

FREE_SHARE = 0.25
"""Part of the free memory that pages take at most if ``cache_memory`` is not set."""


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of the engine; results do not depend on them.

    Attributes:
        cache_memory: bytes of keys and values; None for as much as the requests can use at once, at
            most a quarter of the free memory.
        page_size: tokens of a page.
        slots: most answers that run at once.
        chunk_tokens: most tokens of a prefill pass.
        steps_a_look: steps between two looks of the host at what was drawn; tokens behind an
            answer's end are dropped.
    """

    cache_memory: int | None = None
    page_size: int = 16
    slots: int = 64
    chunk_tokens: int = 2048
    steps_a_look: int = 1


class TooLarge(ValueError):
    """A request does not fit the cache even alone."""


class NotFinite(ValueError):
    """The logits of a request are not finite."""


def why_not_served(model: Any, longest: int) -> str:
    """Explain why the engine cannot generate with a model; empty if it can.

    The properties are those of training on packs: attention takes any keys, and a token's hidden
    state does not depend on its neighbours in the row.

    Args:
        model: a causal language model, with or without PEFT's wrapper.
        longest: tokens of the longest sequence.
    """
    model = within_adapters(model)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder"
    if hasattr(model, AS_FORWARD):
        return "its weights are gathered for each forward pass"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "its layers lie on several devices"
    proof = prove_packability(model)
    reason = proof.reason
    if not reason and proof.one_by_one:
        reason = "its attention chooses among the keys of a whole row"
    if not reason and not proof.sees_prompts:
        reason = "its attention does not take keys from elsewhere"
    if not reason:
        reason = _why_not_read(model)
    return reason or why_neighbours_matter(model.config, longest)


def _why_not_read(model: Any) -> str:
    """Explain why this instance's attention cannot be replaced or its head read; empty if both can."""
    try:
        with attending_pages(model):
            read_head(model)
    except (RuntimeError, UnknownHead) as error:
        return str(error)
    return "" if prove_packability(model).head_proved else "its head could not be proved"


@dataclass(frozen=True)
class Layout:
    """What the pages of a model hold, and where.

    Attributes:
        sizes: by attention module.
        device: device of all layers.
    """

    sizes: dict[nn.Module, LayerSizes]
    device: torch.device


class Engine:
    """Generate with a model that ``why_not_served`` does not refuse.

    Args:
        model: a causal language model, with or without PEFT's wrapper.
        settings: sizes.

    Attributes:
        evictions: answers of the last call that were computed again because pages ran out.
        computed_tokens: tokens whose keys and values the last call computed in prefill passes.
    """

    def __init__(self, model: Any, settings: EngineSettings | None = None):
        self.model = within_adapters(model)
        self.settings = settings or EngineSettings()
        self.evictions = 0
        self.computed_tokens = 0
        self._layers: dict[nn.Module, LayerPages] = {}
        self._layout: Layout | None = None
        self._made = 0
        self._pages = 0

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        each: Callable[[int, int, list[int]], None] | None = None,
        seconds: float | None = None,
    ) -> list[list[Answer]]:
        """Return the answers of each request, in the order of the requests.

        Args:
            requests: prompts, settings and numbers of answers.
            each: called with the index of a request, the number of an answer and its tokens so far,
                after each look at what was drawn.
            seconds: time limit, after which no further token is begun; every answer gets one.

        Raises:
            TooLarge: a request does not fit the cache even alone.
            NotFinite: logits are not finite; the message names the request and the token.
            ValueError: a prompt has as many tokens as the model has positions.
        """
        end = None if seconds is None else time.monotonic() + seconds
        samples = self._samples(requests)
        with in_evaluation(self.model), attending_pages(self.model) as latents:
            self._lay_out(samples, latents)
            call = Call(self, samples, latents)
            while call.is_unfinished:
                if end is not None and time.monotonic() >= end and call.have_begun:
                    call.stop("time")
                    break
                call.step(each)
        self.evictions = call.schedule.evictions
        self.computed_tokens = call.computed_tokens
        answers: list[list[Answer]] = [[] for _ in requests]
        for one in samples:
            answers[one.prompt.order].append(one.answer)
        return answers

    def release(self) -> None:
        """Give the memory of the pages back; the next call makes them again."""
        self._layers.clear()
        self._layout = None
        self._made = 0

    def _samples(self, requests: Sequence[Request]) -> list[Sample]:
        """Return the answers to generate, none of which has a token."""
        found = list[Sample]()
        for order, request in enumerate(requests):
            limit = new_tokens_within(
                self.model, len(request.prompt), request.max_new_tokens, str(request)
            )
            prompt = Prompt(request, order, limit)
            found += [
                Sample(prompt, number, key) for number, key in enumerate(answer_keys(request))
            ]
        return found

    def _lay_out(self, samples: Sequence[Sample], latents: Latents) -> None:
        """Make the pages of each attention layer, unless those of the last call will do."""
        device = input_device(self.model)
        probe = Probe(latents)
        ids = torch.zeros(PROBED_TOKENS, dtype=torch.int64, device=device)
        run_pass(self.model, ids, torch.arange(PROBED_TOKENS, device=device), probe)
        size = self.settings.page_size
        page_bytes = size * sum(sizes.bytes for sizes in probe.sizes.values())
        needed = [self._pages_of(one.prompt) for one in samples]
        memory = self.settings.cache_memory
        if memory is None:
            at_once = sum(sorted(needed, reverse=True)[: self.settings.slots])
            free = _free_memory(device) // page_bytes
            count = max(min(at_once, int(FREE_SHARE * free)), min(max(needed), free))
        else:
            count = memory // page_bytes
        for one, pages in zip(samples, needed):
            if pages > count:
                request = one.prompt.request
                raise TooLarge(
                    f"{request}: {len(request.prompt):,} tokens and {one.prompt.limit:,} new ones "
                    f"take {pages * page_bytes / 2**20:,.1f} MiB of keys and values, the cache has "
                    f"{count * page_bytes / 2**20:,.1f} MiB (cache_memory); ask for fewer tokens, "
                    "or give it more memory"
                )
        self._pages = count + 1
        wanted = Layout(probe.sizes, device)
        if wanted != self._layout or self._pages > self._made:
            self._layers.clear()  # before the new pages are made
            self._layers = {
                module: LayerPages(sizes, self._pages, size, device)
                for module, sizes in probe.sizes.items()
            }
            self._layout = wanted
            self._made = self._pages

    def _pages_of(self, prompt: Prompt) -> int:
        """Return how many pages one answer takes, with the prompt that others share."""
        size = self.settings.page_size
        tokens = len(prompt.request.prompt)
        # the last token's keys are never needed; a shared page that is not full exists twice
        pages = -(-(tokens + prompt.limit - 1) // size)
        return pages + (prompt.request.answers > 1 and tokens % size > 0)


def answer_keys(request: Request) -> list[int]:
    """Return the key of the random numbers of each answer of a request."""
    seeds = torch.full((request.answers,), request.sampling.seed)
    numbers = torch.full((request.answers,), request.number)
    keys: list[int] = stream_keys(seeds, numbers, torch.arange(request.answers)).tolist()
    return keys


def _free_memory(device: torch.device) -> int:
    """Return the free bytes of a card, or of the host; 1 GiB if the host does not tell."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return available_memory() or 2**30


@dataclass
class Slots:
    """The tensors of decode steps of N answers, of which the last are padding.

    A step reads them, and writes the next tokens and positions into them. Their shapes are static:
    N is a power of two or the number of slots, the width of the block table a power of two.

    Attributes:
        ids: int64 ``[N]``, each answer's last token.
        positions: int64 ``[N]``, its position.
        pages: int64 ``[N, L]``, the block table.
        choices: settings of the draws.
        seen: bool ``[N, V]``, tokens of each text; None without repetition penalties.
    """

    ids: Tensor
    positions: Tensor
    pages: Tensor
    choices: Choices
    seen: Tensor | None


class Call:
    """One call of the engine.

    Attributes:
        schedule: what runs, and what waits.
        computed_tokens: tokens that prefill passes computed.
    """

    def __init__(self, engine: Engine, samples: Sequence[Sample], latents: Latents):
        settings = engine.settings
        self.model = engine.model
        self.settings = settings
        self.computed_tokens = 0
        self.schedule = Schedule(
            samples,
            PagePool(engine._pages),
            settings.page_size,
            settings.slots,
            settings.chunk_tokens,
        )
        self._layers = engine._layers
        self._latents = latents
        self._samples = samples
        self._device = input_device(self.model)
        self._head: Head = read_head(self.model)

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

    def step(self, each: Callable[[int, int, list[int]], None] | None) -> None:
        """Draw first tokens, or prefill a pack and take steps with all answers that run."""
        schedule = self.schedule
        schedule.admit()
        self._copy_pages()
        began = schedule.beginning()
        if began:
            self._take(began, self._first_tokens(began), each)
            return
        chunks = schedule.chunks()
        if chunks:
            self._prefill(chunks)
        steps = min([self.settings.steps_a_look, *(one.left for one in schedule.decoding())])
        schedule.make_room(steps)
        decoding = schedule.decoding()
        if decoding:
            self._take(decoding, self._decode(decoding, steps), each)
        elif not chunks:
            schedule.evict_youngest()

    def _copy_pages(self) -> None:
        """Copy shared pages to which an answer will write."""
        copies = self.schedule.copies
        if not copies:
            return
        sources, targets = (
            torch.tensor(pages, device=self._device)
            for pages in zip(*((copy.source, copy.target) for copy in copies))
        )
        for layer in self._layers.values():
            layer.copy(sources, targets)
        copies.clear()

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Run a pack of chunks; keep the hidden state of each prompt's last token."""
        ids = list[int]()
        positions = list[int]()
        places = list[int]()
        keys = list[int]()
        bounds = [[0], [0]]
        for chunk in chunks:
            ids += chunk.of.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            held = self._places(chunk.of.pages, chunk.end)
            places += held[chunk.start :]
            keys += held
            bounds[0].append(len(ids))
            bounds[1].append(len(keys))
        cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=self._device) for ends in bounds)
        as_tensor = self._as_tensor
        over = PrefillPass(
            self._layers,
            self._latents,
            as_tensor(places),
            cu_q,
            max(chunk.end - chunk.start for chunk in chunks),
            cu_k,
            max(chunk.end for chunk in chunks),
            as_tensor(keys) if any(chunk.start for chunk in chunks) else None,
        )
        states = self._states(as_tensor(ids), as_tensor(positions), over)
        self.computed_tokens += len(ids)
        for chunk, last in zip(chunks, bounds[0][1:]):
            chunk.of.computed = chunk.end
            if isinstance(chunk.of, Prompt) and chunk.end == chunk.of.wanted:
                chunk.of.state = states[last - 1].clone()

    def _first_tokens(self, began: Sequence[Sample]) -> list[Drawn]:
        """Draw the first token of answers from the last hidden states of their prompts."""
        states = [one.prompt.state for one in began]
        slots = self._slots(began)
        return [self._draw(torch.stack(states), slots, slots.positions)]  # type: ignore[arg-type]

    def _decode(self, decoding: Sequence[Sample], steps: int) -> list[Drawn]:
        """Take steps with all answers; returns what each step drew."""
        slots = self._slots(decoding, self._bucket(len(decoding)))
        drawn = [self.decode_step(slots) for _ in range(steps)]
        for one in decoding:
            one.computed += steps
        return drawn

    def decode_step(self, slots: Slots) -> Drawn:
        """Compute the next token of each answer; writes it into ``slots``.

        Reads and writes tensors of static shapes only, and the host waits for nothing.
        """
        size = self.settings.page_size
        page = slots.pages.gather(1, (slots.positions // size)[:, None])[:, 0]
        places = page * size + slots.positions % size
        over = DecodePass(self._layers, self._latents, places, slots.pages, slots.positions + 1)
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
            logits = self._head.logits(states[start:end])
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
        width = _power_of_two(max(len(one.pages) for one in samples))
        table = torch.full((len(ids), width), SCRATCH_PAGE, dtype=torch.int64)
        for row, one in enumerate(samples):
            table[row, : len(one.pages)] = torch.tensor(one.pages)
        sampling = [one.prompt.request.sampling for one in samples]
        keys = [one.key for one in samples]
        choices = Choices.of(
            [*sampling, *[Sampling()] * padding], [*keys, *[0] * padding], self._device
        )
        seen = self._seen(samples, len(ids)) if choices.penalises else None
        as_tensor = self._as_tensor
        return Slots(as_tensor(ids), as_tensor(positions), table.to(self._device), choices, seen)

    def _seen(self, samples: Sequence[Sample], rows: int) -> Tensor:
        """Return which tokens of the vocabulary each text has, bool ``[N, V]``."""
        size = self._head.table.shape[0]
        seen = torch.zeros(rows, size, dtype=torch.bool, device=self._device)
        for row, one in enumerate(samples):
            seen[row, self._as_tensor(one.ids)] = True
        return seen

    def _take(
        self,
        samples: Sequence[Sample],
        drawn: Sequence[Drawn],
        each: Callable[[int, int, list[int]], None] | None,
    ) -> None:
        """Add drawn tokens to their answers, up to the end of each; the host waits here."""
        columns = [
            torch.stack([getattr(step, name) for step in drawn], 1).tolist()
            for name in Drawn._fields
        ]
        for row, one in enumerate(samples):
            for token, chosen, full, entropy, finite in zip(*(column[row] for column in columns)):
                answer = one.answer
                if not finite:
                    raise NotFinite(
                        f"{one.prompt.request}, token {len(answer.tokens) + 1}: the model's "
                        "predictions are not finite; its weights are damaged or overflow: take an "
                        "earlier checkpoint, or download it again"
                    )
                answer.tokens.append(token)
                answer.log_probabilities.append(chosen)
                answer.full_log_probabilities.append(full)
                answer.entropies.append(entropy)
                if self._has_ended(one):
                    self.schedule.finish(one)
                    break
            if each is not None:
                each(one.prompt.order, one.number, one.answer.tokens)

    def _has_ended(self, one: Sample) -> bool:
        """Return whether an answer's last token ends it; notes why."""
        request = one.prompt.request
        answer = one.answer
        if request.ending.is_reached(answer.tokens):
            answer.ended = "stop"
        elif not one.left:
            asked = one.prompt.limit == request.max_new_tokens
            answer.ended = "length" if asked else "positions"
        return bool(answer.ended)

    def _states(self, ids: Tensor, positions: Tensor, over: Pass) -> Tensor:
        return run_pass(self.model, ids, positions, over)

    def _places(self, pages: Sequence[int], tokens: int) -> list[int]:
        """Return where the first ``tokens`` tokens of a sequence are in the pages."""
        size = self.settings.page_size
        return [pages[n // size] * size + n % size for n in range(tokens)]

    def _bucket(self, count: int) -> int:
        """Return the number of slots of a step for ``count`` answers."""
        return min(_power_of_two(count), max(self.settings.slots, count))

    def _as_tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (count - 1).bit_length()
