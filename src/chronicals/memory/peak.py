"""Estimates the bytes that a training step holds on the GPU, by part, at its largest moment.

A step holds a constant part (weights, optimizer states, gradients) and, in addition, those of the
moment that it is at, in this order:

    loss        activations kept by all layers, hidden states and their gradient, the
                logits of a chunk
    head        the same without logits, and the head's gradient as autograd takes it: its
                fp32 sum, a copy in the head's dtype, and an fp32 one if gradients are fp32
    backward    activations kept by the earlier layers, and what one layer needs during
                its own backward pass
    end         gradients of all trained weights if the backward pass allocates them, and
                the backward pass of the first layer
    embedding   all gradients, and for a tied embedding two of the same weight, since autograd adds
                the gradient of a tied head to an existing one only with the embedding's
    update      on the CPU, all gradients and the reference's copies of the largest weight

A peak is the largest moment. Each moment is a sum of named parts, so that a plan can say what fills
a GPU (``Estimate.peak``).

The bytes of one layer come from ``memory.layer_elements``; ``memory.estimation`` puts them together
for a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from chronicals.kernels.launch import next_power_of_2
from chronicals.kernels.linear_head import HeadBytes
from chronicals.memory.layer_elements import CHEAP, LAYERS, NOTHING
from chronicals.memory.offload import WINDOW_TENSORS

RESERVE = 0.9
"""Usable fraction of the GPU's memory; the rest is for fragmentation and workspaces."""

FROZEN_WEIGHTS = "frozen weights"
TRAINED_WEIGHTS = "trained weights"
PACKED_WEIGHTS = "packed weights"
DEQUANTISED = "dequantised weights of a layer"
STATES = "optimizer states and masters"
GRADIENTS = "gradients"
HEAD_GRADIENT = "gradient of the head and its fp32 sum"
ACTIVATIONS = "activations that layers keep"
HEAD_COPY = "head, copied from host memory"
HIDDEN_STATES = "hidden states at the loss, and their gradient"
LOGITS = "logits of a chunk"
WORKING = "one layer in its backward pass"
WORKSPACES = "workspaces of products"
PADDING = "padding of weights for adapters"
OTHERS = "gathered weights, and buffers of policies"
OFFLOADED = "offloaded activations"
RESULTS_AWAY = "results of attention"
UPDATE = "copies of the largest weight in its update"
"""Names of the parts of a moment."""


