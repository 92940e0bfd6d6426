"""Pairs of answers as work: what is made, what a step holds, and what is refused."""

import json

import made
import numpy as np
import pytest
from peers.names import chosen_peers
from peers.preference import equal_steps

from chronicals.benchmark.arms.weights import prepare_work
from chronicals.benchmark.pairs import (
    PROMPT_SHARES,
    TOKENS_BESIDE_ROWS,
    Pair,
    PairSteps,
    random_pairs,
)
from chronicals.benchmark.plan import plan_work, read_work
from chronicals.benchmark.shapes import BYTE_TOKENS, SPECIAL_TOKENS, word_tokenizer
from chronicals.config import ConfigurationError

WIDE = {"objective": "dpo", "max_seq_length": 256, "batch_size": 2}


def planned(folder, mode="full", data="pairs-50", **fields):
    work = made.work(folder, mode, data, **{**WIDE, **fields})
    prepare_work(work)
    return work


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("pairs"))


@pytest.mark.slow
@pytest.mark.parametrize("data", PROMPT_SHARES)
def test_the_prompt_is_its_share_of_both_rows_and_no_pair_is_cut(data):
    lengths = np.array(
        [
            [len(row[side].split()) for side in ("prompt", "chosen", "rejected")]
            for row in _rows(data)
        ]
    )
    prompt, chosen, rejected = lengths.T
    rows = prompt + (chosen + rejected) / 2
    assert 2 * prompt.sum() / (2 * rows).sum() == pytest.approx(PROMPT_SHARES[data], abs=0.01)
    assert (
        rows.max() <= 2048 - TOKENS_BESIDE_ROWS
        and rows.min() >= 32
        and np.median(rows) == pytest.approx(400, rel=0.1)
    )
    assert (chosen != rejected).mean() > 0.9 and (prompt + chosen + rejected + 4).max() <= 4096


def _rows(data):
    return random_pairs(PROMPT_SHARES[data], 10**6, 4096, 30000)


def test_words_are_token_ids_and_rejected_answers_have_rarer_ones():
    tokenizer = word_tokenizer(1000)
    rows = random_pairs(0.5, 20000, 256, 1000)
    ids = {
        side: [number for row in rows for number in tokenizer(row[side])["input_ids"]]
        for side in rows[0]
    }
    special = range(BYTE_TOKENS, BYTE_TOKENS + len(SPECIAL_TOKENS))
    assert all(
        0 <= number < 1000 and number not in special for side in ids.values() for number in side
    )
    assert np.median(ids["rejected"]) > 1.5 * np.median(ids["chosen"])
    assert tokenizer("t7 t260")["input_ids"] == [7, 260] and tokenizer.eos_token_id in special


def test_a_step_holds_whole_pairs_with_one_end_each(work):
    known = {tuple(row.items()) for row in map(json.loads, work.documents.read_text().splitlines())}
    end = BYTE_TOKENS

    def words(ids):
        return " ".join(f"t{number}" for number in ids)

    for pair in [pair for step in work.pairs_by_step(3) for pair in step]:
        assert pair.chosen[-1] == pair.rejected[-1] == end
        texts = words(pair.prompt), " " + words(pair.chosen[:-1]), " " + words(pair.rejected[:-1])
        assert tuple(zip(("prompt", "chosen", "rejected"), texts)) in known


def test_the_steps_are_those_that_our_run_takes(work):
    """And where prompts are shared, less is computed than there is."""
    steps = list(work.stream().steps(count=4))
    real = work.real_tokens(0, [step.counts["tokens"] for step in steps])
    assert [step.counts["items"] for step in steps] == [
        len(pairs) for pairs in work.pairs_by_step(4)
    ]
    assert sum(real) > 1.15 * sum(step.counts["tokens"] for step in steps)
    assert work.real_tokens(2, [0]) == real[2:3]
    assert [sum(map(len, step)) for step in work.documents_by_step(4)] == real
    assert (
        work.job().tokens > 0
        and work.job().why_uncounted
        and work.described["prompt_share"] == pytest.approx(0.5, abs=0.05)
    )


def test_it_is_read_again(work):
    assert read_work(work.folder) == work and type(read_work(work.folder)) is type(work)


def test_equal_steps_hold_the_same_pairs_sorted(work):
    steps = [*work.pairs_by_step(6)]
    equal = equal_steps(steps)
    flat = [pair for step in steps for pair in step]
    assert len({len(step) for step in equal}) == 1 and len(equal[0]) % 4 == 0
    for number, step in enumerate(equal):
        assert [pair.longest for pair in step] == sorted(
            (pair.longest for pair in step), reverse=True
        )
        taken = flat[number * len(step) : (number + 1) * len(step)]
        assert sorted(map(repr, step)) == sorted(map(repr, taken))


def test_what_was_held_is_written_and_read():
    held = PairSteps(
        [[[Pair([1], [2], [3, 4])]], [[Pair([1], [2], [3])], [Pair([5], [6], [7])]]],
        prompt_is_trained=True,
    )
    assert PairSteps.of_json(json.loads(json.dumps(held.to_json()))) == held


def test_learning_rates_are_those_of_the_objective(tmp_path):
    rates = {
        name: made.work(tmp_path, "lora", "pairs-50", objective=name).config().learning_rate
        for name in ("dpo", "orpo")
    }
    assert rates["dpo"] < rates["orpo"] == made.work(tmp_path, "lora").config().learning_rate


@pytest.mark.parametrize(
    ("data", "fields", "said"),
    [
        ("fixed", {"objective": "dpo"}, "another objective"),
        ("pairs-50", {}, "objective='dpo' or objective='orpo'"),
    ],
)
def test_data_of_the_other_kind_are_refused(tmp_path, data, fields, said):
    with pytest.raises(ConfigurationError, match=said):
        plan_work(tmp_path, "tiny", data, "full", fields, 1, 1)


def test_settings_that_peers_lack_are_refused(tmp_path):
    assert (
        made.work(tmp_path, data="pairs-50", objective="dpo", sections={"dpo": {"beta": 0.3}}).beta
        == 0.3
    )
    with pytest.raises(ConfigurationError, match="dpo.loss='hinge'"):
        made.work(tmp_path, data="pairs-50", objective="dpo", sections={"dpo": {"loss": "hinge"}})


def test_peers_without_a_trainer_of_pairs_are_refused():
    assert chosen_peers(["trl", "unsloth"], "pairs-50", True, objective="dpo") == [
        "trl",
        "unsloth-recompute",
        "unsloth",
    ]
    with pytest.raises(ConfigurationError, match="no trainer for pairs"):
        chosen_peers(["liger"], "pairs-50", False, objective="dpo")
