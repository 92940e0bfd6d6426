"""Selects the layers that a twin keeps, and shortens the configuration fields that describe layers.

A configuration states the kind of a layer in five ways:

- a list with one entry a layer, such as ``layer_types``;
- a list of the indices of some layers, such as ``mlp_only_layers``;
- the number of first or last layers that are of another kind, such as ``first_k_dense_replace`` and
  ``num_kv_shared_layers``;
- a period, such as ``attn_layer_period``;
- sizes that differ in some layers, ``per_layer_config``.

A twin has a layer of every kind. If one of these fields keeps its old value in a shortened model,
the model cannot be built, or it lacks its experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Fields with the number of layers; the first that a configuration has is used."""

COUNTED_TOO = ("num_blocks",)
"""Further fields in which some classes repeat that number."""

PER_STACK = "num_layers_per_stack"
"""Field with the number of layers in a stack that a class runs several times.

The number of layers of such a model counts every run.
"""

STACKS = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
"""Fields with the number of layers of encoder or decoder, whose layers are all of one kind."""

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
"""Fields with indices of layers, and the index of the first layer in them."""

FIRST = (
    "first_k_dense_replace",
    "loop_layer_index_end",
    "loop_layer_index_start",
    "max_window_layers",
    "moe_layer_start_index",
    "num_dense_layers",
)
"""Fields with the index of the first layer of another kind."""

FIRST_INCLUSIVE = ("moe_layer_end_index",)
"""Fields with the index of the last layer of a kind."""

LAST = ("num_kv_shared_layers",)
"""Fields with the number of last layers that are of another kind."""

LAYER_SECTIONS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
"""Fields with the number of layers in consecutive sections, which together are all layers."""

PERIODS = (
    "attn_layer_period",
    "decoder_sparse_step",
    "expert_layer_period",
    "moe_layer_interval",
    "n_layers_per_attn_res_block",
)
"""Fields with a period from which the class computes a layer's kind by its index.

A period from which a configuration makes a list of layers, such as ``sliding_window_pattern``, adds
nothing to that list and is not here.
"""

NO_LAYERS = (
    "begin_suppress_tokens",
    "block_types",
    "eos_token_id",
    "languages",
    "mlp_multipliers",
    "ssm_multipliers",
    "time_step_limit",
)
"""Fields with a list whose length may equal the number of layers by chance."""

SHARING = ("hybrid",)
"""Kinds in ``layers_block_type`` that share a module with the next layer of their kind.

A twin needs two layers of such a kind.
"""

MIN_LAYERS = 2

MAX_LAYERS = 8
"""Layers of a twin without ``layer_types``: one period of hybrids whose kinds depend on the index.

For a model with ``layer_types``, the number of layers above which none is added for its sizes only.
"""


