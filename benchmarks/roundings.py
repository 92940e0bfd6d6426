"""Which roundings part generation from a training step, by a model of both passes on the CPU.

    python benchmarks/roundings.py OUT.json [--model 0.5b] [--layers 24] [--tokens 384] [--seeds 4]

A decoder's pass over random tokens in fp32, in which named tensors are rounded to bf16 where the
fused layers round them; weights are random. The step rounds all of them. So does generation, whose
products add in another order, which is a random 1e-7 of their size here; each arm keeps some of
its tensors in fp32. Printed are the mean difference of the log-probabilities of drawn tokens between
both passes (the gap), and what the step differs from fp32, of which the gap is at most 1 (the bar).

Shapes: T tokens, D model width, H query heads, K key heads, W head width.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from recipes_on_card import model_of
from torch import Tensor

from chronicals.benchmark.shapes import zipf_ids

OTHER_ORDER = 1e-7
"""Size of what another order of the additions changes, relative to a product's deviation."""

RESIDUAL = frozenset({"residual"})
BRANCHES = frozenset({"output", "down"})
EVERY = RESIDUAL | BRANCHES | {"norm", "qkv", "rope", "weights", "attended", "gate_up", "unit"}
"""Tensors that a step rounds in each layer, beside its logits."""

FIRST = (1, 8)
"""Layers from which the residual stays in fp32."""


@dataclass(frozen=True)
class Roundings:
    """The roundings of a pass.

    Attributes:
        left_out: tensors that stay in fp32.
        first: first layer in which they do.
        order: relative size of the products' random differences.
        splits: parts of a product's inner size that are rounded before they are added.
        rounds: False for a pass in fp32.
    """

    left_out: frozenset[str] = frozenset()
    first: int = 0
    order: float = 0.0
    splits: int = 1
    rounds: bool = True

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        """Return a tensor as the pass hands it on."""
        is_wide = not self.rounds or (layer >= self.first and name in self.left_out)
        return x if is_wide else x.bfloat16().float()


class RandomPass:
    """Forward passes of a Llama or Qwen 2 with random weights.

    Args:
        model: with weights in bf16.
    """

    def __init__(self, model: Any):
        self.model = model
        self.generator = torch.Generator()

    def log_probabilities(self, ids: Tensor, how: Roundings) -> Tensor:
        """Return those of all tokens behind each of ``ids`` ``[T]``, ``[T, V]``."""
        decoder = self.model.model
        x_TD = decoder.embed_tokens.weight[ids].float()
        positions = torch.arange(len(ids))[None]
        tables = decoder.rotary_emb(torch.zeros(1, 1, 1), positions)
        tables_TW = [table[0].bfloat16().float() for table in tables]
        for number, layer in enumerate(decoder.layers):
            normed = self._normed(layer.input_layernorm, x_TD, number, how)
            branch = self._attention(layer.self_attn, normed, tables_TW, number, how)
            x_TD = how("residual", number, x_TD + branch)
            normed = self._normed(layer.post_attention_layernorm, x_TD, number, how)
            branch = self._mlp(layer.mlp, normed, number, how)
            x_TD = how("residual", number, x_TD + branch)
        last = len(decoder.layers)
        narrow = replace(how, left_out=how.left_out - RESIDUAL)
        x_TD = narrow("residual", last, x_TD)
        states = self._normed(decoder.norm, x_TD, last, narrow)
        return self._product(self.model.lm_head, states, "logits", last, how).log_softmax(-1)

    def _attention(
        self, part: Any, x_TD: Tensor, tables_TW: list[Tensor], layer: int, how: Roundings
    ) -> Tensor:
        width = part.head_dim
        q, k, v = (
            self._product(one, x_TD, "qkv", layer, how).unflatten(1, (-1, width)).transpose(0, 1)
            for one in (part.q_proj, part.k_proj, part.v_proj)
        )
        cos, sin = tables_TW
        q, k = (how("rope", layer, x * cos + turned(x) * sin) for x in (q, k))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * part.scaling
        scores += torch.full_like(scores[0], float("-inf")).triu(1)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = how("weights", layer, weights) @ v / weights.sum(-1, keepdim=True)
        attended = how("attended", layer, out).transpose(0, 1).flatten(1)
        return self._product(part.o_proj, attended, "output", layer, how)

    def _mlp(self, part: Any, x_TD: Tensor, layer: int, how: Roundings) -> Tensor:
        gate, up = (
            self._product(one, x_TD, "gate_up", layer, how)
            for one in (part.gate_proj, part.up_proj)
        )
        return self._product(
            part.down_proj, how("unit", layer, F.silu(gate) * up), "down", layer, how
        )

    def _normed(self, norm: Any, x_TD: Tensor, layer: int, how: Roundings) -> Tensor:
        scale = torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return how("norm", layer, x_TD * scale * norm.weight.float())

    def _product(self, part: Any, x: Tensor, name: str, layer: int, how: Roundings) -> Tensor:
        weight = part.weight.float()
        if how.splits > 1 and name in ("output", "down"):  # few columns, of many additions
            parts = zip(x.chunk(how.splits, 1), weight.chunk(how.splits, 1))
            out = torch.stack([(a @ b.t()).bfloat16().float() for a, b in parts]).sum(0)
        else:
            out = x @ weight.t()
        if how.order:
            out += how.order * out.std() * torch.randn(out.shape, generator=self.generator)
        return how(name, layer, out)


