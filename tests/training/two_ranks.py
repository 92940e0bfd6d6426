"""What each of two processes sees; both run this file once, for all tests of ``test_ranks.py``.

Every promise is a function of the rank and a folder; what it returns (plain JSON) is written to
``NAME.RANK.json``, what it raises as a text. Promises run one after the other and use what runs
before them left.
"""

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from counted_step import Counted
from emulated_graphs import EmulatedStep

import runs
import tiny
from chronicals.batch import Batch
from chronicals.config.config import laid_over
from chronicals.distributed import Mesh, ShardedAdamW, Shards
from chronicals.distributed.rank_agreement import fingerprint_here
from chronicals.objectives import NextToken, Term
from chronicals.optimizers import FusedAdamW
from chronicals.training import Callback, CheckpointError, ChronicalsTrainer, Interrupted
from chronicals.training.step.optimizer import Precision
from chronicals.training.step.training_step import EagerStep, train_step, update

SETTINGS = {
    "batch_size": 1,
    "gradient_accumulation_steps": 2,
    "num_epochs": 1,
    "validation_split": 0.1,
    "eval_steps": 3,
    "save_steps": 2,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
}
USED = {
    "always": [(1, 1), (1, 1), (1, 1)],
    "by one": [(0, 1), (1, 0), (0, 1)],
    "at times": [(1, 0), (0, 0), (0, 1)],
    "never": [(0, 0), (0, 0), (0, 0)],
}
"""By weight and step, which of two ranks uses it."""


def own_folder(folder: Path, rank: int) -> Path:
    """As on a machine of its own, where only the first rank's holds a run."""
    return folder / f"machine{rank}"


def trainer(folder: Path, seed: int = 0, **changes):
    changed = {"cache_dir": folder.parent / "tokens", **laid_over(SETTINGS, changes)}
    return ChronicalsTrainer(tiny.llama(seed), tiny.tokenizer(), runs.config(folder, **changed))


def weights_used(ranks: Mesh, of_rank=lambda rank: [rank]) -> dict[str, list[float]]:
    """Three steps of AdamW with decay over weights that are used now and then; ``of_rank`` are
    those that this one is.
    """
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(2, 3)) for name in USED}
    optimizer = FusedAdamW(weights.values(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        loss = torch.zeros(())
        for rank in of_rank(ranks.rank):
            total = sum(
                (rank + 1) * (weights[name] * (step + 1)).sin().sum()
                for name in USED
                if USED[name][step][rank]
            )
            if isinstance(total, torch.Tensor):
                total.backward()
                loss += total.detach()
        parameters = list(weights.values())
        held = ranks.reduce(parameters, [loss])
        update(
            parameters, optimizer, Precision("fp32", torch.device("cpu")), None, ranks.norm, held
        )
        optimizer.zero_grad()
    return {
        **{name: weight.detach().flatten().tolist() for name, weight in weights.items()},
        "loss": [float(loss)],
    }


def weights_replayed(ranks: Mesh, replays: bool, sharded: bool) -> dict[str, list[float]]:
    """Steps of two micro-batches over weights of which rank 0 never uses one; where they are
    sharded, no update is replayed.
    """
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(2, 3)) for name in ("both", "second")}
    parameters = list(weights.values())
    options = {"lr": 0.1, "weight_decay": 0.5}
    if sharded:
        optimizer = ShardedAdamW([{"params": parameters}], Shards(ranks, parameters), **options)
        optimizer.weights_moved()
    else:
        optimizer = FusedAdamW(parameters, **options)
    sums = optimizer.shards if sharded else ranks

    def objective(model, batch):
        used = [weights["both"], *([weights["second"]] if ranks.rank else [])]
        shown = Term(batch.targets[0].float(), coefficient=0.0)
        return {
            "sum": Term(sum((weight * batch.targets[0]).sin().sum() for weight in used)),
            "shown": shown,
        }

    model = SimpleNamespace(as_forward=lambda compute: compute())
    parts = EagerStep(
        model,
        objective,
        parameters,
        optimizer,
        Precision("fp32", torch.device("cpu")),
        1.0,
        sums.norm,
    )
    graphed = EmulatedStep(parts, parameters, parameters, optimizer, with_update=not sharded)
    chosen = graphed if replays else parts
    seen = []
    shown = []
    for number in range(6):
        batches = [
            Batch(*[torch.tensor([number + 1 + ranks.rank + 2 * micro])] * 4, max_seqlen=1)
            for micro in (0, 1)
        ]
        step = SimpleNamespace(batches=batches)
        reduce = partial(sums.reduce, parameters)
        scalars = train_step(step, {"targets": 4}, chosen.micro, reduce, chosen.update)
        seen += [float(scalars["loss"]), float(scalars["grad_norm"])]
        shown.append(float(scalars["shown"]))
    assert (graphed.of_update is not None) == (replays and not sharded and ranks.rank == 1) and (
        graphed.recorder.replays > 0
    ) == replays
    return {
        **{name: weight.detach().flatten().tolist() for name, weight in weights.items()},
        "seen": seen,
        "shown": shown,
    }


