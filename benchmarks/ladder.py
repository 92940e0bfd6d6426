"""One lever at a time, from padded rows to captured steps: the Qwen2.5-0.5B shape, real text, 8
packs of 2048 a step.

    python benchmarks/ladder.py OUTPUT.json [--kind full|lora] [--steps 30] [--commit HASH]

Every rung is the trainer with everything of the rungs before it, and one thing more: real tokens/s
(median and spread of the steps after warm-up), peak memory, the first losses and the gradient norm,
which must not change but by rounding (padded rows hold other documents in a step). What has no
switch in the configuration is taken out where the trainer reaches for it.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from baseline import SHAPE, WARM_UP, documents, ours, versions

from chronicals.attention import backends
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from chronicals.kernels.adamw import Tensors, join_master
from chronicals.kernels.gradient_norm import gradient_norm_reference
from chronicals.patching.patch import PatchReport

OFF = {"use_torch_compile": False, "use_cuda_graphs": False}


def _no_parts(model, whole_layers: bool = False) -> PatchReport:
    return PatchReport(type(model).__name__)


def _not_fused(config, presented) -> str:
    return "taken out for the ladder"


def _torchs_attention(needs) -> tuple[str, ...]:
    return tuple(name for name in _order(needs) if name != "flash-attn-4")


_masters: dict[int, torch.Tensor] = {}
"""In fp32, by the addresses of weights in bf16."""


def _torchs_adamw_(tensors: Tensors, lr, betas, eps, weight_decay, factor=None, apply=None) -> None:
    """torch's fused AdamW on the same states, and on a whole master beside weights in bf16."""
    for weight, low in zip(tensors.weights, tensors.lows):
        if weight.data_ptr() not in _masters:
            _masters[weight.data_ptr()] = join_master(weight, low)
    weights = [_masters.get(weight.data_ptr(), weight) for weight in tensors.weights]
    gradients = [g.float() for g in tensors.gradients]
    if factor is not None:
        gradients = torch._foreach_mul(gradients, factor)
    one = (
        1.0 if apply is None else [apply.float()] * len(tensors.steps)
    )  # a single tensor would go by the host
    torch._foreach_add_(tensors.steps, one)
    torch._fused_adamw_(
        weights,
        gradients,
        list(tensors.means),
        list(tensors.squares),
        [],
        list(tensors.steps),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if apply is None else (~apply).float(),
    )
    if tensors.lows:
        torch._foreach_copy_(list(tensors.weights), weights)


_order = backends.order
WITHOUT = {
    "parts": [mock.patch("chronicals.training.session.patch_parts", _no_parts)],
    "layers": [mock.patch("chronicals.policies.facts.why_not_fused", _not_fused)],
    "attention": [mock.patch("chronicals.attention.backends.order", _torchs_attention)],
    "optimizer": [
        mock.patch("chronicals.optimizers.adamw.fused_adamw_", _torchs_adamw_),
        mock.patch("chronicals.distributed.mesh.gradient_norm", gradient_norm_reference),
    ],
}
"""What stands in the way of each lever that is no field of the configuration."""

RUNGS: list[tuple[str, dict, tuple[str, ...]]] = [
    (
        "padded rows",
        {**OFF, "use_sequence_packing": False, "use_fused_kernels": False},
        tuple(WITHOUT),
    ),
    ("packed", {**OFF, "use_fused_kernels": False}, tuple(WITHOUT)),
    ("linear cross-entropy", OFF, tuple(WITHOUT)),
    ("fused parts", OFF, ("layers", "attention", "optimizer")),
    ("fused layers", OFF, ("attention", "optimizer")),
    ("flash-attn-4", OFF, ("optimizer",)),
    ("AdamW and norm in one launch each", OFF, ()),
    ("graphs", {}, ()),
]
"""Name, fields of the configuration, and what is missing still."""


@contextmanager
def without(levers: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for lever in levers:
            for patch in WITHOUT[lever]:
                stack.enter_context(patch)
        yield


def print_table(rungs: dict[str, dict]) -> None:
    first = None
    print(f"{'':30}{'tokens/s':>10}{'times':>7}{'GiB':>7}{'loss':>18}{'norm':>8}")
    for name, row in rungs.items():
        rate = row["tokens_per_second"]["median"]
        first = first or rate
        losses = f"{row['losses'][0]:.4f} → {row['losses'][-1]:.4f}"
        print(
            f"{name:30}{rate:10,.0f}{rate / first:7.2f}{row['peak_gib']:7.1f}{losses:>18}{row['grad_norms'][-1]:8.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--kind", choices=("full", "lora"), default="full")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    if given.steps <= WARM_UP:
        parser.error(f"--steps {given.steps}: the first {WARM_UP} are told apart, give more")
    rows = documents()
    tokenizer = train_tokenizer((row["text"] for row in rows), 16384)
    result: dict = {
        **versions(),
        "commit": given.commit,
        "shape": SHAPE,
        "kind": given.kind,
        "rungs": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, changes, missing) in enumerate(RUNGS):
            with without(missing):
                folder = Path(scratch) / str(number)
                result["rungs"][name] = ours(
                    given.kind,
                    rows,
                    tokenizer,
                    given.steps,
                    folder,
                    cache_dir=Path(scratch),
                    **changes,
                )
            _masters.clear()
            gc.collect()
            torch.cuda.empty_cache()
            given.output.write_text(json.dumps(result))
    print_table(result["rungs"])


if __name__ == "__main__":
    main()
