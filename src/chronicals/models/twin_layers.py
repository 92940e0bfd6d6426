"""The layers that a twin keeps of its model, and the fields of its configuration that speak of
layers.

A configuration says in five ways of which kind a layer is:

- a list with an entry a layer, as ``layer_types``;
- a list of the indices of some layers, as ``mlp_only_layers``;
- how many of the first or of the last layers are of another kind, as ``first_k_dense_replace`` and
  ``num_kv_shared_layers``;
- a period, as ``attn_layer_period``;
- sizes that differ in some layers, ``per_layer_config``.

A twin has a layer of every kind. Whoever shortens a model and leaves one of these fields as it was
gets a model that cannot be built, or one without its experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Fields of which the first that a configuration has is the number of its layers."""

COUNTED_TOO = ("num_blocks",)
"""Fields that some classes have beside that one, with the same number in them."""

PER_STACK = "num_layers_per_stack"
"""Field with the layers of stacks that a class runs several times; its number of layers counts
every run.
"""

STACKS = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
"""Numbers of layers of models with an encoder, whose layers are all of one kind."""

INDICES = {
    "attn_layer_indices": 0,
    "cross_attention_layers": 0,
    "full_attn_idxs": 0,
    "hybrid_layer_ids": 0,
    "local_layer_ids": 0,
    "mlp_only_layers": 0,
    "moe_layers": 0,
    "ple_layer_ids": 1,
}
"""Fields with indices of layers, and the index that the first layer has in them."""

FIRST = (
    "first_k_dense_replace",
    "loop_layer_index_end",
    "loop_layer_index_start",
    "max_window_layers",
    "moe_layer_start_index",
    "num_dense_layers",
)
"""Fields with an index at which layers of another kind begin."""

FIRST_INCLUSIVE = ("moe_layer_end_index",)
"""Fields with the index of the last layer of a kind."""

LAST = ("num_kv_shared_layers",)
"""Fields with a number of last layers."""

SECTIONS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
"""Numbers of layers of sections that follow each other and together are all layers."""

PERIODS = (
    "attn_layer_period",
    "decoder_sparse_step",
    "expert_layer_period",
    "moe_layer_interval",
    "n_layers_per_attn_res_block",
)
"""Fields with a period of kinds that the class itself computes from a layer's index. Periods
from which a configuration makes a list of layers, as ``sliding_window_pattern``, say nothing
beyond that list."""

NO_LAYERS = (
    "begin_suppress_tokens",
    "block_types",
    "eos_token_id",
    "languages",
    "mlp_multipliers",
    "ssm_multipliers",
    "time_step_limit",
)
"""Fields with a list that may be as long as the model is deep, whose entries are no layers'."""

SHARING = ("hybrid",)
"""Kinds in ``layers_block_type`` whose layers share a module with the next of their kind, so
that there must be two.
"""

MIN_LAYERS = 2

MAX_LAYERS = 8
"""Layers of a twin without ``layer_types``: enough for one period of hybrids whose layer type
depends on the layer's index. Of models with one, the most layers that are kept since their sizes
differ."""


@dataclass(frozen=True)
class Layers:
    """What a configuration says of its layers.

    Attributes:
        count: number of layers.
        per_layer: by field, an entry a layer.
        indices: by field, the indices of some layers, from 0.
        bounds: by field, how many layers come before those of another kind.
        overrides: of each layer, the fields that are different in it.
        period: of kinds that the class computes from the index.
    """

    count: int
    per_layer: dict[str, list[Any] | tuple[Any, ...]]
    indices: dict[str, list[int]]
    bounds: dict[str, int]
    overrides: dict[int, dict[str, Any]]
    period: int

    @classmethod
    def of(cls, config: Any, overrides: dict[int, dict[str, Any]]) -> Layers | None:
        """Read a configuration of a language model; None of one without a number of layers."""
        name = next((name for name in COUNTS if isinstance(getattr(config, name, None), int)), None)
        if name is None:
            return None
        count = getattr(config, name)
        fields = vars(config)
        indices = {
            field: [index - start for index in fields[field]]
            for field, start in INDICES.items()
            if isinstance(fields.get(field), list | tuple)
        }
        per_layer = {
            field: value
            for field, value in fields.items()
            if isinstance(value, list | tuple)
            and len(value) == count
            and field not in (*indices, *NO_LAYERS)
        }
        periods = [
            fields[field]
            for field in PERIODS
            if isinstance(fields.get(field), int) and fields[field] > 0
        ]
        return cls(count, per_layer, indices, _bounds(fields, count), overrides, math.lcm(*periods))

    def type_of(self, index: int) -> tuple:
        """The kind of a layer, apart from sizes."""
        named = [entries[index] for entries in self.per_layer.values() if not _is_size(entries)]
        members = [index in some for some in self.indices.values()]
        beyond = [index >= bound for bound in self.bounds.values()]
        return (
            *map(str, named),
            *members,
            *beyond,
            index % self.period,
            *self.overrides.get(index, {}).get("skip", ()),
        )

    def kind_of(self, index: int) -> tuple:
        """The kind of a layer, with its sizes."""
        sizes = [entries[index] for entries in self.per_layer.values() if _is_size(entries)]
        return (
            *self.type_of(index),
            *map(str, sizes),
            str(sorted(self.overrides.get(index, {}).items())),
        )

    def kept(self) -> list[int]:
        """Indices of the layers that a twin has: one of every kind, each where the class takes
        it for the same kind.
        """
        types = [self.type_of(index) for index in range(self.count)]
        wanted = _first_of_each(types) + self._sharing(types)
        for index in _first_of_each([self.kind_of(index) for index in range(self.count)]):
            if index not in wanted and len(wanted) < MAX_LAYERS:
                wanted.append(index)
        if any(entries and isinstance(entries[0], str) for entries in self.per_layer.values()):
            others = [index for index in range(self.count) if index not in wanted]
            wanted += others[: max(0, MIN_LAYERS - len(wanted))]
        else:
            wanted += range(min(MAX_LAYERS, self.count))
        return _aligned(sorted(set(wanted)), self.period)

    def _sharing(self, types: list[tuple]) -> list[int]:
        """Indices of layers from which later ones have something, and of later ones."""
        found = []
        for entries in self.per_layer.values():
            for kind in SHARING:
                found += [index for index, entry in enumerate(entries) if entry == kind][:2]
        for field in LAST:
            before = types[
                : self.bounds.get(field, 0)
            ]  # of each type the last hands its keys and values on
            found += [len(before) - 1 - before[::-1].index(kind) for kind in set(before)]
        return found


