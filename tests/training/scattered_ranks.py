"""One of several processes whose gradients are summed in the backward pass, and after it: the
program of ``test_in_backward.py``.

``python scattered_ranks.py FOLDER CASE …``: every rank writes what each case returns to
``CASE.RANK.pt``.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from chronicals.distributed import Mesh, ShardedAdamW, Shards
from chronicals.models import Term
from chronicals.training.step.in_backward import ScatteredStep
from chronicals.training.step.optimizer import Precision
from chronicals.training.step.training_step import EagerStep

NAMES = ("first", "second", "third", "fourth", "fifth", "never")
STEPS = 3
UNUSED = {(0, 0): {"fifth"}, (0, 1): {"first", "fifth"}, (1, 0): {"third"}, (2, 0): {"fourth"}}
"""By rank and micro-batch, what is not computed with; the first rank never uses the last weight
that others do.
"""


class Given:
    """In place of a Batch: which micro-batch it is."""

    def __init__(self, number):
        self.number = number

    def to(self, *_, **__):
        return self


class Loss:
    """In place of an objective: a chain of products, so that gradients come one after the other."""

    def __init__(self, weights, rank, twice):
        self.weights = weights
        self.rank = rank
        self.twice = twice
        self.alive = []

    def __call__(self, model, batch):
        unused = UNUSED.get((self.rank, batch.number), set())
        x = torch.full((3, 40), 0.01 * (1 + self.rank + 2 * batch.number))
        for name in NAMES[:-1]:
            if name not in unused:
                x = (x @ self.weights[name] + 0.1).tanh()
        if self.twice:  # a second backward pass within the first one
            for _ in range(2):
                x.register_hook(lambda _: self.add_to_fifth())
        return {"loss": Term(x.sum(), per="targets")}

    @torch.enable_grad()
    def add_to_fifth(self):
        self.weights["fifth"].sum().backward()


def train(within: bool, micro_batches: int, ranks: Mesh, twice: bool = False) -> dict:
    """Weights, norms and who had gradients, of a few steps."""
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(40, 40) * 0.3) for name in NAMES}
    parameters = list(weights.values())
    optimizer = ShardedAdamW(
        [{"params": parameters}], Shards(ranks, parameters, 1 << 13), lr=1e-2, weight_decay=0.1
    )
    optimizer.weights_moved()
    shards = optimizer.shards
    objective = Loss(weights, ranks.rank, twice)
    model = SimpleNamespace(as_forward=lambda compute: compute())
    given = (
        model,
        objective,
        parameters,
        optimizer,
        Precision("fp32", torch.device("cpu")),
        1.0,
        shards.norm,
    )
    parts = ScatteredStep(*given, shards=shards) if within else EagerStep(*given)
    norms = []
    holders = []
    alive = []
    torch.stack(
        [weight.sum() for weight in parameters]
    ).sum().backward()  # as what compiles kernels beforehand does
    optimizer.zero_grad()
    for weight in parameters:
        weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(w.grad is not None for w in parameters))
        )
    for step in range(STEPS):
        if step == 1:  # the order is that of the first one
            alive.clear()
        for number in range(micro_batches):
            scalars = parts.micro(Given(number), {"targets": 7}, number == 0)
        held = (parts if within else shards).reduce(parameters, [scalars["loss"].clone()])
        holders.append(held.clone())
        norms.append(parts.update(held)["grad_norm"])
    if within:
        parts.__exit__()
    states = {
        f"{name} {part}": x.clone()
        for name, w in weights.items()
        for part, x in optimizer.state_of(w).items()
    }
    return {
        "weights": {name: w.detach().clone() for name, w in weights.items()},
        "states": states,
        "norms": torch.stack(norms),
        "holders": torch.stack(holders),
        "alive": max(alive),
        "buckets": len(shards.buckets),
    }


def refused(ranks: Mesh) -> dict:
    try:
        train(True, 1, ranks, twice=True)
    except RuntimeError as error:
        return {"words": str(error)}
    return {"words": ""}


CASES = {
    "one micro-batch": lambda ranks: {within: train(within, 1, ranks) for within in (True, False)},
    "two micro-batches": lambda ranks: {
        within: train(within, 2, ranks) for within in (True, False)
    },
    "twice": refused,
}


def main() -> None:
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Mesh.current()
    for case in cases:
        torch.save(CASES[case](ranks), Path(folder) / f"{case}.{ranks.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
