"""``memory: [offload_embeddings]``: refusals, bytes, whole runs with the same bits, and ``fit``."""

from dataclasses import replace

import pytest
import torch

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory.peak import FROZEN_WEIGHTS, HEAD_COPY
from chronicals.models.host_tables import table_of
from chronicals.policies import Facts, decide, embedding_offload
from chronicals.policies.exclusions import why_excluded
from chronicals.policies.fit import combinations, leanest_first, run_fits
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.policy import POLICIES
from chronicals.training.run.callbacks import Callback

OFFLOAD = POLICIES["offload_embeddings"]
ASKED = {"memory": ["offload_embeddings"], "use_lora": True, "mixed_precision": "bf16"}
TABLE = 32000 * 2048 * 2
"""Bytes of a table of ``tiny.planned`` in bf16."""


def facts_of(folder, adapted=True, total=1 << 34, backend="flash", tied=False, **fields):
    """Of a run on a card of so many bytes, whose model has shapes alone."""
    model = tiny.planned(tie_word_embeddings=tied)
    if adapted:
        with torch.device("meta"):
            apply_lora(model, LoRAConfig(rank=4))
    asked = ASKED if "fit" not in fields else {**ASKED, "memory": None}
    fields = {**asked, "gradient_accumulation_steps": 1, **fields}
    config = runs.config(
        folder, **{name: fields[name] for name in fields if fields[name] is not None}
    )
    return Facts(config, model, total=total, backend=backend)


def test_a_trained_embedding_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError,
        match=r"memory=\['offload_embeddings'\]: the input embedding is trained.*leave it out",
    ):
        decide(facts_of(tmp_path, adapted=False, use_lora=False))


def test_without_a_card_it_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="weights are in host memory anyway"):
        runs.train(tmp_path, memory=["offload_embeddings"], use_lora=True)


def test_objectives_that_draw_answers_are_refused(tmp_path):
    facts = facts_of(tmp_path)
    drawing = replace(facts, config=facts.config.fitted(objective="grpo"))
    assert "objective='grpo' draws answers" in OFFLOAD.why_not(drawing)


def test_a_host_that_is_too_small_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Facts, "planned", False)
    monkeypatch.setattr(Facts, "on_card", True)
    facts = facts_of(tmp_path)
    monkeypatch.setattr(embedding_offload, "available_memory", lambda: TABLE)
    assert "tables of 0.24 GiB, and 0.12 GiB" in OFFLOAD.why_not(facts)
    monkeypatch.setattr(embedding_offload, "available_memory", lambda: 2 * TABLE)
    assert OFFLOAD.why_not(facts) is None


def test_what_it_excludes(tmp_path):
    facts = facts_of(tmp_path)
    assert "tables that are whole" in why_excluded("divided weights", {OFFLOAD.name}, facts)
    assert "read by the card" in why_excluded("use_torch_compile", {OFFLOAD.name}, facts)


@pytest.mark.parametrize(("tied", "tables"), [(False, 2), (True, 1)])
def test_the_estimate_has_the_tables_in_host_memory_and_the_head_at_the_loss(
    tied, tables, tmp_path
):
    resident, away = (
        expected_memory(facts_of(tmp_path, tied=tied, memory=memory, use_cuda_graphs=False))[1]
        for memory in ([], ["offload_embeddings"])
    )
    assert resident.fixed - away.fixed == tables * TABLE
    assert resident.named[FROZEN_WEIGHTS] - away.named[FROZEN_WEIGHTS] == tables * TABLE
    assert away.away == {"embeddings in host memory": tables * TABLE}
    copies = {moment.name: moment.parts.get(HEAD_COPY, 0) for moment in away.moments("layers")}
    loss = ["the loss", "the gradient of the head"]
    assert copies == {name: TABLE * (name in loss) for name in copies}


def test_words_say_what_moves(tmp_path):
    facts = facts_of(tmp_path)
    assert decide(facts)[OFFLOAD.name].reason == (
        "as asked, embedding, and head but for the loss; 0.24 GiB"
    )
    facts.model.lm_head.requires_grad_(True)
    assert "embedding alone" in OFFLOAD.words(facts) and "0.12 GiB" in OFFLOAD.words(facts)


def test_fit_takes_it_only_where_nothing_else_fits(tmp_path):
    facts = facts_of(tmp_path, fit="settings", max_seq_length=512)
    configs = leanest_first(facts)
    asking = [config for config in configs if OFFLOAD.asked(config)]
    assert asking and len(asking) < len(configs) == len(list(combinations(facts))) + 1

    def held(config):
        return expected_memory(replace(facts, config=config))[1].needed("layers")

    least = min(held(config) for config in configs if not OFFLOAD.asked(config))
    assert least - min(map(held, asking)) > TABLE
    smaller = replace(facts, total=int((least - TABLE) / 0.9))
    found = [c for c in configs if run_fits(replace(smaller, config=c))]
    assert found and all(map(OFFLOAD.asked, found))


class Looks(Callback):
    """Notes after each step whether the tables are in host memory."""

    def __init__(self, model):
        self.model = model
        self.found = []

    def step_done(self, metrics):
        model = self.model
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        self.found.append([table_of(end) is not None for end in ends])


@pytest.mark.slow
@pytest.mark.parametrize("objective", [{}, {"objective": "dpo"}], ids=["sft", "dpo"])
def test_a_run_gives_the_same_bits(objective, tmp_path, monkeypatch):
    from preferences import rows

    monkeypatch.setattr(type(OFFLOAD), "why_not", lambda self, facts: None)
    given = rows(20) if objective else None
    fields = {"use_lora": True, "lora_dropout": 0.0, "max_steps": 3, "max_seq_length": 256}
    for name, memory in (("resident", []), ("away", ["offload_embeddings"])):
        model = tiny.llama()
        looks = Looks(model)
        runs.train(
            tmp_path / name, given, model, callbacks=[looks], memory=memory, **fields, **objective
        )
        assert table_of(model.get_input_embeddings()) is None
        assert looks.found[0] == [bool(memory)] * 2
    assert runs.trajectory(tmp_path / "resident") == runs.trajectory(tmp_path / "away")
    resident, away = (runs.weights(tmp_path / name) for name in ("resident", "away"))
    assert resident.keys() == away.keys()
    assert all(torch.equal(value, away[name]) for name, value in resident.items())
