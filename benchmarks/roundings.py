"""Which roundings part generation from a training step, by a model of both passes on the CPU.

    python benchmarks/roundings.py OUT.json                        # a small model, all arms
    python benchmarks/roundings.py OUT.json --model 0.5b --seeds 4 --arms step residual-2 before-8

A decoder's pass over a prompt and an answer of random tokens in fp32, in which named tensors are
rounded to bf16 where the fused layers round them; weights are random. The step rounds all of them.
Generation computes the prompt as the step does, but for the order in which products add, which is a
random 1e-7 of their size here, and the answer by decode steps: each arm keeps some of their tensors
in fp32. Weights of attention are rounded relative to a running maximum over tiles of keys, which the
step visits from the last one on, 128 keys at once; decode steps may have other tiles, and keys in
splits, whose maxima are their own.

Printed are the mean difference of the log-probabilities of drawn tokens between both passes (the
gap) beside what the step differs from fp32 (the bar, 1), with the standard error of the gap; what
generation differs from fp32; and the correlation of both passes' errors.

Shapes: T tokens, P of them of the prompt, D model width, H query heads, K key heads, W head width,
S keys, C tiles of keys.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from recipes_on_card import model_of
from torch import Tensor

from chronicals.benchmark.shapes import zipf_ids

SMALL = "small"
"""A model of 24 layers of 256, whose products have the gains of a random 0.5B."""

GAIN = 0.6
"""Standard deviation of a product of normed rows with a random weight of a 0.5B."""

OTHER_ORDER = 1e-7
"""Size of what another order of the additions changes, relative to a product's deviation."""

RESIDUAL = frozenset({"residual"})
BRANCHES = frozenset({"output", "down"})
KEPT = RESIDUAL | BRANCHES
INPUTS = frozenset({"norm", "attended", "unit"})
"""Inputs of products, which are 16 bits on tensor cores."""

EVERY = KEPT | INPUTS | {"qkv", "rope", "weights", "gate_up"}
"""Tensors that a step rounds in each layer, beside its logits."""


@dataclass(frozen=True)
class Tiles:
    """The keys that attention takes at once.

    Attributes:
        keys: keys of a tile, which begins at a multiple of them.
        last_first: whether the last tile is the first one.
        splits: parts of the keys, each with a running maximum of its own; 1 or 2.
    """

    keys: int = 128
    last_first: bool = True
    splits: int = 1

    def maxima(self, scores_HTCS: Tensor, lengths_T: Tensor) -> Tensor:
        """Return the running maximum ``[H, T, C, 1]`` of each tile.

        Args:
            scores_HTCS: scores by tiles, minus infinity for keys that are not seen.
            lengths_T: keys that each query sees.
        """
        highest = scores_HTCS.amax(-1)
        tile = torch.arange(highest.shape[-1])
        whole = highest.amax(-1, keepdim=True)
        found = torch.full_like(highest, float("-inf"))
        each = (lengths_T + self.splits * self.keys - 1) // (self.splits * self.keys)
        for split in range(self.splits):
            mine = (tile >= split * each[:, None]) & (tile < (split + 1) * each[:, None])
            some = highest.masked_fill(~mine, float("-inf"))
            visited = some.flip(-1) if self.last_first else some
            running = visited.cummax(-1).values
            found = torch.where(mine, running.flip(-1) if self.last_first else running, found)
        return torch.where(found.isinf(), whole, found)[..., None]


@dataclass(frozen=True)
class Roundings:
    """The roundings of a pass.

    Attributes:
        left_out: tensors that stay in fp32.
        first: first layer in which they do.
        order: relative size of the products' random differences.
        tiles: those of attention.
        rounds: False for a pass in fp32.
    """

    left_out: frozenset[str] = frozenset()
    first: int = 0
    order: float = 0.0
    tiles: Tiles = Tiles()
    rounds: bool = True

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        """Return a tensor as the pass hands it on."""
        is_wide = not self.rounds or (layer >= self.first and name in self.left_out)
        return x if is_wide else x.bfloat16().float()