def replayed(rank: int, folder: Path):
    cases = ((False, False), (True, False), (False, True), (True, True))
    return [weights_replayed(Mesh.current(), replays, sharded) for replays, sharded in cases]


def gradients(rank: int, folder: Path):
    return weights_used(Mesh.current())


def weights(rank: int, folder: Path):
    """Models that begin with different weights: all begin with the first's."""
    made = trainer(own_folder(folder, rank), seed=rank, max_steps=2)
    result = made.train(tiny.chat_rows())
    return {
        "weights": fingerprint_here(made.model.parameters()),
        "held out": result.evaluation.to_dict(),
    }


def distilled(rank: int, folder: Path):
    """Beside a teacher, and from what was stored of it, by both ranks into one cache: losses and
    gradient norms.
    """

    def save():
        tiny.llama(7).save_pretrained(folder / "teacher")
        tiny.tokenizer().save_pretrained(folder / "teacher")

    Mesh.current().writer_does(save, OSError)
    return {
        name: distil(folder / name, rank, folder / "teacher", stored)
        for name, stored in DISTILLED.items()
    }


DISTILLED = {"beside": None, "likeliest": 8}
"""How many tokens are stored of the teacher."""


def distil(folder: Path, rank: int, teacher: Path, stored: int | None, **changes):
    given = {
        "teacher": str(teacher),
        "teacher_precision": "fp32",
        "temperature": 1.5,
        "stored_tokens": stored,
    }
    short = {
        "max_steps": 2,
        "validation_split": 0.0,
        "eval_steps": None,
        "use_fused_kernels": False,
    }
    trainer(folder / f"rank{rank}", objective="distill", distill=given, **short, **changes).train(
        tiny.chat_rows()
    )
    return runs.trajectory(folder / f"rank{rank}") if rank == 0 else None


def random_numbers(rank: int, folder: Path):
    """What dropout would draw in the first step."""
    drawn = []

    class Draws(NextToken):
        def __call__(self, model, batch):
            with torch.random.fork_rng():
                drawn.append(torch.rand(3).tolist())
            return super().__call__(model, batch)

    made = trainer(folder / f"random{rank}", max_steps=1)
    made.objective = Draws()
    made.train(tiny.chat_rows())
    return drawn[0]


def stop(rank: int, folder: Path):
    """A signal that only the second gets, in the second of steps after which nothing else is
    due.
    """

    class Told(NextToken):
        calls = 0

        def __call__(self, model, batch):
            self.calls += 1
            if rank == 1 and self.calls == 3:
                made.stop()
            return super().__call__(model, batch)

    made = trainer(own_folder(folder / "stopped", rank), save_steps=None, eval_steps=None)
    made.objective = Told()
    try:
        made.train(tiny.chat_rows())
    except Interrupted as error:
        return str(error)


def resumed(rank: int, folder: Path):
    """Of what ``stop`` left, which the second does not have."""
    made = trainer(own_folder(folder / "stopped", rank), seed=rank)
    result = made.train(tiny.chat_rows(), resume=True)
    return {
        "steps": result.steps,
        "weights": fingerprint_here(made.model.parameters()),
        "model": result.model_step,
    }


EARLY = {
    "max_steps": 30,
    "eval_steps": 1,
    "early_stopping_patience": 2,
    "learning_rate": 0.1,
    "validation_split": 0.2,
    "save_steps": None,
}


