"""The engine: requests in, tokens and their log-probabilities out, by the model's own modules.

Prompts are computed in packs of chunks, then all running answers take steps together, a token each.
What has ended makes room at once. The model may be in training: no copy of it is made, and after a
call it is as before.

    with room for all           every prompt once, every answer a token a step
    with less                   the youngest answers wait, and go on where they were
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from chronicals.generation.call import Call
from chronicals.generation.decode_graphs import DecodeGraphs
from chronicals.generation.drawing import stream_keys
from chronicals.generation.exact import exact_passes
from chronicals.generation.layout import CacheLayout, LayerWindow
from chronicals.generation.pages import LayerPages, PagePool, WindowPool
from chronicals.generation.passes import (
    PROBED_TOKENS,
    Latents,
    Probe,
    attending_pages,
    run_pass,
)
from chronicals.generation.requests import Answer, Request, new_tokens_within
from chronicals.generation.schedule import EngineSettings, Prompt, Sample
from chronicals.generation.sharing import PromptSharing
from chronicals.kernels.cuda_graphs import Recorder
from chronicals.kernels.host_memory import available_memory
from chronicals.lora import holding_norms
from chronicals.models import (
    UnknownHead,
    in_evaluation,
    input_device,
    prove_packability,
    read_head,
    why_neighbours_matter,
    within_adapters,
)
from chronicals.models.presentation import AS_FORWARD
from chronicals.moe.offload.module import most_tokens_in_graphs
from chronicals.patching import packed_products
from chronicals.quantization import dense_copies

COPIES_SHARE = 0.5
"""Part of the free memory that dense copies of packed weights take at most.

The rest is for activations, logits and the graphs of the decode steps.
"""

FREE_SHARE = 0.25
"""Part of the free memory that pages take at most if ``cache_memory`` is not set."""


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


class Engine:
    """Generate with a model that ``why_not_served`` does not refuse.

    Args:
        model: a causal language model, with or without PEFT's wrapper.
        settings: sizes.
        recorder: captures decode steps as graphs; by default one on the model's card, and none on
            the CPU or without ``use_cuda_graphs``.

    Attributes:
        evictions: answers of the last call that were computed again because pages ran out.
        computed_tokens: tokens whose keys and values the last call computed in prefill passes.
    """

    def __init__(
        self,
        model: Any,
        settings: EngineSettings | None = None,
        recorder: Recorder | None = None,
    ):
        self.model = within_adapters(model)
        self.settings = settings or EngineSettings()
        self.evictions = 0
        self.computed_tokens = 0
        self._layers: dict[nn.Module, LayerPages] = {}
        self._layout: CacheLayout | None = None
        self._made: dict[LayerWindow, int] = {}
        self._graphs = None if recorder is None else DecodeGraphs(recorder)

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
            NotExact: ``generation_exact`` is set, and not possible.
            NotFinite: logits are not finite; the message names the request and the token.
            ValueError: a prompt has as many tokens as the model has positions.
        """
        if not requests:
            return []
        end = None if seconds is None else time.monotonic() + seconds
        samples = self._samples(requests)
        with (
            in_evaluation(self.model),
            self._graphs_of_call() as graphs,
            attending_pages(self.model) as latents,
        ):
            pool = self._lay_out(samples, latents)
            assert self._layout is not None
            sharing = PromptSharing.of(self._layout.sizes.values())
            call = Call(
                self.model, self.settings, self._layers, pool, samples, latents, sharing, graphs
            )
            rows = min(self.settings.slots, len(samples))
            copies = dense_copies(packed_products(self.model), rows, self._spare_memory())
            exact = self.settings.generation_exact
            exactly = exact_passes(self.model) if exact else nullcontext()
            with copies, holding_norms(self.model), exactly:
                call.run(each, end)
        self.evictions = call.schedule.evictions
        self.computed_tokens = call.computed_tokens
        answers: list[list[Answer]] = [[] for _ in requests]
        for one in samples:
            answers[one.prompt.order].append(one.answer)
        return answers

    def release(self) -> None:
        """Give the memory of the pages back; the next call makes them again."""
        device = None if self._layout is None else self._layout.device
        self._layers.clear()
        self._layout = None
        self._made = {}
        if device is not None:
            _free_unused(device)

    def _graphs_of_call(self) -> AbstractContextManager[DecodeGraphs | None]:
        """Return a context around a call, which gives its graphs; None where there are none."""
        device = input_device(self.model)
        moved = self._graphs is None or self._graphs.recorder.device != device
        if moved and device.type == "cuda" and self.settings.use_cuda_graphs:
            self._graphs = DecodeGraphs(Recorder(device))
        if self._graphs is None:
            return nullcontext()
        return self._graphs.around_call(most_tokens_in_graphs(self.model))

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

    def _lay_out(self, samples: Sequence[Sample], latents: Latents) -> PagePool:
        """Make the pages of each attention layer, unless those of the last call will do.

        Returns:
            The pages that this call may use.
        """
        device = input_device(self.model)
        probe = Probe(latents)
        ids = torch.zeros(PROBED_TOKENS, dtype=torch.int64, device=device)
        run_pass(self.model, ids, torch.arange(PROBED_TOKENS, device=device), probe)
        layout = CacheLayout(probe.sizes, device, self.settings)
        prompts = [one.prompt for one in samples]
        memory = self.settings.cache_memory
        if memory is None:
            free = free_memory(device) + self._bytes
            alone = max(layout.bytes(layout.alone(prompt)) for prompt in prompts)
            memory = max(int(FREE_SHARE * free), min(alone, free))
        pages = layout.within(memory, prompts)
        counts = {group: count + 1 for group, count in pages.items()}  # with a scratch page
        if layout != self._layout or any(counts[group] > self._made[group] for group in counts):
            self.release()  # before new pages are made, for which there may be no room
            _free_unused(device)
            with self._graphs.recorder.allocating() if self._graphs else nullcontext():
                self._layers = {
                    module: LayerPages(sizes, counts[sizes.window], self.settings.page_size, device)
                    for module, sizes in layout.sizes.items()
                }
            self._layout = layout
            self._made = counts
        size = self.settings.page_size
        windows = [
            WindowPool(group, count, counts[None], size, device)
            for group, count in counts.items()
            if group is not None
        ]
        return PagePool(counts[None], windows)

    def _spare_memory(self) -> int:
        """Return the bytes that dense copies may take beside the pages."""
        spare = int(COPIES_SHARE * free_memory(input_device(self.model)))
        memory = self.settings.cache_memory
        return spare if memory is None else min(spare, memory - self._bytes)

    @property
    def _bytes(self) -> int:
        """Bytes of the pages of the last call, which new pages may take."""
        return 0 if self._layout is None else self._layout.bytes(self._made)


def answer_keys(request: Request) -> list[int]:
    """Return the key of the random numbers of each answer of a request."""
    seeds = torch.full((request.answers,), request.sampling.seed)
    numbers = torch.full((request.answers,), request.number)
    keys: list[int] = stream_keys(seeds, numbers, torch.arange(request.answers)).tolist()
    return keys


def _free_unused(device: torch.device) -> None:
    """Give a card the blocks back that its allocator keeps for tensors of the same sizes.

    Pages have other sizes than activations, and other streams.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a card, or of the host; 1 GiB if the host does not tell."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    return available_memory() or 2**30