def cut_layers(config: Any, overrides: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Let the configuration of a language model have few layers, at least one of every kind that it
    has.

    Args:
        overrides: by layer, the fields that are different in it (``per_layer_config``).

    Returns:
        The overrides of the layers that are left, by their new index.
    """
    stacks = [name for name in STACKS if isinstance(vars(config).get(name), int)]
    for name in stacks:
        setattr(config, name, min(getattr(config, name), 2))
    layers = Layers.of(config, overrides)
    if layers is None or stacks:
        return {}
    if isinstance(getattr(config, PER_STACK, None), int):
        _cut_stacks(config, layers.count)
        return {}
    kept = layers.kept()
    for name in (*COUNTS, *COUNTED_TOO):
        if getattr(config, name, None) == layers.count and settable(config, name):
            setattr(config, name, len(kept))
    for field, entries in layers.per_layer.items():
        left = [entries[index] for index in kept]
        setattr(config, field, tuple(left) if isinstance(entries, tuple) else left)
    for field, some in layers.indices.items():
        setattr(
            config, field, [new + INDICES[field] for new, index in enumerate(kept) if index in some]
        )
    for field, bound in layers.bounds.items():
        _set_bound(config, field, sum(index < bound for index in kept), len(kept))
    return {new: overrides[index] for new, index in enumerate(kept) if index in overrides}


def _cut_stacks(config: Any, count: int) -> None:
    runs = count // getattr(config, PER_STACK)
    setattr(config, PER_STACK, min(getattr(config, PER_STACK), 2))
    config.num_hidden_layers = runs * getattr(config, PER_STACK)


def settable(config: Any, name: str) -> bool:
    """False for a property that is computed from other fields."""
    owner = getattr(type(config), config.attribute_map.get(name, name), None)
    return not isinstance(owner, property) or owner.fset is not None


def _bounds(fields: dict[str, Any], count: int) -> dict[str, int]:
    """By field, the number of layers before those of another kind."""
    numbers = {
        field: value
        for field, value in fields.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    bounds = {field: numbers[field] for field in FIRST if field in numbers}
    bounds |= {field: numbers[field] + 1 for field in FIRST_INCLUSIVE if field in numbers}
    bounds |= {field: count - numbers[field] for field in LAST if field in numbers}
    sections = [field for field in SECTIONS if field in numbers]
    for place, field in enumerate(sections):
        bounds[field] = sum(numbers[before] for before in sections[: place + 1])
    return bounds


def _set_bound(config: Any, field: str, bound: int, count: int) -> None:
    """Say in the way of the field that ``bound`` of ``count`` layers come before those of
    another kind.
    """
    if field in LAST:
        bound = count - bound
    elif field in FIRST_INCLUSIVE:
        bound -= 1
    elif field in SECTIONS:
        bound -= sum(getattr(config, before) for before in SECTIONS[: SECTIONS.index(field)])
    setattr(config, field, bound)


def _is_size(entries: Sequence[Any]) -> bool:
    """Whether the entries are numbers of which there may be as many as layers; a switch, 0 or 1,
    is none.
    """
    return any(isinstance(entry, int | float) and entry not in (0, 1) for entry in entries)


def _first_of_each(kinds: list[tuple]) -> list[int]:
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def _aligned(wanted: list[int], period: int) -> list[int]:
    """``wanted`` and layers between them, so that each stands at a new index that is its own up
    to multiples of the period.
    """
    kept: list[int] = []
    for index in wanted:
        while (index - len(kept)) % period:
            kept.append(kept[-1] + 1 if kept else 0)
        kept.append(index)
    return kept
