"""One of two processes that train together, of which the second raises an error, hangs or is killed in its second step.

The program of ``test_rank_watch.py``: ``python stopping_ranks.py FOLDER raises|hangs|killed``.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from two_ranks import own_folder, trainer

import tiny
from chronicals.distributed import Mesh, watch
from chronicals.objectives import NextToken

CALLS = 3
"""Forward passes until the second step, of two micro-batches each."""


class Ends(NextToken):
    calls, how = 0, ""

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == CALLS:
            if self.how == "raises":
                raise ValueError("boom")
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        return super().__call__(model, batch)


def main(folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    watch.PAUSE, watch.GRACE = 0.2, 3.0
    rank = Mesh.current().rank
    patience = 4.0 if how == "hangs" else 100.0
    made = trainer(own_folder(folder, rank), rank_timeout=patience, validation_split=0.0, eval_steps=None)
    if rank == 1:
        made.objective = Ends()
        made.objective.how = how
    made.train(tiny.chat_rows())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