@dataclass(frozen=True)
class Layers:
    """The statements of a configuration about its layers.

    Attributes:
        count: number of layers.
        per_layer: by field, one entry a layer.
        indices: by field, the indices of some layers, from 0.
        bounds: by field, the number of layers before those of another kind.
        overrides: by layer, the fields that differ in it.
        period: period of the kinds that the class computes from the index.
    """

    count: int
    per_layer: dict[str, list[Any] | tuple[Any, ...]]
    indices: dict[str, list[int]]
    bounds: dict[str, int]
    overrides: dict[int, dict[str, Any]]
    period: int

    @classmethod
    def of(cls, config: Any, overrides: dict[int, dict[str, Any]]) -> Layers | None:
        """Read the configuration of a language model; return None if it has no number of layers."""
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
        numbers = {
            field: value
            for field, value in fields.items()
            if isinstance(value, int) and not isinstance(value, bool)
        }
        bounds = {field: numbers[field] for field in FIRST if field in numbers}
        bounds |= {field: numbers[field] + 1 for field in FIRST_INCLUSIVE if field in numbers}
        bounds |= {field: count - numbers[field] for field in LAST if field in numbers}
        sections = [field for field in LAYER_SECTIONS if field in numbers]
        for place, field in enumerate(sections):
            bounds[field] = sum(numbers[before] for before in sections[: place + 1])
        return cls(count, per_layer, indices, bounds, overrides, math.lcm(*periods))

    def type_of(self, index: int) -> tuple:
        """Return the kind of a layer, without its sizes."""
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
        """Return the kind of a layer, with its sizes."""
        sizes = [entries[index] for entries in self.per_layer.values() if _is_size(entries)]
        return (
            *self.type_of(index),
            *map(str, sizes),
            str(sorted(self.overrides.get(index, {}).items())),
        )

    def kept(self) -> list[int]:
        """Return the indices of the layers that a twin keeps: one of every kind.

        Layers in between are added until each kept layer has a new index of the same kind.
        """
        types = [self.type_of(index) for index in range(self.count)]
        wanted = [types.index(kind) for kind in dict.fromkeys(types)]
        # Of layers that share a module, the first two of the kind are kept.
        for entries in self.per_layer.values():
            for shared in SHARING:
                wanted += [index for index, entry in enumerate(entries) if entry == shared][:2]
        # The last layer of each type before those of LAST hands its keys and values on to them.
        for field in LAST:
            before = types[: self.bounds.get(field, 0)]
            wanted += [len(before) - 1 - before[::-1].index(kind) for kind in set(before)]
        kinds = [self.kind_of(index) for index in range(self.count)]
        for layer_kind in dict.fromkeys(kinds):
            index = kinds.index(layer_kind)
            if index not in wanted and len(wanted) < MAX_LAYERS:
                wanted.append(index)
        if any(entries and isinstance(entries[0], str) for entries in self.per_layer.values()):
            others = [index for index in range(self.count) if index not in wanted]
            wanted += others[: max(0, MIN_LAYERS - len(wanted))]
        else:
            wanted += range(min(MAX_LAYERS, self.count))
        kept: list[int] = []
        for index in sorted(set(wanted)):
            while (index - len(kept)) % self.period:
                kept.append(kept[-1] + 1 if kept else 0)
            kept.append(index)
        return kept


def cut_layers(config: Any, overrides: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Shorten the configuration of a language model to few layers, at least one of every kind.

    Args:
        config: configuration of the text model; changed in place.
        overrides: by layer, the fields that differ in it (``per_layer_config``).

    Returns:
        The overrides of the layers that are left, by new index.
    """
    stacks = [name for name in STACKS if isinstance(vars(config).get(name), int)]
    for name in stacks:
        setattr(config, name, min(getattr(config, name), 2))
    layers = Layers.of(config, overrides)
    if layers is None or stacks:
        return {}
    if isinstance(getattr(config, PER_STACK, None), int):
        runs = layers.count // getattr(config, PER_STACK)
        setattr(config, PER_STACK, min(getattr(config, PER_STACK), 2))
        config.num_hidden_layers = runs * getattr(config, PER_STACK)
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
        # So many of the kept layers come first, said in the convention of each field.
        first = sum(index < bound for index in kept)
        if field in LAST:
            first = len(kept) - first
        elif field in FIRST_INCLUSIVE:
            first -= 1
        elif field in LAYER_SECTIONS:
            before = LAYER_SECTIONS[: LAYER_SECTIONS.index(field)]
            first -= sum(getattr(config, section) for section in before)
        setattr(config, field, first)
    return {new: overrides[index] for new, index in enumerate(kept) if index in overrides}


def settable(config: Any, name: str) -> bool:
    """Return False for a property that is computed from other fields."""
    owner = getattr(type(config), config.attribute_map.get(name, name), None)
    return not isinstance(owner, property) or owner.fset is not None


def _is_size(entries: Sequence[Any]) -> bool:
    """Return True if the entries are sizes or counts; entries that are all 0 or 1 are switches."""
    return any(isinstance(entry, int | float) and entry not in (0, 1) for entry in entries)
