"""One of two processes that train together with sharded states or weights; one kills itself with
SIGKILL at its k-th event.

The program of ``test_sharded_checkpoints.py``: ``python killed_ranks.py FOLDER RESUME RANK K
SHARDING``. With K 0 nobody is killed, and each writes how many events it had: micro-batches, what
is written, synced, renamed, and what the ranks tell each other.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import runs
import tiny
from chronicals.distributed import Mesh, RankFiles, watch
from chronicals.objectives import NextToken
from chronicals.training.run import checkpoint

SETTINGS = {
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_seq_length": 96,
    "max_steps": 6,
    "save_steps": 2,
    "save_total_limit": 2,
    "validation_split": 0.1,
    "eval_steps": 3,
    "trackers": [],
    "mixed_precision": "bf16",
}


def main(folder: Path, resume: bool, killed: int, kill_at: int, sharding: str) -> None:
    torch.set_num_threads(1)
    watch.PAUSE = 0.2
    watch.GRACE = 3.0
    watch.LOST = 10.0
    rank = Mesh.current().rank
    events = 0

    def counted(function):
        def wrapper(*arguments, **named):
            nonlocal events
            events += 1
            if (rank, events) == (killed, kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return wrapper

    NextToken.__call__ = counted(NextToken.__call__)
    os.fsync = counted(os.fsync)
    os.rename = counted(os.rename)
    checkpoint.write_pieces = counted(checkpoint.write_pieces)
    RankFiles.collecting = counted(RankFiles.collecting)
    RankFiles.deliver = counted(RankFiles.deliver)
    RankFiles._say = counted(RankFiles._say)
    runs.train(folder, rows=tiny.chat_rows(40), resume=resume, sharding=sharding, **SETTINGS)
    (folder / f"events.{rank}").write_text(str(events))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    os._exit(0)
