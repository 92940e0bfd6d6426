"""A padding token that the embedding lacks and no document holds changes nothing; data with such
ids is refused in words.
"""

import pytest

import runs
import tiny
from chronicals.data import DataError, filler_token
from chronicals.training import ChronicalsTrainer
from chronicals.training.run.evaluation import evaluate_data
from chronicals.verification import verify


@pytest.fixture
def padded():
    """A tokenizer whose padding token has the id behind the last row of the tiny model's
    embedding.
    """
    tokenizer = tiny.tokenizer()
    rows = tiny.llama().get_input_embeddings().weight.shape[0]
    while len(tokenizer) < rows:
        tokenizer.add_tokens(f"<unused {len(tokenizer)}>")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id >= rows
    return tokenizer


def test_the_filler_is_the_padding_token_where_the_embedding_has_it(padded):
    assert filler_token(padded, padded.pad_token_id + 1) == padded.pad_token_id
    assert filler_token(padded, padded.pad_token_id) == 0
    padded.pad_token = None
    assert filler_token(padded, 3) == 0


@pytest.mark.slow
def test_train_evaluate_and_verify_go_on_without_it(tmp_path, padded):
    settings = runs.config(tmp_path, max_steps=2)
    ChronicalsTrainer(tiny.llama(), padded, settings).train(tiny.chat_rows())
    runs.train(tmp_path / "usual", max_steps=2)
    assert runs.trajectory(tmp_path) == runs.trajectory(tmp_path / "usual")
    scores = [
        evaluate_data(tiny.llama(), tokenizer, tiny.chat_rows(5), settings)
        for tokenizer in (padded, tiny.tokenizer())
    ]
    assert scores[0] == scores[1]
    assert verify(
        tiny.llama(), padded, settings.replace(max_steps=5), tiny.chat_rows(), steps=5
    ).passed


def test_data_with_ids_that_the_embedding_lacks_is_not_evaluated(tmp_path, padded):
    rows = [{"input_ids": [1, 2, padded.pad_token_id, 3]}]
    with pytest.raises(DataError, match="id_out_of_range"):
        evaluate_data(tiny.llama(), tiny.tokenizer(), rows, runs.config(tmp_path))
