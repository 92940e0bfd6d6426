"""A training run that kills itself with SIGKILL at its k-th event; run in a process of its own.

Events are what a kill could come between: micro-batches, syncs of files, renames, removals, lines
of metrics. So a kill falls in the middle of an accumulation, while a checkpoint is written, between
manifest and rename, at an epoch's end. Only what befalls the run's folder counts: a compiler that
fills its cache renames files in the first run alone.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

OF_FILES = ("rename", "replace", "remove")
"""Kinds of events that have a path."""

CHANGES = {
    "full": {},
    "lora": {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.2},
    "bf16": {"mixed_precision": "bf16"},
    "8-bit states": {"mixed_precision": "bf16", "use_8bit_optimizer": True},
}


class Events:
    """What a kill could come between; the process kills itself at the k-th.

    Args:
        folder: of the run.
        kill_at: k, from 1; None to live on.
    """

    def __init__(self, folder: str, kill_at: int | None):
        self.kinds: list[str] = []
        self.folder = folder
        self.kill_at = kill_at

    def counted(self, kind: str, function):
        """The function, each call of which is an event, before it does anything."""

        def wrapper(*arguments, **named):
            if kind not in OF_FILES or Path(arguments[0]).is_relative_to(self.folder):
                self.kinds.append(kind)
                if len(self.kinds) == self.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return wrapper

    def count_files(self) -> None:
        """Count what is done to files."""
        os.fsync = self.counted("sync", os.fsync)
        os.rename = self.counted("rename", os.rename)
        os.replace = self.counted("replace", os.replace)
        shutil.rmtree = self.counted("remove", shutil.rmtree)


def run(
    folder: str, variant: str, resume: bool, kill_at: int | None, events_file: str | None
) -> None:
    import torch

    import runs
    import tiny
    from chronicals.objectives import NextToken

    torch.set_num_threads(1)
    events = Events(folder, kill_at)
    NextToken.__call__ = events.counted("micro-batch", NextToken.__call__)
    events.count_files()
    runs.train(
        Path(folder),
        rows=tiny.chat_rows(30),
        resume=resume,
        save_steps=2,
        save_total_limit=2,
        batch_size=1,
        gradient_accumulation_steps=2,
        num_epochs=2,
        max_seq_length=96,
        validation_split=0.1,
        eval_steps=3,
        **CHANGES[variant],
    )
    if events_file:
        Path(events_file).write_text("\n".join(events.kinds))


def in_a_process(*arguments, run=run) -> int:
    """Exit code of ``run`` in a fresh process; -9 if it was killed."""
    if os.path.exists("/dev/nvidiactl"):  # CUDA outlives no fork
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        preload = ["torch", "transformers", "chronicals.training", "killed_run"]
        context.set_forkserver_preload(preload)
    process = context.Process(target=_quiet_run, args=(run, *arguments))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    if process.exitcode > 0:  # pytest shows it beside the failure
        print(Path(f"{arguments[0]}.log").read_text())
    return process.exitcode


def _quiet_run(run, folder: str, *arguments) -> None:
    sys.stdout = sys.stderr = open(f"{folder}.log", "w")  # noqa: SIM115
    try:
        run(folder, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
