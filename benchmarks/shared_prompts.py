"""Attention of answers that share their prompt: gathered keys beside a tree mask.

    python benchmarks/shared_prompts.py OUTPUT.json [--commit HASH] [--tokens 16384] [--shares 0.5]

A pack of pairs, each prompt in it once, forward and backward of one layer's attention, as CUDA
graphs, as steps are. Gathered keys are what chronicals runs: each answer's keys and values are put
behind its prompt's, and an attention of documents follows. A tree mask (FlexAttention; Dong et al.,
2024) leaves them where they are: a token sees the prompt and the tokens of its own answer before
it. The mask's blocks are made for every pack, once for all layers, and stand apart; their first
compilation takes four minutes. Both give the same numbers, within bf16's rounding, or nothing is
written.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_rates import Captured, sample
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from chronicals.attention import document_attention
from chronicals.attention.documents import gather_keys
from chronicals.batch import SharedKeys
from chronicals.benchmark.shapes import LENGTH_SPREAD, MEDIAN_LENGTH, SHORTEST_LENGTH
from chronicals.data.making.documents import IS_SHARED
from chronicals.data.packs.step_memory import shared_keys

SAMPLES = 15
WARM_UP = 3
LIKE = 2e-2
"""Of outputs and gradients, relative, in bf16."""


@dataclass(frozen=True)
class Pack:
    """Pairs of one pack of T tokens.

    Attributes:
        bounds: int32 ``[N + 1]``: both answers of a pair and its prompt, one document after the
            other.
        longest: tokens of the longest document.
        keys: what they attend to.
        order: int64 ``[T]``: the token of the pack that stands at each place where each prompt
            comes before its answers.
        item, side: int32 ``[T]`` in that order: the pair, and 0, 1 or -1 for the prompt.
    """

    bounds: Tensor
    longest: int
    keys: SharedKeys
    order: Tensor
    item: Tensor
    side: Tensor


def drawn(tokens: int, share: float, device: torch.device, seed: int = 1) -> Pack:
    """Lengths of rows as those of the measured pairs; the last pair ends where the pack does."""
    generator = np.random.default_rng(seed)
    lengths: list[tuple[int, int]] = []
    left = tokens
    while left >= 6 * SHORTEST_LENGTH:
        row = min(
            max(
                int(np.exp(generator.normal(np.log(MEDIAN_LENGTH), LENGTH_SPREAD))), SHORTEST_LENGTH
            ),
            left // 3,
        )
        prompt = max(round(share * row), 1)
        lengths.append((prompt, row - prompt))
        left -= prompt + 2 * (row - prompt)
    if left:
        lengths[-1] = lengths[-1][0] + left, lengths[-1][1]
    documents = [
        (part, shared, side)
        for p, a in lengths
        for part, shared, side in ((a, p, 0), (a, p, 1), (p, IS_SHARED, 2))
    ]
    sizes, shared, sides = (np.array(column, np.int64) for column in zip(*documents))
    bounds = np.append(0, np.cumsum(sizes)).astype(np.int32)
    starts = bounds[:-1].reshape(-1, 3)
    order = [
        np.arange(s[n], s[n] + d)
        for s, (p, a) in zip(starts, lengths)
        for n, d in ((2, p), (0, a), (1, a))
    ]
    item = np.repeat(np.arange(len(lengths)), [p + 2 * a for p, a in lengths])
    side = np.concatenate([np.repeat([-1, 0, 1], [p, a, a]) for p, a in lengths])
    columns = (np.concatenate(order), item.astype(np.int32), side.astype(np.int32))
    keys = shared_keys(shared, sides, bounds, tokens).map(lambda x: x.to(device))
    return Pack(
        torch.as_tensor(bounds).to(device),
        int(sizes.max()),
        keys,
        *(torch.as_tensor(x).to(device) for x in columns),
    )


def gathered(pack: Pack, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = pack.keys
    own = gather_keys(k, keys), gather_keys(v, keys)
    return document_attention(q, *own, pack.bounds, pack.longest, keys.cu_seqlens, keys.max_seqlen)


def tree_mask(pack: Pack) -> BlockMask:
    item = pack.item
    side = pack.side

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (
            (key <= query)
            & (item[key] == item[query])
            & ((side[key] < 0) | (side[key] == side[query]))
        )

    return compiled_mask(seen, None, None, len(item), len(item), device=item.device)


compiled = torch.compile(flex_attention, dynamic=False)
compiled_mask = torch.compile(create_block_mask, dynamic=False)


def by_tree(mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return compiled(*heads, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def both_ways(call, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dy)]


def timed(name: str, call: Callable[[], Any], seconds: dict[str, float]) -> Any:
    """What a first call returns; its seconds, in which it is compiled, are noted and shown."""
    began = time.perf_counter()
    made = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[name] = time.perf_counter() - began
    print(f"  first call, {name}: {seconds[name]:.1f} s", flush=True)
    return made


def measure(
    heads: int, groups: int, width: int, tokens: int, share: float, device: torch.device
) -> dict:
    pack = drawn(tokens, share, device)
    *inputs, dy = (
        torch.randn(tokens, n, width, device=device, dtype=torch.bfloat16)
        for n in (heads, groups, groups, heads)
    )
    ours = [x.requires_grad_() for x in inputs]
    trees = [x.detach()[pack.order].requires_grad_() for x in inputs]
    first: dict[str, float] = {}
    mask = timed("the mask of a pack", partial(tree_mask, pack), first)
    dy_tree = dy[pack.order]
    arms = {
        "gathered keys": lambda: both_ways(lambda *x: gathered(pack, *x), ours, dy),
        "tree mask": lambda: both_ways(lambda *x: by_tree(mask, *x), trees, dy_tree),
    }
    expected, found = ([x.float() for x in timed(name, call, first)] for name, call in arms.items())
    errors = [((b - a[pack.order]).norm() / a.norm()).item() for a, b in zip(expected, found)]
    if not max(errors) < LIKE:
        raise SystemExit(
            f"{heads}/{groups} heads of {width}, prompts of {share:.0%}: errors {errors}"
        )
    arms = {name: Captured(call) for name, call in arms.items()} if device.type == "cuda" else arms
    arms["the mask of a pack"] = lambda: tree_mask(pack)
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(WARM_UP + SAMPLES):
        for name, call in arms.items():
            taken = sample(call)
            if turn >= WARM_UP:
                samples[name].append(taken)
    return {
        "errors": errors,
        "pairs": int(pack.item[-1]) + 1,
        "milliseconds": samples,
        "first_call_seconds": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.3, 0.5, 0.7],
        help="of prompts among the tokens of rows",
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    results: dict = {
        "card": torch.cuda.get_device_name(0),
        "commit": given.commit,
        "tokens": given.tokens,
        "rows": {},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    for heads, groups, width in ((14, 2, 64), (32, 8, 128)):
        for share in given.shares:
            row = measure(heads, groups, width, given.tokens, share, device)
            name = f"{heads}/{groups} heads of {width}, prompts of {share:.0%}"
            results["rows"][name] = row
            given.output.write_text(json.dumps(results))
            print(
                name,
                {
                    arm: round(statistics.median(times), 3)
                    for arm, times in row["milliseconds"].items()
                },
                flush=True,
            )


if __name__ == "__main__":
    main()
