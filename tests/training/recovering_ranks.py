"""One of two processes, of which the second runs out of memory; for ``test_recovery.py``."""

import logging
import os
import sys
from pathlib import Path

import torch
from test_recovery import USUAL, Cap

import runs
import tiny

FIELDS = {
    "goes on": {"batch_size": 2},
    "ends": {
        "batch_size": 1,
        "use_gradient_checkpointing": False,
        "logits_chunk_size": 1024,
    },
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    folder, case = sys.argv[1:]
    cap = Cap(1, "backward", spared=3) if case == "goes on" else Cap(0, "forward")
    model = tiny.llama()
    if os.environ["RANK"] == "1":
        cap.on(model)
    runs.train(Path(folder), model=model, **{**USUAL, **FIELDS[case]})
