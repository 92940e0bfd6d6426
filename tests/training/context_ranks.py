"""One of several processes that share packs, or train alone what they train together: the program
of ``test_context.py``.

``python context_ranks.py FOLDER CASE …``: the first rank writes what each case returns to
``CASE.pt``.
"""

import dataclasses
import itertools
import os
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import families
import preferences
import runs
import tiny
from chronicals.attention import attend_split, document_attention
from chronicals.attention import context as context_module
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data.packs.dealing import NOBODY, part_of, rank_share
from chronicals.data.packs.strategies import SPLIT
from chronicals.distributed import Mesh
from chronicals.memory import recompute
from chronicals.models import PresentedModel
from chronicals.patching import patch_parts, tile_layers
from chronicals.training import ChronicalsTrainer

FIELDS = {
    "batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_seq_length": 96,
    "max_steps": 3,
    "validation_split": 0.2,
    "eval_steps": 3,
    "save_steps": None,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "trackers": [],
    "pack_parts": 2,
}
LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}
PAIRS = {"max_seq_length": 256, "adam_epsilon": 1e-5}
"""Of objectives over whole documents, whose gradients nearly cancel at many weights, which Adam
would make large.
"""

RUNS: dict[str, tuple[Any, dict]] = {
    "all weights": (tiny.llama, {}),
    "LoRA": (tiny.llama, LORA),
    "one key head": (lambda: tiny.llama(num_key_value_heads=1), {}),
    "pretraining": (tiny.llama, {"objective": "pretraining"}),
    "recomputing": (tiny.llama, {"memory": ["recompute_layers"]}),
    "states on every rank": (tiny.llama, {"sharding": "none"}),
    "windows": (lambda: families.build("gemma2", vocab_size=300), {}),
    "distill": (tiny.llama, {"objective": "distill"}),
    "in order": (tiny.llama, {"packing_strategy": "in-order"}),
    "two packs": (
        tiny.llama,
        {"batch_size": 2, "gradient_accumulation_steps": 2, "max_documents": 6},
    ),
    "all documents whole": (tiny.llama, {"max_seq_length": 256}),
    "keys": (lambda: tiny.llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48), {}),
    "keys, as asked": (tiny.llama, {"context_heads": 1}),
    "keys, recomputing": (tiny.llama, {"context_heads": 1, "memory": ["recompute_layers"]}),
    "weights divided": (tiny.llama, {"sharding": "weights"}),
    "LoRA over divided weights": (tiny.llama, {**LORA, "sharding": "weights"}),
    "keys, windows": (lambda: families.build("gemma2", vocab_size=300), {"context_heads": 1}),
    **{name: (tiny.llama, {"objective": name, **PAIRS}) for name in ("dpo", "kto", "reward")},
}
"""What makes the model of a run, and its fields."""

ROWS = {"dpo": preferences.rows, "reward": preferences.rows, "kto": preferences.judged_rows}
"""By objective, where they are no chats."""

REFUSED: dict[str, tuple[Any, dict]] = {
    "dpo": (tiny.llama, {"objective": "dpo"}),
    "heads": (
        lambda: tiny.llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48),
        {"context_heads": 2},
    ),
    "padded rows": (lambda: families.build("mamba", vocab_size=300), {}),
    "router loss": (
        lambda: families.mixture("mixtral", vocab_size=300, output_router_logits=True).train(),
        {},
    ),
    "odd tokens": (tiny.llama, {"max_seq_length": 98}),
    "parts": (tiny.llama, {"pack_parts": 3}),
    "layers skipped": (lambda: opt(), {}),
    "in the backward pass": (tiny.llama, {"memory": ["reduce_in_backward"]}),
    "tokens mixed": (lambda: mixing(), {}),
}


def opt() -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    return OPTForCausalLM(OPTConfig(vocab_size=300, dropout=0.0, layerdrop=0.5, **sizes))


def mixing() -> Any:
    """A model whose MLPs see the token before, which the first rank's part does not show."""
    model = tiny.llama()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, out: out + out.roll(1, dims=-2))
    return model


