"""Peers of ``several_cards.py``: transformers' model under torch's FSDP2, as accelerate wraps it,
with what makes it faster.

A way is ``fsdp2`` and, in any order behind it, ``-compile`` (each layer by torch.compile),
``-liger`` (Liger's kernels and its fused loss) and ``-recompute`` (each layer again in the backward
pass). Weights, gradients on the wire and states are bf16. Documents of one length are rows of a
batch, so nothing is padded or packed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from peers.ways import FLASH_ATTENTION
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

WAY = "fsdp2"
PARTS = {"compile", "liger", "recompute"}


def is_peer(way: str) -> bool:
    return way.split("-")[0] == WAY


def parts_of(way: str) -> set[str]:
    """Raises ValueError where the way has an unknown part."""
    parts = set(way.split("-")[1:])
    if unknown := parts - PARTS:
        raise ValueError(
            f"{way}: no part {', '.join(sorted(unknown))}; there are {', '.join(sorted(PARTS))}"
        )
    return parts


def wrapped(model: Any, way: str) -> Any:
    """The model in shards, in training mode."""
    parts = parts_of(way)
    if "liger" in parts:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    layers = model.get_decoder().layers
    for number, layer in enumerate(layers):
        if "recompute" in parts:  # within what is compiled, as torchtitan does
            layer = layers[number] = checkpoint_wrapper(layer)
        if "compile" in parts:
            layer.compile()
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=False)
    return model.train()


def choose_attention(model: Any, ids: Tensor) -> str:
    """The first of transformers' flash attentions that trains here, else sdpa; the model is left
    with it.

    Args:
        ids: of a short document.
    """
    first = next(model.get_decoder().layers[0].parameters())
    for name in FLASH_ATTENTION if ids.is_cuda else ():
        try:
            model.set_attn_implementation(name)
            torch.autograd.grad(model(input_ids=ids, labels=ids, use_cache=False).loss, first)
            return name
        except Exception as error:
            print(f"{name} did not run: {type(error).__name__}: {error}", flush=True)
    model.set_attn_implementation("sdpa")
    return "sdpa"


def train(
    model: Any, way: str, batches: list[Any], fields: dict[str, Any], compared: int, warm_up: int
) -> dict[str, Any]:
    """Train a step a batch; what ``several_cards.py`` keeps of it.

    Args:
        batches: ``Batch`` of this rank, of documents of one length.
        fields: of the configuration that our arms have.
        compared: first steps whose losses and norms are handed in.
        warm_up: further steps before those that are timed.
    """
    device = next(model.parameters()).device
    attention = choose_attention(model, _rows(batches[0], device)[0][:1, :256])
    model = wrapped(model, way)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=fields["learning_rate"], fused=True, weight_decay=0.0
    )
    losses = []
    norms = []
    marks = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number, batch in enumerate(batches):
        ids, labels = _rows(batch, device)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number < compared:
            mean = loss.detach().float().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
            norms.append(float(norm.full_tensor()))
        marks.append(_mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    times = [_between(before, after) for before, after in zip(marks, marks[1:])][
        compared + warm_up - 1 :
    ]
    return {"losses": losses, "grad_norms": norms, "seconds": times, "attention": attention}


def _rows(batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and labels ``[documents, length]`` as transformers shifts them itself."""
    ids = batch.input_ids.view(-1, batch.max_seqlen).to(device, non_blocking=True)
    return ids, ids


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: Any, after: Any) -> float:
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000
