"""A run on the CPU in a process of its own, which prints how much its resident set grew.

``python resident_run.py MODEL FOLDER FIELDS``: trains ``MODEL``, a folder with a configuration,
by fields in JSON. A run of a tiny model comes first, so that everything is imported by then.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import runs


def resident(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


def growth(model: str, folder: Path, fields: dict) -> int:
    """Bytes that the resident set holds at most beside what it held before the model."""
    torch.set_num_threads(1)
    runs.train(folder / "first", **{**fields, "max_steps": 2})
    before = resident("VmRSS")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    runs.train(folder / "second", model=made, **fields)
    return resident("VmHWM") - before


if __name__ == "__main__":
    print(growth(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])))
