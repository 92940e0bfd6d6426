"""Two processes train every objective over every kind of weights as one does, or refuse it by
name before the first step.
"""

import itertools
import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import gguf_files
import tiny
import two_processes

sys.path.insert(0, str(Path(__file__).parent))
import rank_matrix

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU"
)

THERE = [
    name for name in rank_matrix.WEIGHTS if "bitsandbytes" not in name or find_spec("bitsandbytes")
]
PAIRS = list(itertools.product(rank_matrix.OBJECTIVES, THERE))
REFUSED = {
    ("reward", "LoRA and a token"),
    ("reward", "adapters of PEFT"),
    *(
        (objective, weights)
        for objective, weights in itertools.product(rank_matrix.OBJECTIVES, rank_matrix.WEIGHTS)
        if rank_matrix.refusal(objective, weights) is not None
    ),
}
"""Rows of an embedding are not trained beside a score, and PEFT's adapters not saved with one;
what two processes refuse. All other pairs train."""

SAMPLED = 20
CLOSE = {"all weights, states in 8 bits": 2e-3, "LoRA in fp16": 1e-3}
"""Relative deviation of losses and norms where it is more than the order of sums brings: a
rounded state, or a weight in fp16, may fall on the other side."""


def outcomes(folder, pairs):
    """What two processes wrote, by pair: together and alone."""
    (folder / "pairs.json").write_text(json.dumps(pairs))
    gguf_files.write(folder, tiny.llama())
    tiny.llama(7).save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    codes, words = two_processes.run(rank_matrix.__file__, folder, seconds=60 + 30 * len(pairs))
    assert codes == [0, 0], [said[-2000:] for said in words]
    return {
        pair: [
            json.loads((folder / f"{' over '.join(pair)}.{turn}.json").read_text())
            for turn in ("together", "alone")
        ]
        for pair in pairs
    }


def difference(together, alone, bound):
    """What is wrong with a pair; None if nothing is."""
    if "failed" in together or "failed" in alone:
        return (together.get("failed") or alone["failed"])[-800:]
    if "refused" in together or "refused" in alone:
        same = together.get("refused") == alone.get("refused") and not together["begun"]
        return None if same else f"refused differently or late: {together} and {alone}"
    found, expected = (
        [*itertools.chain(*run["steps"]), run["held out"]] for run in (together, alone)
    )
    # A loss of answers that are as likely as when they were drawn is a sum that is about 0.
    if len(alone["steps"]) != rank_matrix.USUAL["max_steps"] or found != pytest.approx(
        expected, rel=bound, abs=1e-6
    ):
        return f"{found} and alone {expected}"
    return different_metrics(together["metrics"], alone["metrics"], bound)


OF_ONE_PROCESS = {"experts/differ"}
"""Metrics that runs of one process show alone (docs/grpo.md)."""


def different_metrics(together, alone, bound):
    """Those of each step, and of held-out rows."""
    for number, (found, expected) in enumerate(zip(together, alone, strict=True)):
        if OF_ONE_PROCESS & set(found):
            return f"metrics of step {number + 1}: two processes show {OF_ONE_PROCESS & set(found)}"
        expected = {name: x for name, x in expected.items() if name not in OF_ONE_PROCESS}
        if (
            number == 0
        ):  # policy and reference are equal, and which answer is rewarded more is a matter of rounding
            found, expected = (
                {n: x for n, x in run.items() if n != "rewards/accuracies"}
                for run in (found, expected)
            )
        if found != pytest.approx(
            expected, rel=bound, abs=bound / 10
        ):  # differences of sums of some -100
            return f"metrics of step {number + 1}: {found} and alone {expected}"
    return None


def not_refused(together, words):
    """What is wrong with a pair that two processes refuse with these words; None if nothing is."""
    refused = words in together.get("refused", "") and not together["begun"]
    return None if refused else f"not refused by {words!r}, or late: {together}"


@pytest.mark.slow
def test_pairs(request, tmp_path):
    pairs = PAIRS
    if request.config.getoption("--sample"):
        pairs = random.Random(request.config.run_seed).sample(PAIRS, SAMPLED)
    found = outcomes(tmp_path, pairs)
    wrong = {
        pair: not_refused(found[pair][0], rank_matrix.refusal(*pair))
        if rank_matrix.refusal(*pair) is not None
        else difference(*found[pair], CLOSE.get(pair[1], 1e-4))
        for pair in pairs
    }
    assert not {pair: words for pair, words in wrong.items() if words}
    assert {pair for pair in pairs if "refused" in found[pair][0]} == REFUSED & set(pairs)