@dataclass(frozen=True)
class Moment:
    """A moment of a training step.

    Attributes:
        name: what runs then, in words.
        parts: bytes that the GPU holds then, by name; none is zero.
    """

    name: str
    parts: Mapping[str, int]

    @property
    def held(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def words(self) -> str:
        """Return the parts in words, the largest first, for a log."""
        largest_first = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in largest_first)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one weight.

    Attributes:
        frozen: a weight that is not trained. Embeddings and heads take the size of an activation
            element instead.
        trained: a trained weight with its optimizer states, and with its gradient if that is
            allocated during the forward pass.
        gradient: the gradient, if the backward pass allocates it while it frees activations.
        states: of ``trained``, the optimizer states.
        standing: of ``trained``, the gradient.
    """

    frozen: float
    trained: float
    gradient: float = 0.0
    states: float = 0.0
    standing: float = 0.0


@dataclass(frozen=True)
class TableBytes:
    """Bytes of the gradients of head and embedding, which come first and last.

    Attributes:
        summed: sums of the head's gradient while the loss computes it.
        returned: of the head's gradient as the loss returns it, with the copies that it is made of.
        head: of the head's gradient from then on, if gradients come in the backward pass.
        waiting: of a tied head's gradient from then on, if gradients stand, to which it is only
            added with the embedding's.
        embedding: of the embedding's, which is only made after the first layer; 0 if it is the
            head.
        again: of the embedding's gradient before it is added to others, with its copy in fp32 if
            gradients are fp32; beside ``embedding`` only what that is made of.
    """

    summed: int = 0
    returned: int = 0
    head: int = 0
    waiting: int = 0
    embedding: int = 0
    again: int = 0

    @classmethod
    def of(
        cls, table: Tensor, head: Tensor, of_head: HeadBytes, weights: WeightBytes, element: int
    ) -> TableBytes:
        """Return the bytes of a model's head and embedding.

        Args:
            table: weight of the embedding.
            head: weight of the head; may be the same.
            of_head: what the loss needs.
            weights: bytes of a weight.
            element: bytes of an element of a gradient as it is computed.
        """
        has_gradient = of_head.gradient > 0  # not where a score stands in the place of the head
        tied = table is head and has_gradient
        of_table = table.numel() * table.requires_grad
        trained_head = head.numel() * (head.requires_grad and has_gradient)
        summed = weights.gradient + weights.standing
        cast = summed if summed > element else 0
        again = of_table * (element + cast)
        if not tied and not weights.standing:  # the result is among the gradients
            again = of_table * element if cast else 0
        return cls(
            summed=of_head.gradient,
            returned=of_head.returned + int(trained_head * cast),
            head=int(trained_head * weights.gradient),
            waiting=int(trained_head * weights.standing) if tied else 0,
            embedding=0 if tied else int(of_table * weights.gradient),
            again=int(again),
        )


@dataclass(frozen=True)
class Estimate:
    """Expected memory of a training run, in bytes; mappings are by recomputation policy.

    Attributes:
        fixed: weights, optimizer states, and gradients that are allocated during the forward pass.
        layers: number of decoder layers.
        kept: activations of one layer.
        total: memory of the GPU; 0 without one.
        gradients: gradients that the backward pass allocates as it frees activations.
        loss: hidden states, their gradient and the logits of a chunk; not the head's gradient.
        working: the layer whose backward pass runs, with the activations it kept.
        window: with offload, saved tensors on the GPU; else empty.
        logits: of ``loss``, the logits of a chunk.
        head_copy: a head that is in host memory, and on the GPU during the loss alone; else 0.
        named: the bytes of ``fixed`` by part; what they leave is ``OTHERS``.
        tables: gradients of head and embedding.
        away: bytes in host memory by part, without the activations that are offloaded.
        update: bytes that an update needs beside the gradients; 0 on a card.
        pooled: True if CUDA graphs have a memory pool of their own beside these bytes.
        without_graphs: True if CUDA graphs were permitted, and these are the bytes without them.
        moved_inputs: of layers that run in tiles, number of those whose inputs are in host memory;
            None where inputs are not offloaded.
        result: of a layer that runs in tiles, bytes that attention gives for the backward pass.
        kept_results: number of layers whose results are kept; the others compute them again.
        results_here: number of these whose results stay on the card; those of others are in host
            memory.
    """

    fixed: int
    layers: int
    kept: Mapping[str, int]
    total: int
    gradients: int = 0
    loss: int = 0
    working: Mapping[str, int] = field(default_factory=dict)
    window: Mapping[str, int] = field(default_factory=dict)
    logits: int = 0
    head_copy: int = 0
    named: Mapping[str, int] = field(default_factory=dict)
    away: Mapping[str, int] = field(default_factory=dict)
    tables: TableBytes = TableBytes()
    update: int = 0
    pooled: bool = False
    without_graphs: bool = False
    moved_inputs: int | None = None
    result: int = 0
    kept_results: int = 0
    results_here: int = 0

    @property
    def results_away(self) -> int:
        """Number of layers whose results are in host memory."""
        return self.kept_results - self.results_here

    def moving_inputs(self, most: int) -> Estimate:
        """Return the estimate with as few inputs of layers in host memory as fit the card needs.

        Each input costs a copy in both passes. Where not even ``most`` are enough, it is ``most``.

        Args:
            most: largest number of layers whose inputs may be in host memory.
        """
        for count in range(most):
            fewer = replace(self, moved_inputs=count)
            if fewer.needed(LAYERS) <= RESERVE * self.total:
                return fewer
        return replace(self, moved_inputs=most)

    def keeping_results(self) -> Estimate:
        """Return the estimate with results of attention on the card, of as many layers as fit."""
        for count in range(self.layers, 0, -1):
            more = replace(self, kept_results=count, results_here=count)
            if more.needed(LAYERS) <= RESERVE * self.total:
                return more
        return self

    def beside(self, name: str, size: int) -> Estimate:
        """Return the estimate with further bytes that exist all the time."""
        named = {**self.named, name: self.named.get(name, 0) + size}
        return replace(self, fixed=self.fixed + size, named=named)

    def renamed(self, name: str, other: str) -> Estimate:
        """Return the estimate with another name of a part that exists all the time."""
        named = {other if part == name else part: size for part, size in self.named.items()}
        return replace(self, named=named)

    def needed(self, cheap: str, again: int = 0) -> int:
        """Return the bytes needed under a recomputation plan.

        Args:
            cheap: policy of the layers after the first ``again``.
            again: number of first layers that are recomputed whole.
        """
        return self.peak(cheap, again).held

    def peak(self, cheap: str, again: int = 0) -> Moment:
        """Return the largest moment of a step; arguments as for ``needed``."""
        return max(self.moments(cheap, again), key=lambda moment: moment.held)

    def moments(self, cheap: str, again: int = 0) -> list[Moment]:
        """Return the moments of a step in their order; arguments as for ``needed``."""
        whole_layers = cheap == LAYERS or again == self.layers
        last = LAYERS if whole_layers else cheap
        first = LAYERS if again or whole_layers else cheap
        saved, before_last, before_first = self._activations(cheap, again)
        tables = self.tables
        of_layers = self.gradients - tables.embedding
        moments = {
            "the loss": {
                ACTIVATIONS: saved,
                HIDDEN_STATES: self.loss - self.logits,
                LOGITS: self.logits,
                HEAD_COPY: self.head_copy,
                HEAD_GRADIENT: tables.summed,
            },
            "the gradient of the head": {
                ACTIVATIONS: saved,
                HIDDEN_STATES: self.loss - self.logits,
                HEAD_COPY: self.head_copy,
                HEAD_GRADIENT: tables.returned,
            },
            "the backward pass of the last layer": {
                ACTIVATIONS: before_last,
                WORKING: self._working(last),
                GRADIENTS: tables.head + tables.waiting,
            },
            "the backward pass of the first layer": {
                ACTIVATIONS: before_first,
                WORKING: self._working(first),
                GRADIENTS: of_layers + tables.waiting,
            },
            "the gradient of the embedding": {
                GRADIENTS: self.gradients + tables.waiting + tables.again
            },
        }
        if self.update:
            moments["the update"] = {GRADIENTS: self.gradients, UPDATE: self.update}
        return [self._moment(name, parts) for name, parts in moments.items()]

    def _activations(self, cheap: str, again: int) -> tuple[int, int, int]:
        """Return the bytes of activations on the GPU at three moments; arguments as for ``needed``.

        Returns:
            Those of all layers at the loss, those of the layers before the last one in its backward
            pass, and those of the layers before the first one in its. Results of attention are freed
            with their layer, which holds them beside what it computes.
        """
        results = self.results_here * self.result
        of_first = self.result if self.results_here == self.layers else 0
        saved, before_last, before_first = self._without_results(cheap, again)
        return saved + results, before_last + results, before_first + of_first

    def _without_results(self, cheap: str, again: int) -> tuple[int, int, int]:
        """Return what ``_activations`` does, without results of attention on the GPU."""
        whole_layers = cheap == LAYERS or again == self.layers
        saved = again * self.kept[LAYERS] + (self.layers - again) * self.kept[cheap]
        if self.moved_inputs:
            # Of inputs that move the last one is on its way out; of those that come back the one in
            # use and the next are there (``memory.offload``).
            size = self.kept[LAYERS]
            stay = (self.layers - self.moved_inputs) * size
            before_last = stay + (2 if whole_layers else 1) * size
            before_first = (2 if again or whole_layers else 1) * size
            return stay + size, before_last, before_first
        if self.window:
            # Of what is copied out a window is on the GPU. It stays there until the first tensor
            # that was copied back is used; of these a window and the tensor in use are there, and
            # what the layer kept is among them.
            window = self.window[cheap]
            back = window + window // WINDOW_TENSORS
            before_last = min(saved, window + back)
            before_first = min(saved, back)
            if not whole_layers:
                before_last -= min(before_last, self.kept[cheap])
            if not (again or whole_layers):
                before_first -= min(before_first, self.kept[cheap])
            return min(saved, window), before_last, before_first
        # The backward pass goes from the last layer to the first. When it reaches the first layers,
        # the activations of the others are freed.
        before_last = saved - (0 if whole_layers else self.kept[cheap])
        before_first = again * self.kept[LAYERS]
        return saved, before_last, before_first

    def _moment(self, name: str, parts: Mapping[str, int]) -> Moment:
        """Return a moment with what exists all the time."""
        others = self.fixed - sum(self.named.values())
        held = dict(self.named)
        for part, size in {OTHERS: others, **parts}.items():
            held[part] = held.get(part, 0) + size
        return Moment(name, {part: size for part, size in held.items() if size})

    def pool(self, cheap: str, again: int = 0) -> int:
        """Return the bytes of the pool that all CUDA graphs share; arguments as for ``needed``.

        It has what a micro-step makes, and stays while a micro-step of a shape that no graph has
        makes the same outside of it. In a graph of a step's first micro-batch gradients are new, and
        copied to those that stand. 8B QLoRA reserved 77.9 GiB of an H100, where tensors were 42.4
        at most and 7.2 between steps (``benchmarks/results/several-cards-h100-2.json``).
        """
        if not self.pooled:
            return 0
        new = self.gradients + self.named.get(GRADIENTS, 0)
        first = replace(self, gradients=new, tables=replace(self.tables, waiting=0))
        return max(self.needed(cheap, again), first.needed(cheap, again)) - self.fixed

    def in_host_memory(self, cheap: str, again: int = 0) -> dict[str, int]:
        """Return the bytes in pinned host memory by part; arguments as for ``needed``.

        A buffer of an offloaded tensor has the next power of two of bytes
        (``ActivationOffload.take``); that of a layer's input is known here, of others only their
        sum. Inputs of layers that run in tiles are in one memory without gaps.
        """
        if self.moved_inputs is not None:
            parts = {
                OFFLOADED: self.moved_inputs * self.kept[LAYERS],
                RESULTS_AWAY: self.results_away * self.result,
            }
            return {**self.away, **{name: size for name, size in parts.items() if size}}
        if not self.window:
            return dict(self.away)
        whole = self.layers if cheap == LAYERS else again
        inputs = whole * next_power_of_2(self.kept[LAYERS])
        others = (self.layers - whole) * self.kept[cheap]
        return {**self.away, OFFLOADED: inputs + others}

    def _working(self, policy: str) -> int:
        """Return the bytes of the layer whose backward pass runs.

        A layer recomputed whole holds all that it would have kept.
        """
        return self.working.get(
            policy, self.kept[NOTHING] if policy == LAYERS else self.kept[policy]
        )

    def choice(self) -> tuple[str, int]:
        """Return a recomputation policy and the number of first layers that are recomputed whole.

        It is the fastest plan that fits, else the leanest.
        """
        if not self.total:
            return NOTHING, 0
        cheap = [policy for policy in (NOTHING, CHEAP) if policy in self.kept]
        plans = [(policy, 0) for policy in cheap]
        plans += [(cheap[-1], again) for again in range(1, self.layers + 1)]
        leanest = plans[0]
        least = self.needed(*leanest)
        for plan in plans:
            size = self.needed(*plan)
            if size <= RESERVE * self.total:
                return plan
            if size < least:
                leanest, least = plan, size
        return leanest

    @property
    def fits(self) -> bool:
        """True if a plan fits into ``RESERVE`` of the GPU's memory, or if there is no GPU."""
        return not self.total or self.needed(*self.choice()) <= RESERVE * self.total

    def words(self) -> str:
        """Return the expected memory and the recomputation plan in words, for the log."""
        if not self.total:
            return "not on a card"
        cheap, again = self.choice()
        sizes = f"estimated {self.needed(cheap, again) / 2**30:.1f} of {self.total / 2**30:.1f} GiB"
        layers = f"{again} of {self.layers} layers recomputed" if again else ""
        others = "" if again and cheap == NOTHING else f"{cheap} recomputed"
        return ", ".join(words for words in (sizes, layers, others) if words)
