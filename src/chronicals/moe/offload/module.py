"""StreamedExperts: the experts of a layer whose weights are records of the engine.

It replaces the module of experts and computes what that does, by the products that replaced the
class's forward. It has no weights itself: its parameters are empty, and frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from chronicals.kernels.cuda_graphs import cut_capture, is_capture_under_way
from chronicals.kernels.expert_dispatch import Dispatch
from chronicals.kernels.expert_glu import Gate
from chronicals.kernels.fused_experts import ExpertWeights
from chronicals.kernels.streamed_experts import (
    Adapter,
    GraphWave,
    Wave,
    streamed_experts,
)
from chronicals.moe.offload.cpu_share import HostShare
from chronicals.moe.offload.engine import ExpertEngine, with_rows
from chronicals.moe.offload.looks import CpuLook, HostLook
from chronicals.quantization import PackedExperts, class_module
from chronicals.quantization.expert_records import InMemory, Places
from chronicals.quantization.packed_linear import PackedModule

GATE_UP = "gate_up_proj"
DOWN = "down_proj"

NO_WHOLE_STACK = (
    "its experts are streamed from host memory, and no whole layer of them is on the device: {}"
)


class LayerSource:
    """The experts of a layer; the ``ExpertSource`` of ``kernels/streamed_experts.py``.

    Args:
        engine: the engine.
        layer: number of the layer among those with experts.
    """

    def __init__(self, engine: ExpertEngine, layer: int):
        self.engine = engine
        self.layer = layer
        self.records = engine.layers[layer]
        first = self.records.formats[GATE_UP]
        count, *sizes = first.shape
        inner, width = reversed(sizes) if first.transposed else sizes
        self._sizes = count, width, inner // 2

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes E, D and F."""
        return self._sizes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values that products read."""
        return self.records.formats[GATE_UP].dtype

    @property
    def in_fp8(self) -> bool:
        """True if the products run in FP8."""
        return self.records.formats[GATE_UP].in_fp8

    @property
    def has_output_bias(self) -> bool:
        """True if the second product adds a bias."""
        return f"{DOWN}_bias" in self.records.formats

    def __deepcopy__(self, memo: dict) -> LayerSource:
        """Return itself: copies of a model read the same records through the same slots."""
        return self

    def compute(
        self,
        x: Tensor,
        experts: Tensor,
        shares: Tensor,
        first: Adapter | None = None,
        second: Adapter | None = None,
        gate: Gate | None = None,
    ) -> Tensor:
        """Run each token through its experts, as ``streamed_experts`` does; x may be of any dtype."""
        rows = x.to(self.dtype)
        return streamed_experts(rows, experts, shares, self, first, second, gate).to(x.dtype)

    def look(self, bounds: Tensor, x: Tensor) -> list[int]:
        """Return the bounds on the host."""
        self._check(x)
        return self.engine.begin_layer(self.layer, bounds, x)

    def in_graph(self, to: Dispatch, x: Tensor, gate: Gate | None) -> GraphWave | None:
        """Return all experts in one wave if few tokens are being captured, and cut the capture."""
        if not is_capture_under_way():
            return None
        self._check(x)
        if not self.engine.is_one_wave(self.layer, to.tokens):
            return None
        engine, layer = self.engine, self.layer
        asked = engine.to_be_read(layer, to.bounds, x)
        if gate is None or not engine.has_cpu_share(to.tokens):
            look = HostLook(engine, layer, asked)
        else:
            look = CpuLook(self, asked, to, x, gate)
        cut_capture(look.bring, behind=look.note)
        look.send()
        memory = engine.memory_of(layer, Places.on_device(look.slots))
        whole = Wave(0, self.records.count, *self.weights_in(memory))
        return GraphWave(whole, look.replacement)

    def _check(self, x: Tensor) -> None:
        """Raise an error if experts cannot be multiplied by ``x``."""
        if self.engine.is_closed:
            raise RuntimeError(
                f"{self.records.path}: its experts are gone, for model.offload was closed; load "
                "the model again"
            )
        if self.engine.slots == 0:
            raise RuntimeError(f"{self.records.path}: the engine has no slots yet")
        if x.device != self.engine.device:
            raise ValueError(
                f"{self.records.path}: the hidden states are on {x.device}, and the slots of the "
                f"experts on {self.engine.device}"
            )

    def on_host(self, bounds: Sequence[int], tokens: int) -> HostShare | None:
        """Return the experts that the CPU computes, if there are any."""
        if not self.engine.has_cpu_share(tokens):
            return None
        experts = self.engine.share_with_cpu(self.layer, with_rows(bounds))
        return HostShare(self, experts) if experts else None

    def waves(self, bounds: Sequence[int], backward: bool = False) -> Iterator[Wave]:
        """Yield the waves of a pass."""
        for experts, places in self.engine.waves(self.layer, bounds, backward):
            memory = self.engine.memory_of(self.layer, places)
            yield Wave(experts.start, experts.stop, *self.weights_in(memory))

    def weights_in(self, memory: Mapping[str, InMemory]) -> tuple[ExpertWeights, ExpertWeights]:
        """Return the weights of both products, given where records are by name of the weight."""
        found = []
        for name in (GATE_UP, DOWN):
            weights = self.records.formats[name].weights(memory[name])
            bias = memory.get(f"{name}_bias")
            if bias is not None:
                weights = weights._replace(bias=bias.views["values"])
            found.append(weights)
        return found[0], found[1]


@dataclass(frozen=True)
class StreamedWeight:
    """A stacked weight whose experts are records.

    Attributes:
        shape: its shape in the class.
        dtype: dtype of the values that products read.
        source: where its experts come from.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: LayerSource

    def dense(self) -> Tensor:
        """Raise ValueError: the whole stack is nowhere."""
        raise ValueError(
            NO_WHOLE_STACK.format("load the model without offload to merge, save or change it")
        )


