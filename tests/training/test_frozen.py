"""An objective's frozen models: brought once a run from the model as it was loaded, frozen,
presented, and released.
"""

import copy

import pytest
import torch

import runs
import tiny
from chronicals.data import create_dataloader
from chronicals.models import attention_seam
from chronicals.models.presentation import OVER_DOCUMENTS
from chronicals.objectives import NextToken, Objective, Term
from chronicals.training import ChronicalsTrainer
from chronicals.training.columns.frozen import bring_frozen, frozen_attending


class Beside(Objective):
    """The cross-entropy, and how far the hidden states are from those of a copy of what the run
    started from.
    """

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.tokenizers = []
        self.seen = []

    def bring(self, model, tokenizer, config):
        self.calls += 1
        self.tokenizers.append(tokenizer)
        assert not any("lora" in name for name, _ in model.named_parameters())
        model = copy.deepcopy(model)
        return {"reference": model.train().requires_grad_(True)}

    def __call__(self, model, batch):
        reference = self.frozen["reference"]
        assert not reference.model.training and not any(
            p.requires_grad for p in reference.model.parameters()
        )
        with torch.no_grad():
            there = reference.hidden_states(batch)
        with torch.no_grad():
            distance = (model.hidden_states(batch) - there).square().mean()
        self.seen.append(float(distance))
        return {**NextToken()(model, batch), "distance": Term(distance, 0.0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapters", [{}, {"use_lora": True, "lora_rank": 4}], ids=["full", "adapters"]
)
def test_it_is_what_the_run_started_from(adapters, tmp_path):
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, max_steps=3, **adapters)
    )
    trainer.objective = objective = Beside()
    trainer.train(tiny.chat_rows())
    assert objective.calls == 1 and objective.tokenizers == [trainer.tokenizer]
    rounding = (
        1e-10 if torch.cuda.is_available() else 1e-12
    )  # 5e-12 on a card, where adapters take part in the product
    # On a card kernels are compiled by a call before, whose values are arbitrary.
    first, *_, last = objective.seen[-3 * 2 :]
    assert first < rounding < last
    assert objective.frozen == {}


@pytest.mark.slow
def test_held_out_data_see_it(tmp_path):
    trainer = ChronicalsTrainer(
        tiny.llama(),
        tiny.tokenizer(),
        runs.config(tmp_path, max_steps=2, validation_split=0.2, eval_steps=1),
    )
    trainer.objective = Beside()
    assert trainer.train(tiny.chat_rows()).evaluation.others["distance"] > 0


def test_its_documents_do_not_see_each_other(tmp_path):
    """The frozen model's states of a pack are those of each document by itself."""
    objective = Beside()
    config = runs.config(tmp_path)
    bring_frozen(objective, tiny.llama(), None, config)
    (step,) = create_dataloader(tiny.chat_rows(), tiny.tokenizer(), config).steps(count=1)
    batch = step.batches[0]
    frozen = objective.frozen["reference"]
    with torch.no_grad(), frozen_attending(objective):
        assert not attention_seam.module_without(frozen.model, OVER_DOCUMENTS)
        states = frozen.hidden_states(batch)
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        alone = [
            frozen.model.get_decoder()(batch.input_ids[None, a:b])[0][0]
            for a, b in zip(bounds, bounds[1:])
            if b > a
        ]
    torch.testing.assert_close(states, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_it_is_released_when_a_run_fails(tmp_path):
    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, max_steps=1))
    trainer.objective = objective = Beside()
    objective.__class__ = type("Failing", (Beside,), {"__call__": lambda *given: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        trainer.train(tiny.chat_rows())
    assert objective.frozen == {}
