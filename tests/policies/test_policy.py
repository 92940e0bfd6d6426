"""A new policy is one file: all that a run asks of policies, it asks of a registered one."""

import logging
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import StepShape
from chronicals.memory.recompute import TILE
from chronicals.models import present
from chronicals.policies import (
    Decision,
    Facts,
    Policy,
    Stage,
    decide,
    register_policy,
    summary,
)
from chronicals.policies.exclusions import EXCLUSIONS, Exclusion
from chronicals.policies.needed_memory import expected_memory, ways_to_take_less
from chronicals.policies.policy import POLICIES, MemoryLoad, Remedy, Running

MIB = 2**20


class LeanStates(Policy):
    """Pretends to keep the states in a quarter of their bytes, beside a table of a MiB."""

    name = "lean_states"
    title = "lean optimizer states"
    setting = "run_name='lean'"
    stage = Stage.MODULES

    def __init__(self):
        self.seen = []

    def asked(self, config):
        return config.run_name == "lean"

    def why_not(self, facts):
        rows = facts.config.batch_size
        return f"batch_size={rows} is odd; take {rows + 1}" if rows % 2 else None

    def words(self, facts):
        return f"a quarter of {len(facts.trained)} weights'"

    def bytes(self, facts, load):
        return replace(load, states=load.states / 4, fixed=load.fixed + MIB)

    def apply(self, model, facts, decision):
        self.seen.append(decision.field)

    @contextmanager
    def around_steps(self, model, decision):
        self.seen.append("steps begin")
        yield
        self.seen.append("steps end")

    def addition(self, running):
        if running.decisions[self.name].runs:
            return None
        return Decision(self.name, True, "states become lean")

    def join(self, running, decision):
        self.seen.append("joined")

    def remedies(self, config, ranks):
        if not self.asked(config):
            yield Remedy({"run_name": "lean"}, "states lose digits")


@pytest.fixture
def lean():
    policy = register_policy(LeanStates())
    EXCLUSIONS.append(
        Exclusion("lean_states", "tiled_mlp", "tiles need whole states; leave it out")
    )
    yield policy
    POLICIES.pop(policy.name)
    EXCLUSIONS.pop()


def facts_of(folder, **fields):
    config = runs.config(folder, batch_size=2, **fields)
    return Facts.of(config, present(tiny.llama(), True, True, 128))


def test_it_is_asked(lean, tmp_path):
    assert not decide(facts_of(tmp_path))["lean_states"].runs
    assert decide(facts_of(tmp_path, run_name="lean"))["lean_states"].runs


def test_it_is_refused_with_its_reason(lean, tmp_path):
    facts = facts_of(tmp_path, run_name="lean")
    odd = replace(facts, config=facts.config.replace(batch_size=3))
    with pytest.raises(ConfigurationError, match="run_name='lean': batch_size=3 is odd; take 4"):
        decide(odd)


def test_the_table_excludes_it(lean, tmp_path):
    wide = {"memory": ["tiled_mlp"], "max_seq_length": 4096}
    with pytest.raises(ConfigurationError, match="run_name='lean': tiles need whole states"):
        decide(facts_of(tmp_path, run_name="lean", **wide))
    assert decide(facts_of(tmp_path, **wide))["tiled_mlp"].runs


def test_its_bytes_are_counted(lean, tmp_path):
    (_, plain), (_, with_it) = (
        expected_memory(facts_of(tmp_path, **fields)) for fields in ({}, {"run_name": "lean"})
    )
    values = sum(p.numel() for p in tiny.llama().parameters())
    assert plain.fixed - with_it.fixed == pytest.approx(6 * values - MIB, abs=1)


@pytest.mark.parametrize(("adapted", "sums"), [(False, 4 * 64 * 96), (True, 0)])
def test_gradients_of_an_mlp_are_summed_over_its_tiles(tmp_path, adapted, sums):
    """In fp32; of a frozen weight there are none."""
    model = tiny.llama()
    if adapted:
        apply_lora(model, LoRAConfig(rank=2))
    facts = Facts(runs.config(tmp_path), model)
    load = MemoryLoad(StepShape(TILE + 1, True, 2, 8), 2, 2, 2, 2, gradients_stay=False)
    tiled = POLICIES["tiled_mlp"].bytes(facts, load)
    assert tiled.gradient == 4
    assert tiled.step == replace(load.step, tile=TILE, tile_sums=sums)


def test_the_log_and_the_advice_name_it(lean, tmp_path):
    decisions = decide(facts_of(tmp_path, run_name="lean"))
    (line, *_) = summary(decisions.values())
    assert line.endswith(f"lean optimizer states ({decisions['lean_states'].reason})")
    assert "a quarter of" in line
    assert "run_name=lean (states lose digits)" in ways_to_take_less(ChronicalsConfig())
    assert not any("lean" in way for way in ways_to_take_less(ChronicalsConfig(run_name="lean")))


@pytest.mark.slow
def test_a_run_applies_it(lean, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        runs.train(tmp_path, max_steps=1, batch_size=2, run_name="lean")
    assert lean.seen == ["lean_states", "steps begin", "steps end"]
    assert "lean optimizer states (a quarter of" in caplog.text


@pytest.mark.slow
def test_a_run_that_is_short_of_memory_takes_it_on(lean, tmp_path, caplog):
    """Between two steps, after what costs less; it begins then, and ends with the steps."""

    def ask(module, given, output):
        if torch.is_grad_enabled() and "joined" not in lean.seen:
            raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")

    model = tiny.llama()
    model.model.layers[0].register_forward_hook(ask)
    fields = {"batch_size": 1, "max_steps": 2, "fit": "auto"}
    with caplog.at_level(logging.INFO):
        runs.train(tmp_path, model=model, **fields)
    assert lean.seen == ["joined", "steps begin", "steps end"]
    assert "all layers are recomputed (2 of at most 3 times)" in caplog.text
    assert "states become lean (3 of at most 3 times)" in caplog.text


@pytest.mark.parametrize(
    ("fields", "joins"),
    [({}, True), ({"memory": []}, False), ({"activation_offload": False}, False)],
)
def test_what_is_set_otherwise_does_not_join(fields, joins):
    with torch.device("meta"):
        model = tiny.llama()
    given = Facts(ChronicalsConfig(**fields), model, total=1 << 40)
    running = Running(given, decide(given), model, None)
    decision = POLICIES["activation_offload"].addition(running)
    assert (decision is not None) == joins
    if joins:
        several = replace(given, ranks=2, config=given.config.fitted(sharding="weights"))
        assert POLICIES["activation_offload"].addition(replace(running, facts=several)) is None
