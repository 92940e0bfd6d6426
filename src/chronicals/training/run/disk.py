"""Check, before the first step, that the disk holds all that a run will write."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.distributed import is_divided
from chronicals.lora import adapters
from chronicals.policies.needed_memory import state_bytes
from chronicals.training.errors import CheckpointError
from chronicals.training.run.checkpoint import checkpoints
from chronicals.training.run.run_state import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskUse:
    """Bytes that a run writes.

    Attributes:
        model: weights of the trained model, or its adapter.
        checkpoint: one checkpoint, including its model.
        at_a_time: number of checkpoints that exist at once: those that are kept, and the one that
            is being written.
    """

    model: int
    checkpoint: int
    at_a_time: int


def disk_use(model: Any, config: ChronicalsConfig, run: Run, keeps_best: bool) -> DiskUse:
    """Compute what a run will write from its current step on.

    Args:
        model: the prepared model.
        config: configuration of the run.
        run: state of the run, at the step from which it goes on.
        keeps_best: whether the checkpoint with the lowest held-out loss stays beside the newest.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapted = next(adapters(model), None) is not None or hasattr(model, "get_base_model")
    written = trained if adapted else list(model.parameters())
    saved = sum(parameter.numel() * parameter.element_size() for parameter in written)
    states = state_bytes(config, model, trained)
    if any(is_divided(parameter) for parameter in trained):
        count = sum(parameter.numel() for parameter in trained)
        each = 2 if config.mixed_precision == "bf16" else 4
        saved = count * each
        states += count * each  # fp32 weights take the place of the lower halves of masters
    left = run.total_steps - run.step
    saves = -(-left // config.save_steps) if config.save_steps else 1
    if keeps_best and config.eval_steps:
        saves += left // config.eval_steps
    kept = max(config.save_total_limit, 2 if keeps_best else 1)
    at_a_time = min(saves + len(checkpoints(run.output_dir)), kept + 1)
    return DiskUse(saved, saved + states, at_a_time)


def check_disk(use: DiskUse, config: ChronicalsConfig) -> None:
    """Warn if the disk may become full; the folder of the run must exist.

    Raises:
        CheckpointError: the first checkpoint does not fit.
    """
    folder = config.output_dir
    free = shutil.disk_usage(folder).free
    if use.checkpoint > free:
        raise CheckpointError(
            f"output_dir={str(folder)!r}: its disk is full before the first checkpoint is there: "
            "one takes "
            f"{_size(use.checkpoint)}, and {_size(free)} are free; free some, or choose another "
            "output_dir"
        )
    there = len(checkpoints(folder)) * use.checkpoint
    largest = use.at_a_time * use.checkpoint + use.model  # bytes that exist at the same time
    if largest > free + there:
        fewer = (
            f"lower save_total_limit={config.save_total_limit}, "
            if config.save_total_limit > 1
            else ""
        )
        logger.warning(
            "output_dir=%r: %d checkpoints at a time and the model take %s, and its disk has %s "
            "free; %sfree some, or choose "
            "another output_dir",
            str(folder),
            use.at_a_time,
            _size(largest),
            _size(free + there),
            fewer,
        )


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.2f} MiB"
