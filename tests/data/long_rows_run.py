"""A dataset of long documents, in a process of its own, which prints seconds and memory.

``python long_rows_run.py FOLDER TOKENS COUNT``: writes ``COUNT`` documents of about ``TOKENS`` tokens,
makes their store, with its gate, and reads all batches. It prints, as JSON, the lengths of the
longest document of each batch, the seconds, and how much the resident set grew at most.
"""

import json
import sys
import time
from pathlib import Path

import tiny
from chronicals import ChronicalsConfig
from chronicals.data import create_dataloader
from planning.resident_run import resident

WORDS = "the answer to life is forty two and more " * 64


def main(folder: Path, tokens: int, count: int) -> None:
    tokenizer = tiny.tokenizer()
    text = WORDS * (tokens // len(tokenizer(WORDS)["input_ids"]))
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    del text
    config = ChronicalsConfig(
        max_seq_length=tokens,
        batch_size=1,
        gradient_accumulation_steps=1,
        num_epochs=1,
        objective="pretraining",
        dataset_num_proc=1,
        cache_dir=folder / "tokens",
    )
    before = resident("VmRSS")
    began = time.monotonic()
    lengths = [
        int(batch.cu_seqlens.diff().max())
        for batch in create_dataloader(str(rows), tokenizer, config)
    ]
    seconds = time.monotonic() - began
    grown = resident("VmHWM") - before
    print(json.dumps({"lengths": lengths, "seconds": seconds, "grown": grown}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