STEP = Roundings()
FP32 = Roundings(rounds=False)
PREFILL = Roundings(order=OTHER_ORDER)
DECODE = Roundings(order=OTHER_ORDER)
IN_ORDER = Tiles(64, last_first=False, splits=2)
"""Tiles that decode steps of a 0.5B had before: 257 to 512 keys in two splits."""


@dataclass(frozen=True)
class Arm:
    """The roundings of generation.

    Attributes:
        answer: those of decode steps.
        prompt: those of the prompt's pass.
        what: the arm in words.
    """

    what: str
    answer: Roundings
    prompt: Roundings = PREFILL


def arms() -> dict[str, Arm]:
    """Return the arms by name."""

    def wide(names: frozenset[str], first: int, tiles: Tiles = Tiles()) -> Roundings:
        return replace(DECODE, left_out=names, first=first, tiles=tiles)

    found = {
        "before-none": Arm("nothing in fp32, keys in order", wide(frozenset(), 0, IN_ORDER)),
        "before-8": Arm(
            "residual from layer 8, keys in order, also of the prompt",
            wide(RESIDUAL, 8, IN_ORDER),
            replace(PREFILL, left_out=RESIDUAL, first=8),
        ),
        "before-kept-2": Arm(
            "residual and branches from layer 2, keys in order", wide(KEPT, 2, IN_ORDER)
        ),
        "before-gate-2": Arm(
            "these, gate and up from layer 2, keys in order", wide(KEPT | {"gate_up"}, 2, IN_ORDER)
        ),
        "before-every-1": Arm("everything from layer 1, keys in order", wide(EVERY, 1, IN_ORDER)),
        "none": Arm("nothing in fp32", wide(frozenset(), 0)),
        "residual-8": Arm("residual from layer 8", wide(RESIDUAL, 8)),
        "residual-2": Arm("residual from layer 2", wide(RESIDUAL, 2)),
    }
    for first in (0, 1, 2, 4, 8):
        found[f"kept-{first}"] = Arm(f"residual and branches from layer {first}", wide(KEPT, first))
    splits = replace(Tiles(), splits=2)
    same = "residual and branches from layer 2, "
    found |= {
        "kept-2-splits": Arm(f"{same}keys in two splits", wide(KEPT, 2, splits)),
        "kept-2-halves": Arm(f"{same}tiles of 64 keys", wide(KEPT, 2, Tiles(64))),
        "kept-2-logits": Arm(f"{same}logits", wide(KEPT | {"logits"}, 2)),
        "kept-2-qkv": Arm(f"{same}q, k, v before the rotation", wide(KEPT | {"qkv"}, 2)),
        "kept-2-gate": Arm(f"{same}gate and up", wide(KEPT | {"gate_up"}, 2)),
        "kept-2-inputs": Arm(f"{same}gate and up, inputs", wide(KEPT | INPUTS | {"gate_up"}, 2)),
        "kept-2-prompt": Arm(
            f"{same}also of the prompt", wide(KEPT, 2), replace(PREFILL, left_out=KEPT, first=2)
        ),
        "kept-2-bits": Arm(f"{same}prompt of the step's bits", wide(KEPT, 2), STEP),
        "every-1": Arm("everything from layer 1", wide(EVERY, 1)),
        "every-0": Arm("everything but keys and values in pages", wide(EVERY, 0)),
    }
    return found