class StreamedExperts(PackedExperts):
    """The experts of a layer, streamed.

    Args:
        experts: the module to replace; its weights are released.
        source: the records.
    """

    def __init__(self, experts: nn.Module, source: LayerSource):
        nn.Module.__init__(self)
        formats = source.records.formats
        self.source = source
        self.stacked = {
            name: form.shape for name, form in formats.items() if not name.endswith("_bias")
        }
        self.transposed = frozenset()
        self.dtype = formats[GATE_UP].dtype
        inner = copy.copy(class_module(experts))
        places = {
            name: nn.Parameter(
                torch.empty(form.shape, dtype=form.dtype, device="meta"), requires_grad=False
            )
            for name, form in formats.items()
        }
        vars(inner).update(_parameters=places, _buffers={}, _modules=dict(inner._modules))
        object.__setattr__(self, "inner", inner)  # not as a submodule
        device = next(experts.parameters()).device
        if device.type == "meta":  # its weights were not read yet
            device = torch.device("cpu")
        self._is_hf_initialized = True  # transformers draws none of its parameters
        for name in formats:
            empty = torch.empty(0, dtype=self.dtype, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self._bases = {}
        self.train(experts.training)

    @property
    def weights(self) -> dict[str, Any]:
        """No packed weight: the records have the codes."""
        return {}

    @property
    def recipe(self) -> Any:
        """Recipe of the weights, None where they are not packed."""
        one = getattr(self.source.records.formats[GATE_UP], "one", None)
        return None if one is None else one.recipe

    @property
    def format(self) -> str:
        """Name of the format for logs."""
        return self.source.records.formats[GATE_UP].label

    @property
    def values(self) -> int:
        """Number of weights in the records."""
        return sum(torch.Size(form.shape).numel() for form in self.source.records.formats.values())

    @property
    def bytes(self) -> int:
        """Bytes of the records, in host memory."""
        return self.source.records.count * self.source.records.layout.bytes

    def dequantised(self) -> Iterator[tuple[str, Tensor]]:
        """Raise ValueError: the whole stacks are nowhere."""
        for name in self.stacked:
            yield name, self.stack(name).dense()

    def reference(self, name: str) -> Tensor:
        """Raise ValueError: the whole stack is nowhere."""
        return self.stack(name).dense()

    def why_not_saved(self, path: str, model: str) -> str | None:
        """Return why the experts cannot be saved."""
        return f"{path}: {NO_WHOLE_STACK.format('save the adapters')}"

    def stack(self, name: str) -> StreamedWeight:  # type: ignore[override]
        """Return a stacked weight."""
        form = self.source.records.formats[name]
        return StreamedWeight(form.shape, form.dtype, self.source)

    def stacks(self) -> dict[str, Any]:
        """Return weights and biases by name."""
        return {name: self.stack(name) for name in self.source.records.formats}

    def plain(self) -> nn.Module:
        """Raise ValueError: the whole stacks are nowhere."""
        raise ValueError(
            "merging: the experts are streamed from host memory; save the adapter, load the base "
            "without offload, and merge there (chronicals merge)"
        )

    @torch.compiler.disable
    def forward(
        self, *inputs: Any, instead: Mapping[str, Tensor] | None = None, **named: Any
    ) -> Any:
        """Compute what the class computes.

        Args:
            *inputs: arguments of the class's forward.
            instead: whole weights that replace its own; refused.
            **named: arguments of the class's forward.
        """
        if instead:
            reason = NO_WHOLE_STACK.format(
                "PEFT's adapters of experts need it; take chronicals' own"
            )
            raise ValueError(f"{self.source.records.path}: {reason}")
        return self.inner.forward(*inputs, stacks=self.stacks(), **named)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        place = next(iter(self.parameters())).device
        wanted = fn(torch.empty(0, dtype=self.dtype, device=place)).dtype
        if wanted != self.dtype:
            raise ValueError(
                f"{self.source.records.path}: its experts are records in {self.format}, which "
                f"cannot be cast to {wanted}; load the model in that dtype"
            )
        PackedModule._apply(self, fn, recurse)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = [
            name for name in state_dict if name.startswith(prefix) and state_dict[name].numel()
        ]
        if given:
            error_msgs.append(
                f"{given[0]}: the experts are records in host memory, which do not change after "
                "loading; load the model again from the new weights"
            )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        return  # its parameters are empty

    def extra_repr(self) -> str:
        """Return class, stacked weights and format."""
        return f"{type(self.inner).__name__}, {', '.join(self.stacked)} in {self.format}, streamed"


def source_of(stacks: Mapping[str, Any] | None) -> LayerSource | None:
    """Return where the weights of experts come from; None unless they are streamed."""
    if stacks is None:
        return None
    return getattr(stacks.get(GATE_UP), "source", None)


def streamed_experts_of(model: nn.Module) -> Iterator[tuple[str, StreamedExperts]]:
    """Yield the paths and streamed experts of ``model``, in its order."""
    for path, module in model.named_modules():
        if isinstance(module, StreamedExperts):
            yield path, module


def most_tokens_in_graphs(model: nn.Module) -> int | None:
    """Return the tokens of a pass, at most, that graphs can take; None if there is no limit.

    Graphs need all experts of a pass in slots at once, and products that read them there.
    """
    engine = next((module.source.engine for _, module in streamed_experts_of(model)), None)
    return None if engine is None else engine.most_tokens_in_graphs