def stopped_early(rank: int, folder: Path):
    """Where held-out data gains no more; each has other rows of it."""
    result = trainer(own_folder(folder / "early", rank), **EARLY).train(tiny.chat_rows())
    return {"steps": result.steps, "best": result.model_step, "held out": result.evaluation.loss}


COUNTED = {
    "sums within the backward pass": {"memory": ["reduce_in_backward"]},
    "sums after the backward pass": {"memory": []},
    "all states on both": {"sharding": "none"},
    "divided weights": {"sharding": "weights"},
    "adapters over divided weights": {"sharding": "weights", "use_lora": True, "lora_dropout": 0.0},
}


def counted(rank: int, folder: Path):
    """What a step asks of the other and what it reads from the device."""
    quiet = {"max_steps": 4, "validation_split": 0.0, "eval_steps": None, "save_steps": None}
    found = {}
    for name, fields in COUNTED.items():
        with Counted().counting() as seen:
            trainer(folder / f"counted {name} {rank}", **quiet, **fields).train(tiny.chat_rows())
        found[name] = {
            "steps": seen.collectives,
            "reads": dict(seen.reads),
            "buckets": seen.buckets,
        }
    return found


def audited(rank: int, folder: Path):
    """Where the first has a gradient of zeros of a weight of which the other has not."""
    made = trainer(folder / f"audited{rank}", max_steps=1)
    if rank == 0:
        made.model.model.layers[0].mlp.up_proj.weight.register_hook(torch.zeros_like)
    result = made.train(tiny.chat_rows())
    return {
        "asked": result.coverage.asked,
        "idle": result.coverage.idle,
        "with gradient": result.coverage.with_gradient,
    }


class Raises(Callback):
    """Raises ``event`` at that event."""

    def __init__(self, event):
        def fail(*_):
            raise ValueError(event)

        setattr(self, event, fail)


def callbacks_fail(rank: int, folder: Path):
    """A callback of the first raises, at every event of a run that has one step, for all of them
    come after its last.
    """
    words = {}
    for event in ("run_began", "step_done", "evaluated", "saved", "run_ended"):
        made = trainer(folder / f"{event}{rank}", max_steps=1, eval_steps=1)
        made.callbacks = [Raises(event)] if rank == 0 else []
        words[event] = ""
        try:
            made.train(tiny.chat_rows())
        except Exception as error:
            words[event] = f"{type(error).__name__}: {error}"
    return words


def refused(rank: int, folder: Path):
    """A new run where the first rank's folder holds one."""
    try:
        trainer(own_folder(folder / "stopped", rank)).train(tiny.chat_rows())
    except CheckpointError as error:
        return str(error)


def other_settings(rank: int, folder: Path):
    try:
        trainer(folder / f"other{rank}", learning_rate=(1e-3, 2e-3)[rank]).train(tiny.chat_rows())
    except ValueError as error:
        return str(error)


def other_data(rank: int, folder: Path):
    try:
        made = trainer(folder / f"data{rank}", cache_dir=folder / f"cache{rank}")
        object.__setattr__(made.ranks, "local_rank", 0)  # on a machine of its own
        made.train(tiny.chat_rows(60 + rank))
    except ValueError as error:
        return str(error)


def other_weights(rank: int, folder: Path):
    """Where the broadcast fails to do what it should, in a way nobody foresees."""
    try:
        made = trainer(folder / f"weights{rank}", seed=rank)
        object.__setattr__(
            made, "ranks", Deaf(made.ranks.rank, made.ranks.count, made.ranks.local_rank)
        )
        made.train(tiny.chat_rows())
    except ValueError as error:
        return str(error)


class Deaf(Mesh):
    def same_weights(self, tensors):
        list(tensors)


PROMISES = (
    gradients,
    replayed,
    weights,
    distilled,
    random_numbers,
    stopped_early,
    counted,
    audited,
    callbacks_fail,
    stop,
    resumed,
    refused,
    other_settings,
    other_data,
    other_weights,
)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = Mesh.current().rank
    for promise in PROMISES:
        try:
            seen = promise(rank, folder)
        except Exception:
            seen = traceback.format_exc()
        (folder / f"{promise.__name__}.{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
