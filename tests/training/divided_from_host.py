"""One of several processes that divide weights that were loaded whole in host memory: the program
of ``test_divided_from_host.py``.

``python divided_from_host.py FOLDER CASE …``: losses and norms of each case, with weights divided
and with whole ones, are in ``CASE.json``.
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
from chronicals.models import quantise_layers

LORA = {
    "use_lora": True,
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
    "learning_rate": 1e-3,
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 1e-3, "optimizer_state_dtype": "fp32"},
    "LoRA": LORA,
    "PiSSA": {**LORA, "lora_init": "pissa"},
    "NF4": LORA,
    "DoRA over NF4": {**LORA, "use_dora": True},
}
USUAL = {
    "max_steps": 4,
    "save_steps": None,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "trackers": [],
    "use_cuda_graphs": False,
}


def steps(case: str, sharding: str, folder: Path) -> list[tuple[int, float, float]]:
    model = tiny.llama(hidden_size=256, intermediate_size=512)
    if "NF4" in case:
        quantise_layers(model)
    assert all(p.device.type == "cpu" for p in model.parameters())
    dtype = "bf16" if torch.cuda.is_available() else "fp32"
    runs.train(
        folder, model=model, sharding=sharding, mixed_precision=dtype, **USUAL, **CASES[case]
    )
    return runs.trajectory(folder)


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    for case in cases:
        found = {
            sharding: steps(case, sharding, folder / f"{case}, {sharding}")
            for sharding in ("weights", "optimizer")
        }
        if dist.get_rank() == 0:
            (folder / f"{case}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)