class RandomPasses:
    """Forward passes of a Llama or Qwen 2 with random weights over a prompt and an answer.

    Args:
        model: with weights in bf16.
        prompt: tokens of the prompt, P.
    """

    def __init__(self, model: Any, prompt: int):
        self.model = model
        self.prompt = prompt
        self.generator = torch.Generator()
        self._parts: tuple[Roundings, Roundings] = STEP, STEP

    def log_probabilities(self, ids: Tensor, prompt: Roundings, answer: Roundings) -> Tensor:
        """Return those of all tokens at the places of the answer, ``[T - P, V]``."""
        self._parts = prompt, answer
        decoder = self.model.model
        x_TD = decoder.embed_tokens.weight[ids].float()
        positions = torch.arange(len(ids))[None]
        tables = decoder.rotary_emb(torch.zeros(1, 1, 1), positions)
        tables_TW = [table[0].bfloat16().float() for table in tables]
        for number, layer in enumerate(decoder.layers):
            normed = self._normed(layer.input_layernorm, x_TD, number)
            branch = self._attention(layer.self_attn, normed, tables_TW, number)
            x_TD = self._handed("residual", number, x_TD + branch)
            normed = self._normed(layer.post_attention_layernorm, x_TD, number)
            branch = self._mlp(layer.mlp, normed, number)
            x_TD = self._handed("residual", number, x_TD + branch)
        last = len(decoder.layers)
        x_TD = self._handed("last residual", last, x_TD)
        states = self._normed(decoder.norm, x_TD, last)[self.prompt - 1 : -1]
        logits = states @ self.model.lm_head.weight.float().t()
        return answer("logits", last, self._other_order(logits, answer)).log_softmax(-1)

    def _handed(self, name: str, layer: int, x: Tensor, dim: int = 0) -> Tensor:
        """Return a tensor as both parts hand it on; tokens are in dimension ``dim``."""
        rows = x.split((self.prompt, x.shape[dim] - self.prompt), dim)
        return torch.cat([how(name, layer, one) for how, one in zip(self._parts, rows)], dim)

    def _attention(self, part: Any, x_TD: Tensor, tables_TW: list[Tensor], layer: int) -> Tensor:
        q, k, v = (
            self._product(one, x_TD, "qkv", layer).unflatten(1, (-1, part.head_dim))
            for one in (part.q_proj, part.k_proj, part.v_proj)
        )
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        cos, sin = tables_TW
        q, k = (self._handed("rope", layer, x * cos + turned(x) * sin, 1) for x in (q, k))
        if self._parts[1].rounds:  # pages are 16 bits
            k, v = (x.bfloat16().float() for x in (k, v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * part.scaling
        scores += torch.full_like(scores[0], float("-inf")).triu(1)
        rows = scores.split((self.prompt, scores.shape[1] - self.prompt), 1)
        starts = (0, self.prompt)
        out = [
            attended(some, v, how, layer, start)
            for how, some, start in zip(self._parts, rows, starts)
        ]
        out_HTW = self._handed("attended", layer, torch.cat(out, 1), 1)
        return self._product(part.o_proj, out_HTW.transpose(0, 1).flatten(1), "output", layer)

    def _mlp(self, part: Any, x_TD: Tensor, layer: int) -> Tensor:
        gate, up = (
            self._product(one, x_TD, "gate_up", layer) for one in (part.gate_proj, part.up_proj)
        )
        unit = self._handed("unit", layer, F.silu(gate) * up)
        return self._product(part.down_proj, unit, "down", layer)

    def _normed(self, norm: Any, x_TD: Tensor, layer: int) -> Tensor:
        scale = torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return self._handed("norm", layer, x_TD * scale * norm.weight.float())

    def _product(self, part: Any, x: Tensor, name: str, layer: int) -> Tensor:
        rows = (x @ part.weight.float().t()).split((self.prompt, len(x) - self.prompt))
        out = [self._other_order(some, how) for how, some in zip(self._parts, rows)]
        return self._handed(name, layer, torch.cat(out))

    def _other_order(self, x: Tensor, how: Roundings) -> Tensor:
        """Return a product as another order of its additions gives it."""
        if not how.order:
            return x
        return x + how.order * x.std() * torch.randn(x.shape, generator=self.generator)


def attended(scores_HTS: Tensor, v_HSW: Tensor, how: Roundings, layer: int, start: int) -> Tensor:
    """Return the values weighted by scores, ``[H, T, W]``, of tokens from position ``start`` on."""
    keys = scores_HTS.shape[2]
    room = F.pad(scores_HTS, (0, -keys % how.tiles.keys), value=float("-inf"))
    scores_HTCS = room.unflatten(-1, (-1, how.tiles.keys))
    lengths_T = start + 1 + torch.arange(scores_HTS.shape[1])
    running = how.tiles.maxima(scores_HTCS, lengths_T)
    weights = (scores_HTCS - running).exp()
    kept = (running - scores_HTS.amax(-1)[..., None, None]).exp()
    total = (weights * kept).sum((-1, -2))[..., None]
    return (how("weights", layer, weights) * kept).flatten(-2)[..., :keys] @ v_HSW / total


def turned(x: Tensor) -> Tensor:
    """Return the halves of the last dimension as the rotation pairs them."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def small_model() -> Any:
    """Return a random Qwen 2 of 24 layers in bf16."""
    width = 256
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=width,
        intermediate_size=1344,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=8192,
        initializer_range=GAIN / width**0.5,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@torch.no_grad()
def errors(passes: RandomPasses, answer: int, seed: int, chosen: dict[str, Arm]) -> dict[str, Any]:
    """Return the errors of drawn tokens' log-probabilities, of the step and of each arm."""
    passes.generator.manual_seed(seed)
    tokens = passes.prompt + answer
    draws = torch.rand(tokens, generator=passes.generator, dtype=torch.float64)
    ids = torch.tensor(zipf_ids(draws.numpy(), passes.model.config.vocab_size))
    true = passes.log_probabilities(ids, FP32, FP32)
    drawn = torch.multinomial(true.exp(), 1, generator=passes.generator)

    def of_drawn(prompt: Roundings, answer: Roundings) -> Tensor:
        rows = passes.log_probabilities(ids, prompt, answer)
        return (rows - true).gather(1, drawn)[:, 0]

    found = {name: of_drawn(arm.prompt, arm.answer) for name, arm in chosen.items()}
    return {"step": of_drawn(STEP, STEP), **found}


def summary(of_step: Tensor, ours: Tensor) -> dict[str, float]:
    """Return gap and error of an arm as shares of the step's own error, and their correlation."""
    gap = (ours - of_step).abs()
    own = of_step.abs().mean()
    share = gap.mean() / own
    spread = (gap - share * of_step.abs()).std() / len(gap) ** 0.5 / own
    norms = ours.square().mean().sqrt() * of_step.square().mean().sqrt()
    return {
        "gap": float(share),
        "standard_error": float(spread),
        "from_fp32": float(ours.abs().mean() / own),
        "correlation": float((ours * of_step).mean() / norms),
    }


def show(found: dict[str, Any], chosen: dict[str, Arm]) -> None:
    """Print the arms' gaps, of what the step differs from fp32."""
    print(f"{found['tokens']} tokens: the step from fp32 {found['step_from_fp32']:.5f}")
    for name, one in found["arms"].items():
        print(
            f"{one['gap']:.3f} ± {one['standard_error']:.3f}  from fp32 {one['from_fp32']:.2f}  "
            f"correlation {one['correlation']:.2f}  {chosen[name].what}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="keeps what other models have there")
    parser.add_argument("--model", default=SMALL, help="or a shape of recipes_on_card.py")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--arms", nargs="+", choices=arms(), help="all by default")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    length = given.prompt + given.answer
    is_small = given.model == SMALL
    model = small_model() if is_small else model_of(given.model, length, given.tiny)
    if given.layers:
        del model.model.layers[given.layers :]
    passes = RandomPasses(model.eval(), given.prompt)
    chosen = {name: arm for name, arm in arms().items() if name in (given.arms or arms())}
    rows: dict[str, list[Tensor]] = {}
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    for seed in range(given.seeds):
        for name, some in errors(passes, given.answer, seed, chosen).items():
            rows.setdefault(name, []).append(some)
        whole = {name: torch.cat(some) for name, some in rows.items()}
        of_step = whole.pop("step")
        found = {
            "layers": len(model.model.layers),
            "prompt": given.prompt,
            "seeds": seed + 1,
            "tokens": len(of_step),
            "step_from_fp32": float(of_step.abs().mean()),
            "arms": {name: summary(of_step, ours) for name, ours in whole.items()},
        }
        results[given.model] = found
        given.out.write_text(json.dumps(results, indent=1))
    show(found, chosen)


if __name__ == "__main__":
    main()
