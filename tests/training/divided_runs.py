"""One of several processes that make a run with divided weights: the program of
``test_divided_checkpoints.py``.

``python divided_runs.py FOLDER FIELDS``: fields of the configuration in JSON; ``resume``, ``tied``,
``source`` (a folder whose weights are divided while they are read) and ``file_bytes`` (of the
model's files) beside them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import runs
import tiny
from chronicals.distributed import Mesh
from chronicals.saving import SavedModel, model_files
from chronicals.training.loading import load_to_train

SETTINGS = {
    "batch_size": 1,
    "num_epochs": None,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "save_steps": 2,
    "validation_split": 0.1,
    "eval_steps": 3,
    "max_steps": 6,
    "keep": "last",
    "trackers": [],
}
MICRO_BATCHES = 4


def train(
    folder: Path,
    count: int,
    resume: bool = False,
    tied: bool = False,
    source: str | None = None,
    **changes: Any,
):
    fields = {**SETTINGS, "gradient_accumulation_steps": MICRO_BATCHES // count, **changes}
    if source is None:
        model = tiny.llama(tie_word_embeddings=tied)
    else:
        ranks = Mesh.current()
        config = runs.config(folder, **fields)
        model, _ = load_to_train(SavedModel.find(source), config, ranks)
        held = sum(p.numel() for p in model.parameters() if not p.is_meta)
        (folder / f"held-{ranks.rank}.json").write_text(json.dumps(held))
    return runs.train(folder, tiny.chat_rows(), model=model, resume=resume, **fields)


def main() -> None:
    folder = Path(sys.argv[1])
    fields = json.loads(sys.argv[2])
    model_files.FILE_BYTES = fields.pop("file_bytes", model_files.FILE_BYTES)
    write = model_files.ModelParts.write

    def told(parts, at, turn, turns, read):
        write(parts, at, turn, turns, read)
        (folder / f"wrote-{dist.get_rank()}.json").write_text(
            json.dumps(list(range(turn, len(parts.files), turns)))
        )

    model_files.ModelParts.write = told
    torch.set_num_threads(1)
    count = int(os.environ["WORLD_SIZE"])
    result = train(folder, count, **{"sharding": "weights", **fields})
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(
            json.dumps({"step": result.model_step, "loss": result.evaluation.loss})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
