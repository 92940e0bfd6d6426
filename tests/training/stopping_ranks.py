"""One of two processes that train together, of which one raises an error, hangs, is killed, keeps
the other waiting, has a full disk, or raises an error while the other still writes a checkpoint; or
both take long for a step.

The program of ``test_rank_watch.py``: ``python stopping_ranks.py FOLDER HOW``. When it happened is
in ``FOLDER/happened``.
"""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from two_ranks import own_folder, trainer

import tiny
from chronicals.distributed import Mesh, watch
from chronicals.objectives import NextToken
from chronicals.training import Callback
from chronicals.training.run import checkpoint

CALLS = 3
"""Forward passes until the second step, of two micro-batches each."""

PATIENCE = 4.0
LONGER = 9.0
GRACE = 3.0
"""Seconds that a step may take, that a callback takes, and that a process has once another has
raised an error.
"""

SHORT = {
    "hangs": {"rank_timeout": PATIENCE},
    "raises while evaluating": {"validation_split": 0.1, "eval_steps": 1},
    "hangs while evaluating": {"validation_split": 0.1, "eval_steps": 1, "rank_timeout": PATIENCE},
    "is told for long": {"rank_timeout": PATIENCE, "max_steps": 3},
    "is told for long, of shared packs": {
        "rank_timeout": PATIENCE,
        "max_steps": 3,
        "context_parallel": 2,
    },
    "loads for long": {"rank_timeout": PATIENCE, "max_steps": 1},
    "hangs before the first step, of shared packs": {
        "rank_timeout": PATIENCE,
        "context_parallel": 2,
    },
    "has long steps": {"rank_timeout": PATIENCE, "max_steps": 2, "gradient_accumulation_steps": 4},
    "has a full disk": {"save_steps": 1},
    "raises beside a checkpoint": {"save_steps": 1},
    "calls a divided model": {"sharding": "weights", "use_lora": True},
    "reads a divided weight": {"sharding": "weights"},
}
"""Fields of the configuration, by what happens."""


class Ends(NextToken):
    """Of the second rank."""

    calls = 0
    how = ""
    folder = Path()

    def end(self) -> None:
        happens(self.folder)
        if self.how.startswith("raises"):
            raise ValueError("boom")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == CALLS and self.how in (
            "raises",
            "hangs",
            "killed",
            "raises beside a checkpoint",
        ):
            self.end()
        return super().__call__(model, batch)

    def score(self, model, batch):
        if self.how.endswith("while evaluating"):
            self.end()
        return super().score(model, batch)


class Long(NextToken):
    """Of both ranks: a step takes longer than ``PATIENCE``, a micro-batch does not."""

    def __call__(self, model, batch):
        time.sleep(0.4 * PATIENCE)
        return super().__call__(model, batch)


class Slow(Callback):
    """Keeps the first rank between two steps, with a model of which it has all weights."""

    def __init__(self, model):
        self.model = model

    def step_done(self, metrics):
        if metrics.step == 1:
            assert torch.isfinite(self.model(torch.tensor([[3, 1, 4]])).logits).all()
            time.sleep(LONGER)


class NeedsAll(Callback):
    """Asks for what the other rank does not take part in."""

    def __init__(self, model, how, folder):
        self.model = model
        self.how = how
        self.folder = folder

    def step_done(self, metrics):
        happens(self.folder)
        if self.how.startswith("calls"):
            self.model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=2)
        else:
            self.model.get_decoder().layers[0].mlp.up_proj.weight.full_tensor()


def happens(folder: Path) -> None:
    (folder / "happened").write_text(str(time.time()))


def fill_disk(folder: Path) -> None:
    """The states of the second step do not fit; the file is there in part, as after a write that
    failed.
    """
    write = checkpoint.write_pieces
    written = []

    def write_until_full(pieces, place, rank, count):
        written.append(rank)
        if len(written) == 1:
            return write(pieces, place, rank, count)
        happens(folder)
        file = place / "optimizer-rank-00002-of-00002.safetensors"
        file.write_bytes(b"torn")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    checkpoint.write_pieces = write_until_full


def write_for_long() -> None:
    """Its files are all there later than a process waits for one that has raised an error."""
    write = checkpoint.write_folder

    def fill_slowly(folder, fill, ready=None):
        def fill_and_wait(aside):
            fill(aside)
            time.sleep(2 * GRACE)

        write(folder, fill_and_wait, ready)

    checkpoint.write_folder = fill_slowly


def hang_where_parts_meet(folder: Path) -> None:
    """Of packs that both share."""

    def hang(*_, **__) -> None:
        happens(folder)
        time.sleep(300)

    dist.all_to_all_single = dist.all_gather_into_tensor = hang


def load(how: str, ranks: Mesh, folder: Path) -> None:
    """As where both ask each other while they load."""
    if ranks.rank == 1:
        happens(folder)
        if how.startswith("raises"):
            raise ValueError("boom")
        if how.startswith("exits"):
            sys.exit(1)
        time.sleep(LONGER)
    elif not how.endswith("for long"):
        ranks.gather_values("loaded")


def main(folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    watch.PAUSE = 0.2
    watch.GRACE = GRACE
    rank = (ranks := Mesh.current()).rank
    usual = {"rank_timeout": 100.0, "validation_split": 0.0, "eval_steps": None}
    together = how in ("has a full disk", "raises beside a checkpoint")
    place = folder / "one" if together else own_folder(folder, rank)
    made = trainer(place, **{**usual, **SHORT.get(how, {})})
    if how.startswith("loads") or how.endswith("while loading"):
        load(how, ranks, folder)
    if how == "has long steps":
        made.objective = Long()
    elif how.startswith("hangs before"):
        if rank == 1:
            hang_where_parts_meet(folder)
    elif rank == 1:
        made.objective = Ends()
        made.objective.how = how
        made.objective.folder = folder
        if how == "has a full disk":
            fill_disk(folder)
    elif how == "raises beside a checkpoint":
        write_for_long()
    elif how.startswith(("is told", "calls", "reads")):
        made.callbacks.append(
            Slow(made.model) if how.startswith("is told") else NeedsAll(made.model, how, folder)
        )
        made._users_callbacks = True
    made.train(tiny.chat_rows())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    os._exit(0)
