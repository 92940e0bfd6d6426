"""What a run says of its memory: a peak that was not planned, and what was planned where it ends."""

import logging
from types import SimpleNamespace

import pytest
import torch

import tiny
from chronicals import ChronicalsConfig
from chronicals.memory import Moment
from chronicals.policies import Facts, decide
from chronicals.training import TrainingError
from chronicals.training.run import guard
from chronicals.training.run.guard import (
    less_is_taken_by,
    peak_bytes,
    say_if_memory_was_other,
    saying_what_helps,
)

GIB = 2**30
PLANNED = Moment("the loss", {"frozen weights": 6 * GIB, "logits of a chunk": 4 * GIB})


@pytest.mark.parametrize(
    ("planned", "before", "measured", "said"),
    [
        (PLANNED, 2, 10.4, None),
        (PLANNED, 2, 9.6, None),
        (PLANNED, 2, 10.6, "at most 10.60 GiB were held, +6.0 % of the 10.00 that were planned"),
        (PLANNED, 2, 9.0, "-10.0 % of the 10.00"),
        (PLANNED, 12, 12, None),
        (None, 2, 12, None),
    ],
    ids=["near", "below", "more", "less", "a peak before the first step", "no card"],
)
def test_a_peak_that_differs_is_said_with_the_parts(planned, before, measured, said, caplog):
    with caplog.at_level(logging.INFO, "chronicals"):
        say_if_memory_was_other(planned, int(before * GIB), int(measured * GIB))
    assert (said is None) == (not caplog.text)
    if said is not None:
        assert said in caplog.text
        assert "at the loss: frozen weights 6.00 GiB, logits of a chunk 4.00 GiB" in caplog.text


@pytest.mark.parametrize("planned", [PLANNED, None], ids=["planned", "not yet"])
def test_an_out_of_memory_says_what_was_planned(planned):
    with (
        pytest.raises(TrainingError, match="out of memory on cpu") as raised,
        saying_what_helps(ChronicalsConfig(), torch.device("cpu"), planned=lambda: planned),
    ):
        raise torch.OutOfMemoryError("full")
    words = "Planned were 10.0 GiB, at the loss: frozen weights 6.00 GiB, logits"
    assert (words in str(raised.value)) == (planned is not None)
    assert "Less is taken by" in str(raised.value)


@pytest.fixture
def session():
    """Of a run for which ``fit`` took two packs at a time and 1,024 rows of logits."""
    config = ChronicalsConfig(batch_size=2, gradient_accumulation_steps=4, logits_chunk_size=1024)
    facts = Facts(config, tiny.llama(), total=GIB)
    return SimpleNamespace(config=config, facts=facts, decisions=decide(facts))


def test_remedies_are_those_of_the_settings_that_were_taken(session):
    asked = ChronicalsConfig(batch_size=4, gradient_accumulation_steps=2)
    words = less_is_taken_by(asked, 1, session)
    assert "Less is taken by batch_size=1 with gradient_accumulation_steps=8 (saves about" in words
    assert "batch_size=2" not in words and "logits_chunk_size" not in words
    assert "batch_size=2" in less_is_taken_by(asked, 1, None)


def test_what_saves_nothing_is_not_offered(session, monkeypatch):
    """Whether its bytes would be named or not."""
    sizes = iter(["3 GiB", "2 GiB", "1 GiB"])
    monkeypatch.setattr(guard, "saved_in_words", lambda *_: next(sizes, None))
    words = less_is_taken_by(session.config, 1, session)
    assert words.count("; or ") == 2 and words.endswith(")") and "1 GiB" in words
    words = less_is_taken_by(session.config, 1, session)
    assert words.startswith("No other setting takes less")


def test_without_a_card_nothing_was_held():
    assert peak_bytes(torch.device("cpu")) == 0
