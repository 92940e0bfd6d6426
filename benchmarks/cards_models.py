"""Models and batches of ``several_cards.py``: drawn at random, on the device, the same in every
way and on every rank.
"""

from __future__ import annotations

from typing import Any

from cards_rows import TINY, Row


def sizes_of(row: Row, tiny: bool) -> dict[str, Any]:
    return {**row.sizes, **TINY} if tiny else row.sizes


def build(row: Row, tiny: bool, device: Any, ranks: Any, way: str) -> Any:
    """The model on its device, weights drawn with one seed on every rank."""
    import torch
    import transformers

    from chronicals.models import quantise_layers

    torch.manual_seed(0)
    config = getattr(transformers, row.config_class)(**sizes_of(row, tiny))
    if row.base == "codes":
        return drawn_in_codes(config, device, ranks, way)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if row.base == "nf4":
        quantise_layers(model)
    return model


def drawn_in_codes(config: Any, device: Any, ranks: Any, way: str) -> Any:
    """A model whose frozen layers are random codes of NF4, drawn on the device; in shards where
    weights are, so that no rank ever has them whole."""
    import torch
    import transformers
    from torch import nn

    from chronicals.distributed import shard_frozen
    from chronicals.memory import decoder_layers
    from chronicals.models.four_bits import linear_layers
    from chronicals.quantization import Linear4bit, Packed

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    numbers = {layer: number for number, layer in enumerate(linear_layers(model).values())}

    def rows(layer: nn.Linear, rank: int, count: int, dtype: torch.dtype) -> Packed:
        return drawn(layer, numbers[layer], rank, count, dtype, device)

    if way == "weights":
        shard_frozen(decoder_layers(model), ranks, ranks.count, device, torch.bfloat16, rows)
    else:
        for path, layer in linear_layers(model).items():
            model.set_submodule(
                path, Linear4bit(drawn(layer, numbers[layer], 0, 1, torch.bfloat16, device))
            )
    generator = torch.Generator(device).manual_seed(1)
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        if "inv_freq" in module._buffers:
            fresh = type(module)(config=config).to(device)
            for name, buffer in fresh._buffers.items():
                module._buffers[name] = buffer
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
                value = (
                    value.fill_(1.0)
                    if parameter.ndim == 1
                    else value.normal_(0, 0.02, generator=generator)
                )
                made[id(parameter)] = nn.Parameter(value)
            module._parameters[name] = made[id(parameter)]
    return model


PARTS = 2
"""Parts that codes are drawn in, so that one rank of two can draw its own."""


def drawn(layer: Any, number: int, rank: int, count: int, dtype: Any, device: Any) -> Any:
    """Random codes of a rank's rows, the same whoever has them, of values with a deviation of
    about 0.02.
    """
    import torch

    from chronicals.kernels.nf4 import SCALE_BLOCK, Scales, dynamic_code
    from chronicals.quantization import Packed
    from chronicals.quantization.nf4 import BLOCK

    outputs = layer.out_features
    width = layer.in_features
    if PARTS % count:
        raise ValueError(f"codes are drawn in {PARTS} parts, which {count} processes cannot share")
    parts = range(rank * PARTS // count, (rank + 1) * PARTS // count)
    values = outputs // PARTS * width
    codes = []
    absmax = []
    absmax2 = []
    for part in parts:
        generator = torch.Generator(device).manual_seed(1000 + number * PARTS + part)
        codes.append(
            torch.randint(
                0, 256, (values // 2,), dtype=torch.uint8, device=device, generator=generator
            )
        )
        absmax.append(
            torch.randint(
                0, 256, (values // BLOCK,), dtype=torch.uint8, device=device, generator=generator
            )
        )
        blocks = -(-values // (BLOCK * SCALE_BLOCK))
        absmax2.append(torch.full((blocks,), 0.005, device=device))
    scales = Scales(
        torch.cat(absmax),
        torch.cat(absmax2),
        dynamic_code(device),
        torch.tensor(0.03, device=device),
    )
    return Packed(torch.cat(codes), scales, (outputs // PARTS * len(parts), width), dtype)


def batch_of(number: int, packs: int, width: int, vocabulary: int) -> Any:
    """Documents of ``width`` tokens, drawn by their number."""
    import torch

    from chronicals.batch import IGNORED, Batch

    tokens = packs * width
    ids = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(number))
    targets = ids.roll(-1)
    targets[width - 1 :: width] = IGNORED
    bounds = torch.arange(0, tokens + 1, width, dtype=torch.int32)
    positions = torch.arange(width).repeat(packs)
    found = Batch(ids, targets, positions, bounds, width, trained=tokens - packs)
    return found.pin_memory() if torch.cuda.is_available() else found


def step_of(
    number: int, first: int, count: int, together: int, packs: int, width: int, vocabulary: int
) -> Any:
    """The batches ``first`` to ``first + count`` of those of a step, of which there are
    ``together``.
    """
    from chronicals.data.packs.steps import Step

    batches = [
        batch_of(number * together + first + n, packs, width, vocabulary) for n in range(count)
    ]
    targets = together * packs * (width - 1)
    tokens = together * packs * width
    counts = {
        "targets": targets,
        "tokens": tokens,
        "documents": together * packs,
        "items": together * packs,
        "first_targets": targets,
        "packs": together * packs,
        "slots": tokens,
    }
    return Step(batches, counts, None, None)


def dealt(step: Any, ranks: Any) -> Any:
    """What this rank has of a step, of which every document is split where cards share them."""
    import dataclasses

    import numpy as np

    from chronicals.data.packs.dealing import part_of
    from chronicals.data.packs.strategies import SPLIT

    if ranks.context is None:
        return step
    batches = [
        part_of(batch, np.full(len(batch.cu_seqlens) - 1, SPLIT), ranks.context)
        for batch in step.batches
    ]
    on_card = ranks.device.type == "cuda"
    return dataclasses.replace(
        step, batches=[batch.pin_memory() for batch in batches] if on_card else batches
    )
