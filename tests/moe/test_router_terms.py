"""The anchor of models whose forward pass in training is random: dropout, and the jitter of
Mixtral's routers.
"""

import pytest
import torch

import families
import runs
import tiny
from chronicals.models import Computed, PresentedModel, present
from chronicals.moe.router_terms import Anchor, replayed
from chronicals.training.run.callbacks import read_metrics
from mixtures import mixture


def with_jitter():
    return families.mixture("mixtral", vocab_size=300, router_jitter_noise=0.1)


def native_with_dropout():
    """Documents that are packed attend without dropout; padded rows attend as the class does."""
    return PresentedModel(
        mixture(vocab_size=300, attention_dropout=0.1), packed=False, head_is_read=True
    )


RANDOM = {
    "jitter": lambda: present(with_jitter()),
    "attention dropout": native_with_dropout,
    "no random numbers": lambda: present(families.mixture("mixtral", vocab_size=300)),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_it_is_zero_where_training_is_random(kind, tmp_path):
    presented = RANDOM[kind]()
    model = presented.model.train()
    batch = replayed(torch.randint(3, 300, (40,)), torch.tensor([0, 15, 40], dtype=torch.int32))
    with presented.attending_documents():
        made = Anchor.of(0.5, presented, batch)
        made.write(tmp_path)
        for anchor in (made, Anchor.read(0.5, presented, tmp_path, torch.device("cpu"))):
            assert anchor.draws == (kind != "no random numbers")
            term = anchor.terms(presented, Computed(torch.zeros(40, 1)), batch)["router/anchor"]
            assert term.sum == 0 and all(module.training for module in model.modules())
            if anchor.draws:
                beside = [
                    (a - b).abs().max()
                    for a, b in zip(presented.router_logits(batch), anchor.reference)
                ]
                assert max(beside) > 1e-4  # in training it is another function
        gate = next(p for name, p in model.named_parameters() if name.endswith("gate.weight"))
        with torch.no_grad():
            gate += 0.1 * torch.randn_like(gate)
        values = [
            anchor.terms(presented, Computed(torch.zeros(40, 1)), batch)["router/anchor"].sum
            for _ in range(2)
        ]
        assert values[0] == values[1] > 0
        values[0].backward()
        assert bool(gate.grad.any())


@pytest.mark.slow
def test_a_run_begins_at_zero_and_goes_on(tmp_path):
    """Layers are recomputed in the backward pass, which is in training mode: the replay is not
    one of them.
    """
    router = {"anchor": 0.5, "anchor_tokens": 64, "balance": 0.01}
    runs.train(
        tmp_path,
        tiny.chat_rows(40),
        with_jitter(),
        router=router,
        max_steps=3,
        memory=["recompute_layers"],
        warmup_steps=0,
        learning_rate=1e-2,
    )
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert lines[0]["router/anchor"] == 0.0 and lines[-1]["router/anchor"] > 0.0