def train(
    made: Any, fields: dict, folder: Path, ranks: Mesh, resume: Path | bool = False
) -> dict[str, Any]:
    """Losses, norms, the held-out loss and the weights of a run of as many packs as two data
    ranks take.
    """
    torch.manual_seed(0)
    shares = dist.get_world_size() if ranks.count > 1 else 1
    data_ranks = max(shares // 2, 1)
    fields = {
        **FIELDS,
        "gradient_accumulation_steps": 4 // data_ranks,
        **fields,
        "context_parallel": min(shares, 2),
    }
    if shares == 1:
        fields.pop("context_heads", None)
    if fields.get("objective") == "distill":
        fields["distill"] = {"teacher": str(folder / "teacher"), "teacher_precision": "fp32"}
    place = folder / f"rank{ranks.rank}-{'together' if ranks.count > 1 else 'alone'}"
    config = runs.config(place, **{**fields, "cache_dir": folder / "tokens"})
    if resume:  # with the passes of the steps before, which the checkpoint alone says
        left = config.explicit - {"gradient_accumulation_steps"}
        config = ChronicalsConfig(**{name: getattr(config, name) for name in left})
    with patch.object(Mesh, "current", return_value=ranks):
        trainer = ChronicalsTrainer(made(), tiny.tokenizer(), config)
    rows = ROWS.get(fields.get("objective", "sft"), tiny.chat_rows)(30)
    result = trainer.train(rows, resume=resume)
    if not ranks.writer:
        return {}
    steps = torch.tensor(runs.trajectory(place), dtype=torch.float64)
    return {"steps": steps, "held out": result.evaluation.loss, "weights": runs.weights(place)}


def resumed(folder: Path, ranks: Mesh) -> dict[str, Any]:
    """A run of which two processes that share packs make the first steps, and one the last; and
    one that one makes.
    """
    train(tiny.llama, {"max_steps": 2, "eval_steps": 2, "save_steps": 2}, folder, ranks)
    if not ranks.writer:
        return {}
    begun = folder / "rank0-together" / "run"
    found = train(tiny.llama, {}, folder / "resumed", Mesh(), resume=begun)
    return {"together": found, "alone": train(tiny.llama, {}, folder / "whole", Mesh())}


def refusal(made: Any, fields: dict, folder: Path, ranks: Mesh) -> str:
    try:
        train(made, fields, folder, ranks)
    except (ConfigurationError, ValueError) as error:
        return str(error)
    return ""


OPTIONS: dict[str, tuple[tuple[int, int], dict]] = {
    "plain": ((4, 2), {}),
    "all heads": ((4, 4), {}),
    "one key head": ((4, 1), {}),
    "window": ((4, 2), {"window": 5}),
    "softcap": ((8, 4), {"softcap": 3.0}),
    "sinks": ((4, 2), {"sinks": True}),
    "narrow values": ((4, 4), {"narrow": 8}),
    "keys": ((6, 3), {"inner": 1}),
    "keys, window": ((4, 2), {"inner": 1, "window": 5}),
    "keys, softcap": ((4, 4), {"inner": 1, "softcap": 3.0}),
    "keys, sinks": ((6, 2), {"inner": 1, "sinks": True}),
    "keys, narrow values": ((3, 3), {"inner": 1, "narrow": 8}),
    "keys, two heads at a time": ((9, 3), {"inner": 1, "at_once": 2}),
    "keys, kept": ((4, 2), {"inner": 1, "kept": True}),
    "keys, kept, sinks": ((6, 2), {"inner": 1, "kept": True, "sinks": True, "at_once": 1}),
    "both": ((4, 2), {"inner": 2}),
    "both, window": ((4, 1), {"inner": 2, "window": 5}),
    "both, sinks": ((6, 2), {"inner": 2, "sinks": True}),
}
"""Query and key heads, and what attention is asked for."""


class Kept(torch.autograd.Function):
    """Attention that keeps its inputs as they are for the backward pass, as libraries do."""

    keys: ClassVar[list[weakref.ref]] = []
    """Those that were gathered."""

    @classmethod
    def attend(cls, attend: Any, q: Any, k: Any, v: Any, *given: Any) -> torch.Tensor:
        if len(k) > len(q):
            cls.keys += [weakref.ref(k), weakref.ref(v)]
        return cls.apply(attend, given[:4], q, k, v, *given[4:])

    @staticmethod
    def forward(ctx: Any, attend: Any, bounds: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.attend = attend
        ctx.bounds = bounds
        ctx.save_for_backward(*tensors)
        return attend(*tensors[:3], *bounds, *tensors[3:])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.attend(*given[:3], *ctx.bounds, *given[3:])
        return None, None, *torch.autograd.grad(out, given, dy)


LENGTHS = (1, 20, 3, 30, 5, 2, 19)
RANKS = (0, SPLIT, 1, SPLIT, 1, 0, SPLIT)
"""Of documents, and which rank has each."""
REST = 36
"""Filler."""


def attention(heads: tuple[int, int], options: dict, ranks: Mesh) -> dict[str, list[torch.Tensor]]:
    """This rank's share of outputs and gradients in fp64, and what they are of the whole; sinks'
    gradients are summed.
    """
    torch.manual_seed(3)
    options = dict(options)
    width = 16
    context = ranks.sharing_packs(ranks.count, options.pop("inner", None)).context
    sinks = [torch.randn(heads[0], dtype=torch.float64)] if options.pop("sinks", False) else []
    widths = width, width, options.pop("narrow", width)
    tokens = sum(LENGTHS) + REST
    inputs = [
        torch.randn(tokens, n, w, dtype=torch.float64)
        for n, w in zip((heads[0], heads[1], heads[1]), widths)
    ]
    dy = torch.randn(tokens, heads[0], widths[2], dtype=torch.float64)
    bounds = torch.tensor([0, *itertools.accumulate((*LENGTHS, REST))], dtype=torch.int32)
    share = rank_share(bounds.numpy(), np.array([*RANKS, NOBODY]), context)
    at = torch.as_tensor(share.rows).clamp(min=0)
    there = torch.as_tensor(share.rows >= 0)

    def attend(q, k, v, *given):
        sinks = given[4] if len(given) > 4 else None
        return document_attention(
            q, k, v, *given[:4], sinks=sinks, backend="per-document", **options
        )

    if options.pop("kept", False):
        attend = partial(Kept.attend, attend)
    a_head = (
        (1 if share.split.keys is None else len(share.split.keys.index))
        * (widths[0] + widths[2])
        * 8
    )
    context_module.GATHER_BYTES = options.pop("at_once", 10) * a_head
    whole = [x.clone().requires_grad_() for x in (*inputs, *sinks)]
    expected = attend(*whole[:3], bounds, 40, None, None, *whole[3:])
    dy[sum(LENGTHS) :] = 0.0
    grads = torch.autograd.grad(expected, whole, dy)
    parts = [x[at].clone().requires_grad_() for x in inputs]
    own_sinks = [x.clone().requires_grad_() for x in sinks]
    Kept.keys.clear()
    out = attend_split(attend, *parts, share.split, *own_sinks)
    assert not any(reference() is not None for reference in Kept.keys), "what was gathered is kept"
    found = torch.autograd.grad(out, [*parts, *own_sinks], dy[at] * there[:, None, None])
    for gradient in found[len(inputs) :]:
        dist.all_reduce(gradient)
    same = [x[at][there] for x in (expected, *grads[: len(inputs)])] + list(grads[len(inputs) :])
    found = [x[there] for x in (out, *found[: len(inputs)])] + list(found[len(inputs) :])
    return {"found": [x.detach() for x in found], "expected": [x.detach() for x in same]}


def fused(ranks: Mesh, in_tiles: bool) -> dict[str, list[torch.Tensor]]:
    """Gradients of layers that run fused, summed over the shares, and those of the whole.

    Those of the shares may run in tiles, with as many key heads at a time as must attend together.
    """
    torch.manual_seed(0)
    lengths = (21, 3, 7, 9)
    shared = np.array([SPLIT, 0, 1, NOBODY])
    sums = []
    model = families.build("llama")
    batch = families.documents_batch(lengths)
    batch = dataclasses.replace(batch, cu_seqlens=batch.cu_seqlens[:-1])
    share = rank_share(batch.cu_seqlens.numpy(), shared, ranks.context)
    assert patch_parts(model, whole_layers=True).counts()
    tile, rows = recompute.TILE, recompute.GROUP_ROWS
    for given, counts in (
        (batch, np.arange(40) < 31),
        (part_of(batch, shared, ranks.context), share.rows >= 0),
    ):
        with PresentedModel(
            model, packed=True, head_is_read=False
        ).attending_documents() as presented:
            (
                presented.hidden_states(given).sin() * torch.as_tensor(counts)[:, None]
            ).sum().backward()
        sums.append([p.grad.clone() for p in model.get_decoder().parameters()])
        model.zero_grad()
        if in_tiles:
            recompute.TILE, recompute.GROUP_ROWS = 7, 1
            tile_layers(model)
    recompute.TILE, recompute.GROUP_ROWS = tile, rows
    for gradient in sums[1]:
        dist.all_reduce(gradient)
    return {"found": sums[1], "expected": sums[0]}


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = Mesh.current()
    shared = ranks.sharing_packs(min(ranks.count, 2))
    for case in cases:
        kind, name = case.split(": ")
        place = folder / case.replace(": ", "-")
        if kind == "run":
            found = train(*RUNS[name], place if name != "distill" else folder, ranks)
            if ranks.writer:
                found = {
                    "together": found,
                    "alone": train(*RUNS[name], place if name != "distill" else folder, Mesh()),
                }
        elif kind == "refused":
            found = refusal(*REFUSED[name], place, ranks)
        elif kind == "resumed":
            found = resumed(place, ranks)
        elif kind == "attention":
            found = attention(*OPTIONS[name], ranks)
        else:
            found = fused(shared, name == "tiles")
        if ranks.writer:
            torch.save(found, folder / f"{case}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)
