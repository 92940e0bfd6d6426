"""Processes that divide the weights among them train what one does."""

import sys
from pathlib import Path

import pytest
import torch

import runs
import tiny
import two_processes
from chronicals.config import ConfigurationError
from chronicals.distributed import shard_embedding
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import present
from chronicals.objectives import build_objective
from chronicals.policies import Facts, decide
from chronicals.policies.divided_weights import check_divisible
from chronicals.policies.sharding import choose_sharding
from chronicals.training.session import prepare_session

sys.path.insert(0, str(Path(__file__).parent))
import divided_ranks

pytestmark = [
    pytest.mark.of_file(4),
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU"
    ),
]

ORDER = 2e-6, 2e-5
"""Relative deviations that the order of sums brings, of losses and norms and of weights."""

CLOSE = {"full in 8 bits": (2e-3, 2e-2), **dict.fromkeys(divided_ranks.IN_BF16, (1e-2, 1e-1))}
"""Those of rounded states, which may fall on the other side, and of gradients in bf16, which one
process adds in fp32.
"""


def outcomes(folder, count, *cases):
    codes, words = two_processes.run(divided_ranks.__file__, folder, *cases, count=count)
    assert codes == [0] * count, [said[-2500:] for said in words]
    return {case: torch.load(folder / f"{case}.pt") for case in cases}


def check(case, found):
    together = found["together"]
    alone = found["alone"]
    of_numbers, of_weights = CLOSE.get(case, ORDER)
    torch.testing.assert_close(together["seen"], alone["seen"], rtol=of_numbers, atol=0.0)
    assert together["weights"].keys() == alone["weights"].keys()
    for name, expected in alone["weights"].items():
        error = (together["weights"][name] - expected).norm() / expected.norm()
        assert error < of_weights, f"{case}, {name}: {error}"
    if case.startswith("full"):  # of each layer and of the rest, in each of two micro-batches
        layers = together["fused"] // (2 * divided_ranks.STEPS)
        assert together["exchanges"] == (
            2 * divided_ranks.STEPS * (layers + 1) if case in divided_ranks.IN_BF16 else 0
        )
    assert together["frozen"] == alone["frozen"], case
    expected = (
        together["fused"] == 0 if "padded" in case else together["fused"] >= divided_ranks.STEPS * 2
    )
    assert expected, f"{case}: {together['fused']} layers ran fused"


BY_TWO = [
    case for case in divided_ranks.CASES if "copies" not in case and case != divided_ranks.DIFFER
]


def test_two_train_what_one_does(tmp_path):
    found = outcomes(tmp_path, 2, *BY_TWO)
    for case in BY_TWO:
        check(case, found[case])
        together = found[case]["together"]
        alone = found[case]["alone"]
        if case.startswith("full"):
            assert together["held"] < 0.6 * alone["held"]
        else:
            assert together["parts"] == 14 and alone["parts"] == 0
            whole = "tied" in case or "embedding" in case or "tokens" in case
            assert together["columns"] == alone["columns"] // (1 if whole else 2), case


def test_frozen_weights_that_differ_are_refused(tmp_path):
    """Of which each would keep its own rows."""
    found = outcomes(tmp_path, 2, divided_ranks.DIFFER)[divided_ranks.DIFFER]
    assert "do not train the same: weights is" in found["refused"]


@pytest.mark.long
def test_three_train_what_one_does(tmp_path):
    """Whose number divides no weight: a rank has fewer rows than others."""
    check("full", outcomes(tmp_path, 3, "full")["full"])


@pytest.mark.long
def test_four_train_what_one_does(tmp_path):
    """All four dividing the weights, and two copies of two."""
    cases = [case for case in divided_ranks.CASES if "copies" in case] + ["full tied", "NF4"]
    found = outcomes(tmp_path, 4, *cases)
    for case in cases:
        check(case, found[case])
    assert found["NF4 in copies"]["together"]["parts"] == 14
    assert 0 < found["NF4"]["together"]["parts"] < 14, (
        "what cannot be cut at whole blocks of scales stays whole"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_8bit_optimizer": True}, "would cut blocks of 8-bit states"),
        ({"memory": ["offload_activations"]}, "tells activations from weights"),
        ({"memory": ["reduce_in_backward"]}, "sums gradients by itself"),
        ({"sharding_ranks": 3}, "4 processes cannot share weights 3 by 3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, fields, words):
    model = tiny.llama(hidden_size=72, intermediate_size=88)
    config = runs.config(tmp_path, sharding="weights", **fields)
    with pytest.raises(ConfigurationError, match=words):
        decide(Facts.of(config, present(model), ranks=4))


def test_weights_kept_in_fp32_are_refused(tmp_path):
    model = tiny.llama()
    model._keep_in_fp32_modules_strict = ["norm"]
    with pytest.raises(ConfigurationError, match="keeps norm in fp32.*sharding='optimizer'"):
        config = runs.config(tmp_path, sharding="weights", mixed_precision="bf16")
        check_divisible(Facts(config, model, 2), 2)


def test_weights_that_a_run_before_divided_are_not_taken_for_whole_ones(tmp_path):
    model = apply_lora(tiny.llama(), LoRAConfig(rank=2))
    shard_embedding(model, 0, 2, torch.device("cpu"))
    config = runs.config(tmp_path, use_lora=True, objective="pretraining")
    with pytest.raises(
        ConfigurationError,
        match="sharding='optimizer': a run before divided.* set sharding='weights'",
    ):
        prepare_session(model, config, build_objective(config))


def test_memory_chooses(tmp_path):
    """What does not fit whole is divided, unless the user says otherwise; a base under adapters
    is counted as frozen.
    """
    model = tiny.llama(num_hidden_layers=8, hidden_size=256, intermediate_size=1024)
    free = runs.config(tmp_path)
    held = sum(p.numel() for p in model.parameters())
    assert choose_sharding(Facts(free, model, 4, total=40 * held)) == "optimizer"
    assert choose_sharding(Facts(free, model, 4, total=6 * held)) == "weights"
    assert choose_sharding(Facts(free, model, 1, total=6 * held)) == "optimizer"
    assert choose_sharding(Facts(free.replace(sharding="none"), model, 4, total=6 * held)) == "none"
    assert (
        choose_sharding(Facts(free.replace(use_lora=True), model, 4, total=8 * held)) == "optimizer"
    )
    assert all(p.requires_grad for p in model.parameters())
