"""``train_after_stop``: what a chat template writes behind the stop token of an answer is
trained as TRL trains it.
"""

import numpy as np
import pytest
import stock_templates
from stock_templates import with_template

import runs
import tiny
from chronicals.data import Tokenizer, build_store
from chronicals.data.kinds.rows import NormalRow
from chronicals.data.tokens.batch_encoding import BatchEncoder
from chronicals.training.run.finish import TAUGHT
from preferences import rows

CHATML = ["qwen3_instruct_2507", "qwen2_5_vl", "lfm2", "smolvlm"]
"""Templates after whose stop token a newline follows, and whose twins differ from ours in
nothing else.
"""

KINDS = ["single", "turns", "system"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHATML)
def test_masks_are_those_of_trl(name, kind):
    """Of the marked templates that TRL trains answers by; without the field they differ by the
    newline.
    """
    if name not in stock_templates.names():
        pytest.skip(f"this trl has no {name}")
    row = stock_templates.record(kind)
    assert stock_templates.differences(name, row) == {"trains '\\n' after"}
    assert stock_templates.differences(name, row, train_after_stop=True) == set()


def test_all_that_follows_the_last_answer_is_trained():
    name = "phi3"
    if name not in stock_templates.names():
        pytest.skip("this trl has no phi3")
    row = stock_templates.record("turns")
    assert "trains '\\n<|endoftext|>' after" in stock_templates.differences(name, row)
    assert stock_templates.differences(name, row, train_after_stop=True) == set()


def test_a_completion_is_trained_to_its_end():
    """As TRL masks prompts and completions: everything behind the prompt."""
    tokenizer = tiny.tokenizer()
    prompt = [{"role": "user", "content": "what is the answer?"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "forty two"}]}
    _, trained = Tokenizer(tokenizer, train_after_stop=True).encode(row, "row 1")
    begun = len(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )
    assert trained == [False] * begun + [True] * (len(trained) - begun)
    _, without = Tokenizer(tokenizer).encode(row, "row 1")
    assert sum(trained) == sum(without) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_at_once_are_masked_alike(kind):
    name = "qwen3_instruct_2507"
    if name not in stock_templates.names():
        pytest.skip(f"this trl has no {name}")
    encoder = Tokenizer(with_template(stock_templates.shipped(name)), train_after_stop=True)
    given = [NormalRow.of(stock_templates.record(kind), "chat", f"row {n}") for n in range(20)]
    wheres = [f"row {n}" for n in range(20)]
    for row, where, (ids, trained) in zip(
        given, wheres, BatchEncoder(encoder).encode_batch(given, wheres), strict=True
    ):
        expected_ids, expected = encoder.encode_normalised(row, where)
        assert ids.tolist() == expected_ids and trained.astype(bool).tolist() == expected


def test_what_users_say_is_masked_as_before():
    row = {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "world"},
        ]
    }
    for options in ({"train_on_roles": ["user"]}, {"train_on": "all"}):
        with_it = Tokenizer(tiny.tokenizer(), train_after_stop=True, **options).encode(row, "row 1")
        assert with_it == Tokenizer(tiny.tokenizer(), **options).encode(row, "row 1")


def test_stores_have_names_of_their_own():
    names = [
        Tokenizer(tiny.tokenizer(), train_after_stop=after).fingerprint() for after in (False, True)
    ]
    assert names[0] != names[1]


def test_a_run_has_it(tmp_path):
    """Each answer of a preference has a target more, and whoever evaluates the model counts it,
    too.
    """
    configs = [runs.config(tmp_path, train_after_stop=after) for after in (False, True)]
    encoders = [
        Tokenizer.configured(tiny.tokenizer(), config, ["preference"]) for config in configs
    ]
    stores = [
        build_store(rows(12), encoder, 128, tmp_path / encoder.fingerprint())
        for encoder in encoders
    ]
    answers = stores[0].targets > 0
    assert np.array_equal(stores[1].targets[answers], stores[0].targets[answers] + 1)
    assert "train_after_stop" in TAUGHT
