"""CUDA graphs run where their memory pool has room beside a step."""

from dataclasses import replace

import torch

import tiny
from chronicals.cards import rates_of
from chronicals.config import ChronicalsConfig
from chronicals.memory import RESERVE
from chronicals.memory.peak import GRADIENTS
from chronicals.policies import Facts, decide
from chronicals.policies.model_sizes import ModelSizes
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.solver import fit_to_memory, settle_sharding, work_of

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}


def facts(total, **fields):
    """Facts of a planned run in two micro-batches, on a card of so many bytes."""
    with torch.device("meta"):
        model = tiny.llama(**SIZES)
    memory = {"memory": [], "gradient_accumulation_steps": 2}
    return Facts(ChronicalsConfig(**{**memory, **fields}), model, total=total)


def fitted(given):
    given, sharding = settle_sharding(given)
    return fit_to_memory(given, sharding, expected_memory(given)[1])


def sizes():
    """Bytes that the run holds, and those of the pool."""
    made = fitted(facts(10**12))
    assert made.pool > 0
    return made.held, made.pool


def test_without_room_for_the_pool_steps_run_without_graphs():
    held, pool = sizes()
    enough = int((held + pool) / RESERVE) + 2
    assert decide(facts(enough))["use_cuda_graphs"].runs
    made = decide(facts(enough - 10 * 2**20))["use_cuda_graphs"]
    assert not made.runs
    assert (
        made.reason
        == f"no room for the {pool / 2**30:.1f} GiB of their memory pool beside a step's"
    )


def test_where_gradients_cannot_stay_for_graphs_the_run_fits_without_them():
    """One micro-batch: the memory is that of a run that turned graphs off, and nothing is asked."""

    def one(total, **fields):
        usual = {"gradient_accumulation_steps": 1, "memory": ["recompute_layers"], "batch_size": 16}
        return facts(total, **usual, **fields)

    roomy = fitted(one(10**12)).held
    turned_off = fitted(one(10**12, use_cuda_graphs=False)).held
    assert roomy - turned_off > 100 * 2**20
    tight = int((turned_off + roomy) / 2 / RESERVE)
    made = decide(one(tight))["use_cuda_graphs"]
    assert not made.runs and made.reason == "no room for gradients that stay between their steps"
    assert fitted(one(tight)).held == turned_off
    asked = expected_memory(one(tight, use_cuda_graphs=True))[1]
    assert not asked.without_graphs and not asked.fits


def test_graphs_that_were_asked_for_run_all_the_same():
    held, _ = sizes()
    assert decide(facts(int(held / RESERVE) + 2, use_cuda_graphs=True))["use_cuda_graphs"].runs


def test_documents_that_are_alike_need_no_room_beside():
    """The only other step that makes as much is the first, whose memory is given back."""
    held, _ = sizes()
    given = facts(int(held / RESERVE) + 2, gradient_accumulation_steps=1)
    assert not decide(given)["use_cuda_graphs"].runs
    assert decide(replace(given, alike=True))["use_cuda_graphs"].runs


def test_a_pool_has_gradients_of_its_own():
    """A step's first graph makes them anew, and copies them to those that stand."""
    one_pack = {"batch_size": 1, "max_seq_length": 128, "use_lora": False}
    made = fitted(facts(10**12, **one_pack))
    standing = made.memory.named[GRADIENTS]
    assert standing > made.held - made.memory.fixed
    assert made.pool > standing
    adapted = fitted(facts(10**12))
    assert adapted.pool == adapted.held - adapted.memory.fixed


def test_a_step_without_room_for_graphs_waits_for_the_host():
    held, pool = sizes()
    slow = replace(rates_of("H100"), launch=1.0)
    seconds = []
    for total in (held + 2 * pool, held):
        given = facts(int(total / RESERVE) + 2)
        model = ModelSizes.of(given.model)
        seconds.append(work_of(given, False, fitted(given), model).at(slow).launches)
    assert seconds[1] > 100 * seconds[0]
