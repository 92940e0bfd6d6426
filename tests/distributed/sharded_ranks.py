"""One of several processes that share the update of a few weights: the program of
``test_shards.py``.

``python sharded_ranks.py FOLDER CASE …``: every rank runs each case and writes what it returns to
``CASE.RANK.pt``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from chronicals.distributed import Mesh, ShardedAdam8bit, ShardedAdamW, Shards
from chronicals.optimizers import Adam8bit, FusedAdamW
from chronicals.training.step.optimizer import Precision
from chronicals.training.step.training_step import update

SHAPES = {
    "matrix": (96, 70),
    "large": (130, 513),
    "vector": (300,),
    "small": (7,),
    "odd": (20, 30),
    "idle": (40, 40),
}
"""No rank count divides them all, some ranks have nothing of the small ones, the fourth nothing
of the odd one; nobody has a gradient of the last."""

STEPS = 4
KINDS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "without masters": (torch.bfloat16, {"master": False, "state_dtype": torch.float32}),
    "8 bits": (torch.bfloat16, {}),
}


def made(kind: str, strided: bool = False) -> dict[str, torch.nn.Parameter]:
    """Weights that are the same on every rank; those of matrices perhaps lie in wider storages."""
    torch.manual_seed(1)
    found = {}
    for name, shape in SHAPES.items():
        value = torch.randn(shape).to(KINDS[kind][0])
        if strided and value.ndim > 1:
            value = torch.cat([value, value], 1)[:, : shape[1]]
        found[name] = torch.nn.Parameter(value)
        found[name].grad_dtype = torch.float32
    return found


def groups(weights: dict[str, torch.nn.Parameter]) -> list[dict]:
    matrices = [w for w in weights.values() if w.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "full_moments": False},
        {"params": [w for w in weights.values() if w.ndim == 1], "lr": 3e-3, "full_moments": True},
    ]


def optimizer_of(
    weights: dict[str, torch.nn.Parameter], kind: str, ranks: Mesh, size: int
) -> FusedAdamW:
    options = {"lr": 1e-3, **KINDS[kind][1]}
    if ranks.count == 1:
        return (Adam8bit if kind == "8 bits" else FusedAdamW)(groups(weights), **options)
    sharded = ShardedAdam8bit if kind == "8 bits" else ShardedAdamW
    return sharded(groups(weights), Shards(ranks, list(weights.values()), size), **options)


def gradients(step: int, name: str, shares: int) -> torch.Tensor:
    """Of ``shares`` ranks, ``[shares, …]``: whole numbers over 64, so that sums do not depend on
    their order.
    """
    drawing = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randint(-64, 65, (shares, *SHAPES[name]), generator=drawing) / 64


def train(
    kind: str,
    ranks: Mesh,
    shares: int,
    size: int = 1 << 26,
    strided: bool = False,
    interrupted: bool = False,
    clipped: float | None = None,
) -> dict[str, torch.Tensor]:
    """Weights, whole states and norms after a few steps, of ``shares`` ranks' gradients.

    Args:
        interrupted: midway everything is put into another optimizer, and a weight is written by
            other code.
    """
    weights = made(kind, strided)
    parameters = list(weights.values())
    precision = Precision("fp32", torch.device("cpu"))
    optimizer = optimizer_of(weights, kind, ranks, size)
    optimizer.weights_moved()
    norms = []
    for step in range(STEPS):
        if interrupted and step == STEPS // 2:
            optimizer = handed_over(weights, optimizer, kind, ranks, size)
            with torch.no_grad():
                weights["matrix"][3:50] *= 0.5
        own = range(shares) if ranks.count == 1 else [ranks.rank]
        for name, weight in weights.items():
            if name != "idle":
                weight.grad = gradients(step, name, shares)[list(own)].sum(0).reshape(weight.shape)
        sums = optimizer.shards if isinstance(optimizer, ShardedAdamW) else ranks
        holders = sums.reduce(parameters, [torch.ones(())])
        norms.append(
            update(parameters, optimizer, precision, clipped, sums.norm, holders)["grad_norm"]
        )
        optimizer.zero_grad()
    states = {
        f"{name}:{part}": x
        for name, w in weights.items()
        for part, x in whole_states(optimizer, w).items()
    }
    return {
        **{name: w.detach().clone().contiguous() for name, w in weights.items()},
        **states,
        "norms": torch.stack(norms),
    }


def whole_states(optimizer: FusedAdamW, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As one process has them, put together from the pieces of all."""
    if not isinstance(optimizer, ShardedAdamW):
        return optimizer.state_of(weight)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, optimizer.pieces(weight))
    found = {}
    for pieces in told:
        for part, piece in pieces.items():
            whole = found.setdefault(part, torch.empty(piece.shape, dtype=piece.tensor.dtype))
            whole.view(-1)[piece.begin : piece.begin + len(piece.tensor)] = piece.tensor
    return found


def handed_over(weights, optimizer, kind, ranks, size) -> FusedAdamW:
    """A new optimizer with the states of another, as a checkpoint brings them."""
    states = {}
    for name, weight in weights.items():
        states[name] = optimizer.empty_states(weight)
        for part, tensor in whole_states(optimizer, weight).items():
            states[name][part].copy_(tensor)
        ranks.same_weights(states[name].values())
    other = optimizer_of(weights, kind, ranks, size)
    other.weights_moved()
    for name, weight in weights.items():
        other.load_state(weight, states[name])
    return other


def bytes_of_states(ranks: Mesh) -> dict[str, torch.Tensor]:
    """What this rank keeps for the update, beside the weights themselves."""
    weights = made("bf16")
    optimizer = optimizer_of(weights, "bf16", ranks, 1 << 26)
    optimizer.weights_moved()
    for weight in weights.values():
        optimizer.state_of(weight)
    kept = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.ndim)
    return {
        "bytes": torch.tensor(kept),
        "elements": torch.tensor(sum(w.numel() for w in weights.values())),
    }


CASES = {
    **{kind: (lambda ranks, kind=kind: train(kind, ranks, ranks.count)) for kind in KINDS},
    "small buckets": lambda ranks: train("bf16", ranks, ranks.count, size=1 << 12),
    "strided": lambda ranks: train("bf16", ranks, ranks.count, strided=True),
    "clipped": lambda ranks: train("bf16", ranks, ranks.count, clipped=0.5),
    "interrupted": lambda ranks: train("bf16", ranks, ranks.count, interrupted=True),
    "interrupted in 8 bits": lambda ranks: train("8 bits", ranks, ranks.count, interrupted=True),
    "bytes": bytes_of_states,
}


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = Mesh.current()
    for case in cases:
        torch.save(CASES[case](ranks), folder / f"{case}.{ranks.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
