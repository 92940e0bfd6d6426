"""A process that tokenises chunks for another: they come in at its standard input, what they become goes out by a pipe.

    python -m chronicals.data.worker FOLDER PIPE

The folder holds the tokenizer as ``save_pretrained`` writes it, and ``how.json``; the pipe is a file descriptor. The first
frame that goes out says whether this tokenizer is the same as there.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from chronicals.data.chunks import ChunkEncoder
from chronicals.data.frames import chunk_of_frame, frame_of_encoded, read_frame, write_frame
from chronicals.data.template import Tokenizer

HOW = "how.json"


def tokenizer_in(folder: Path, how: dict[str, Any]) -> Tokenizer:
    import transformers

    inner = getattr(transformers, how["class"]).from_pretrained(folder)
    return Tokenizer(inner, how["objective"], how["train_on_roles"], how["train_on_turns"])


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if not installed: some transformers import it, 3 s and 270 MB
    folder, out = Path(sys.argv[1]), os.fdopen(int(sys.argv[2]), "wb")
    how = json.loads((folder / HOW).read_text())
    tokenizer = tokenizer_in(folder, how)
    write_frame(out, {"same": tokenizer.fingerprint() == how["fingerprint"]})
    encoder = ChunkEncoder(tokenizer, how["width"], how["overlong"])
    gc.freeze()
    gc.disable()
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        for _, encoded in encoder.encoded([chunk_of_frame(*frame)]):
            write_frame(out, *frame_of_encoded(encoded))
        gc.collect(0)


if __name__ == "__main__":
    main()
