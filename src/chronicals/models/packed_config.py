"""Writes the ``quantization_config`` by which other libraries load a saved packed model.

These libraries are transformers and bitsandbytes.
"""

from __future__ import annotations

from typing import Any

from chronicals.quantization import format_of_files, packed_layers, packed_modules
from chronicals.quantization.bitsandbytes import has_foreign_layers, packed_description

__all__ = ["describe_packed", "packed_description"]


def describe_packed(model: Any) -> None:
    """Add ``quantization_config`` for packed layers, or remove it if no layer is packed.

    An existing one is kept while any layer is packed. Call this after layers were packed or
    unpacked, and before ``save_pretrained``.

    Raises:
        ValueError: layers or experts are in a format that transformers cannot store.
    """
    for path, module in packed_modules(model):
        reason = module.why_not_saved
        if reason is not None:
            raise ValueError(
                f"{module.named_in(path, type(model).__name__)} {reason}; save its adapters, or "
                "what model.merge_and_unload() returns"
            )
    there = getattr(model.config, "quantization_config", None)
    layers = dict(packed_layers(model))
    if layers and there is None:
        first = next(iter(layers.values()))
        described = first.packed.quantization_config(model, layers.keys())
        if described is not None:
            model.config.quantization_config = described
        return
    stated = isinstance(there, dict) and format_of_files(there) is not None
    if stated and not layers and not has_foreign_layers(model):
        del model.config.quantization_config
        vars(model).pop("is_quantized", None)