def turned(x: Tensor) -> Tensor:
    """Return the halves of the last dimension as the rotation pairs them."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def arms_of(layers: int) -> dict[str, Roundings]:
    """Return the roundings of generation by what is in fp32."""
    usual = Roundings(order=OTHER_ORDER)

    def wide(names: Iterable[str], first: int = 0) -> Roundings:
        return replace(usual, left_out=frozenset(names), first=first)

    return {
        "nothing: as the step": usual,
        "weights of attention": wide({"weights"}),
        "attended": wide({"attended"}),
        "norms": wide({"norm"}),
        "branches": wide(BRANCHES),
        "the residual": wide(RESIDUAL),
        **{f"the residual from layer {n}": wide(RESIDUAL, n) for n in FIRST if n < layers},
        **{
            f"residual and branches from layer {n}": wide(RESIDUAL | BRANCHES, n)
            for n in FIRST[-1:]
            if n < layers
        },
        "everything": wide(EVERY),
        "nothing, 4 splits rounded": replace(usual, splits=4),
    }


@torch.no_grad()
def measured(passes: RandomPass, tokens: int, seed: int) -> dict[str, Any]:
    """Return the gap of each arm, and what the step differs from fp32."""
    passes.generator.manual_seed(seed)
    vocabulary = passes.model.config.vocab_size
    draws = torch.rand(tokens, generator=passes.generator, dtype=torch.float64)
    ids = torch.tensor(zipf_ids(draws.numpy(), vocabulary))
    true = passes.log_probabilities(ids, Roundings(rounds=False))
    drawn = torch.multinomial(true.exp(), 1, generator=passes.generator)

    def of_drawn(rows: Tensor) -> Tensor:
        return rows.gather(1, drawn)[:, 0]

    step = of_drawn(passes.log_probabilities(ids, Roundings()))
    found = {"from_fp32": float((step - of_drawn(true)).abs().mean()), "gaps": {}}
    for name, how in arms_of(len(passes.model.model.layers)).items():
        ours = of_drawn(passes.log_probabilities(ids, how))
        found["gaps"][name] = float((ours - step).abs().mean())
    return found


def show(seeds: list[dict[str, Any]]) -> None:
    """Print the gaps, of what the step differs from fp32."""
    print(f"the step from fp32: {sum(one['from_fp32'] for one in seeds) / len(seeds):.5f}")
    for name in seeds[0]["gaps"]:
        shares = [one["gaps"][name] / one["from_fp32"] for one in seeds]
        each = " ".join(f"{share:.3f}" for share in shares)
        print(f"{name:40s} {sum(shares) / len(shares):.3f}   {each}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="0.5b", help="a shape of recipes_on_card.py")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    model = model_of(given.model, given.tokens, given.tiny).eval()
    if given.layers:
        del model.model.layers[given.layers :]
    passes = RandomPass(model)
    seeds = list[dict[str, Any]]()
    for seed in range(given.seeds):
        seeds.append(measured(passes, given.tokens, seed))
        about = {"model": given.model, "layers": len(model.model.layers), "tokens": given.tokens}
        given.out.write_text(json.dumps({**about, "seeds": seeds}, indent=1))
        show(seeds)


if __name__ == "__main__":
    main()
