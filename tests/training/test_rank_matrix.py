"""Two processes train every objective over every kind of weights as one does, or refuse it by name before the first step."""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gguf_files
import tiny

sys.path.insert(0, str(Path(__file__).parent))
import rank_matrix

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU")

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, *(path for path in sys.path if path.endswith("src")))))
PAIRS = list(itertools.product(rank_matrix.OBJECTIVES, rank_matrix.WEIGHTS))
SAMPLED = 20
CLOSE = {"all weights, states in 8 bits": 2e-3}
"""Relative deviation of losses and norms where it is more than the order of sums brings: a rounded state may fall on the other
side."""


def outcomes(folder, pairs):
    """What two processes wrote, by pair: together and alone."""
    (folder / "pairs.json").write_text(json.dumps(pairs))
    gguf_files.write(folder, tiny.llama())
    tiny.llama(7).save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": PATHS}
    said = [folder / f"rank{rank}.log" for rank in (0, 1)]
    started = [
        subprocess.Popen(
            [sys.executable, rank_matrix.__file__, str(folder)], stdout=subprocess.DEVNULL, stderr=words.open("w"),
            env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, words in enumerate(said)
    ]  # fmt: skip
    try:
        codes = [process.wait(timeout=60 + 30 * len(pairs)) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], [words.read_text()[-2000:] for words in said]
    return {
        pair: [json.loads((folder / f"{' over '.join(pair)}.{turn}.json").read_text()) for turn in ("together", "alone")]
        for pair in pairs
    }


def difference(together, alone, bound):
    """What is wrong with a pair; None if nothing is."""
    if "failed" in together or "failed" in alone:
        return (together.get("failed") or alone["failed"])[-800:]
    if "refused" in together or "refused" in alone:
        same = together.get("refused") == alone.get("refused") and not together["begun"]
        return None if same else f"refused differently or late: {together} and {alone}"
    found, expected = ([*itertools.chain(*run["steps"]), run["held out"]] for run in (together, alone))
    if len(alone["steps"]) != rank_matrix.USUAL["max_steps"] or found != pytest.approx(expected, rel=bound):
        return f"{found} and alone {expected}"
    return None


def test_pairs(request, tmp_path):
    pairs = PAIRS
    if request.config.getoption("--sample"):
        pairs = random.Random(request.config.run_seed).sample(PAIRS, SAMPLED)
    found = outcomes(tmp_path, pairs)
    wrong = {pair: difference(*found[pair], CLOSE.get(pair[1], 1e-4)) for pair in pairs}
    assert not {pair: words for pair, words in wrong.items() if words}
    refused = [" over ".join(pair) for pair in pairs if "refused" in found[pair][0]]
    assert len(refused) < len(pairs) / 2, refused
