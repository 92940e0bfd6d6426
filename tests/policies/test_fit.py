"""``fit`` takes the fastest settings that fit, among those that change no result."""

import random
import re
from dataclasses import replace

import pytest

import runs
import tiny
from chronicals.cards import rates_of
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.lora import apply_lora
from chronicals.lora.config import LoRAConfig
from chronicals.memory import RESERVE
from chronicals.models import present
from chronicals.objectives import build_objective
from chronicals.planning import Machines, plan
from chronicals.policies import Facts, decide, facts
from chronicals.policies.fit import (
    CARDS,
    Clock,
    can_fit,
    candidate,
    combinations,
    difference,
    fit_settings,
    least_seconds,
    offers,
    on_cards,
    refuse_what_no_setting_fits,
    what_would_do,
)
from chronicals.policies.model_sizes import ModelSizes
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.policy import POLICIES, policies
from chronicals.training import ChronicalsTrainer
from chronicals.training.run import length
from chronicals.training.session import prepared

GB = 10**9
RESULTS = ("use_8bit_optimizer", "quantization", "max_seq_length", "use_lora", "use_fp8")


def planned(gigabytes, adapters=False, ranks=1, **fields):
    """Facts of a run of a model of 0.35 B on a card of this size."""
    model = tiny.planned()
    if adapters:
        apply_lora(model, LoRAConfig(rank=16))
        fields["use_lora"] = True
    config = ChronicalsConfig(fit="settings", **fields)
    return Facts(config, model, ranks=ranks, total=int(gigabytes * GB))


def test_a_run_that_fits_stays_as_it_is():
    settled = fit_settings(planned(80))
    assert settled.taken is settled.usual and settled.taken.settings == {}
    assert settled.facts.config == settled.usual.facts.config
    assert settled.words[0].startswith("fit: the fastest settings that fit: those of the run; ")
    assert len(settled.words) == 1, "nothing is offered where nothing is short"


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("size", [4, 6, 9])
def test_the_fastest_that_fits_is_taken(size, adapters):
    """No combination of settings that fits takes fewer seconds, by trying all."""
    given = planned(size, adapters)
    taken = fit_settings(given, rates=rates_of("H100")).taken
    clock = Clock(rates_of("H100"), ModelSizes.of(given.model))
    others = [
        candidate(replace(given, config=changes[-1].config), changes, clock)
        for changes in combinations(given)
    ]
    fitting = [one.seconds for one in others if one.fits]
    assert len(fitting) > 3 and taken.fits and min(fitting) >= taken.seconds * (1 - 1e-9)
    assert max(fitting) > 1.05 * taken.seconds, "there are slower ones to take by mistake"
    assert taken.fitted.held <= RESERVE * size * GB


@pytest.mark.parametrize("size", [0.2, 1, 3, 5])
@pytest.mark.parametrize("adapters", [False, True])
def test_what_changes_results_is_offered_and_not_taken(size, adapters):
    given = planned(size, adapters)
    settled = fit_settings(given)
    for name in RESULTS:
        assert getattr(settled.facts.config, name) == getattr(given.config, name)
    offered = " ".join(offers(settled.taken))
    assert "max_seq_length=1024 (what is longer is split or cut) saves" in offered
    assert ("quantization=nf4 (the base is rounded to 4 bits) saves" in offered) == adapters
    assert not {"use_8bit_optimizer", "quantization"} & settled.taken.settings.keys()


def test_narrower_states_are_offered_with_what_they_save():
    given = planned(6, memory=[], batch_size=1)
    (words,) = (line for line in offers(fit_settings(given).taken) if "8bit" in line)
    trained = sum(p.numel() for p in given.trained)
    assert words.startswith("use_8bit_optimizer=True (states are rounded to 8 bits) saves ")
    saved = float(words.split()[-2])
    assert 0.5 * 6 * trained / 2**30 < saved < 6 * trained / 2**30


def test_the_log_says_who_switched_a_policy_on():
    name = "offload_optimizer_states"
    by_fit = decide(fit_settings(planned(6)).facts)[name]
    by_hand = decide(planned(80, memory=[name]))[name]
    assert by_fit.runs and by_hand.runs
    assert by_fit.reason == by_hand.reason.replace("as asked", "taken by fit") != by_hand.reason


def test_a_run_that_goes_on_takes_no_larger_batches():
    """Those that it was left with are what its memory held."""
    given = planned(80)
    smaller = given.config.fitted(batch_size=2, gradient_accumulation_steps=8)
    sizes = {}
    for resumed in (False, True):
        remedies = POLICIES["micro_batches"].settings(
            replace(given, config=smaller, resumed=resumed)
        )
        sizes[resumed] = [remedy.fields["batch_size"] for remedy in remedies]
    assert sizes == {False: [4, 1], True: [1]}


EXPLICIT = {
    "memory": {"memory": ["recompute_elementwise"]},
    "batch_size": {"batch_size": 4},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 4},
    "logits_chunk_size": {"logits_chunk_size": 4352},
    "activation_offload": {"activation_offload": False},
    "use_gradient_checkpointing": {"use_gradient_checkpointing": False},
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_a_field_that_was_set_is_kept(name):
    given = planned(1, **EXPLICIT[name])
    usual = given.config
    settled = fit_settings(given)
    changed = settled.facts.config
    assert settled.taken.changes, "the others are changed"
    assert all(getattr(changed, field) == getattr(usual, field) for field in usual.explicit)
    if name == "memory":
        assert changed.memory_policies == {"recompute_elementwise"}
    if name in ("batch_size", "gradient_accumulation_steps"):
        assert (changed.batch_size, changed.gradient_accumulation_steps) == (4, 4)
    if name == "activation_offload":
        assert "offload_activations" not in changed.memory_policies
    if name == "use_gradient_checkpointing":
        assert not settled.taken.fitted.recomputed.runs


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_packs_of_a_step_stay_the_same(size):
    config = fit_settings(planned(size)).facts.config
    assert config.batch_size < 4 and config.batch_size * config.gradient_accumulation_steps == 16


def test_a_small_batch_grows_to_a_full_one_where_memory_is_there():
    settings = fit_settings(planned(80, max_seq_length=512)).taken.settings
    assert settings == {"batch_size": 16, "gradient_accumulation_steps": 1}


def test_each_change_is_said_with_its_cost_and_what_it_saves():
    settled = fit_settings(planned(4))
    first, *others = settled.words
    for name, value in settled.taken.settings.items():
        assert f"{name}={value}" in first
    changes = [line for line in others if "saves" in line and "costs" in line]
    assert len(changes) == len(settled.taken.changes) + settled.taken.fitted.recomputed.runs
    assert sum(float(line.split()[-2]) for line in changes) == pytest.approx(
        saved_by_all(settled), abs=0.05
    )


@pytest.mark.parametrize("waits", [True, False])
def test_what_costs_no_time_is_said_with_its_reason(waits):
    """While the host launches, the card has time for more."""
    rates = rates_of("H100")
    slow = replace(rates, launch=1.0) if waits else rates
    given = planned(80, use_cuda_graphs=False)
    clock = Clock(slow, ModelSizes.of(given.model))
    usual = candidate(given, (), clock)
    again = replace(usual, seconds=usual.seconds * 1.0001)
    words = difference(usual, again, clock)
    assert ("the card waits for the host's launches" in words) == waits
    assert words.endswith(" and saves 0.00 GiB") and "0.0%" not in words


def saved_by_all(settled):
    """GiB that the changes save beside the run's recomputation, and that this saves after them."""
    plan = settled.taken.fitted.plan
    usual, taken = (
        expected_memory(candidate.facts)[1] for candidate in (settled.usual, settled.taken)
    )
    of_changes = usual.needed(*plan) - taken.needed(*plan)
    return (of_changes + taken.needed("nothing") - taken.needed(*plan)) / 2**30


def test_processes_take_what_all_of_them_can():
    """A machine whose host memory is too small for the states keeps others from moving theirs."""
    given = planned(4)
    alone = fit_settings(given).taken
    assert "offload_optimizer_states" in alone.facts.config.memory_policies

    def gather(value):
        if isinstance(value, int):
            return [value, value]
        return [value, [name for name in value if "offload_optimizer_states" not in name]]

    together = fit_settings(given, gather)
    assert "offload_optimizer_states" not in together.facts.config.memory_policies
    assert fit_settings(given, lambda value: [value, value]).taken.settings == alone.settings


def random_candidates(given, clock, number):
    """Some candidates of a run, each with its least seconds."""
    combined = list(combinations(given))
    random.Random(number).shuffle(combined)
    for changes in combined[:number]:
        changed = replace(given, config=changes[-1].config)
        yield candidate(changed, changes, clock).seconds, least_seconds(changed, clock)


@pytest.mark.parametrize("card", ["H100", "L4"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapters": True, "use_fp8": True},
        {"ranks": 2},
        {"ranks": 4, "sharding": "weights"},
        {"use_cuda_graphs": False, "mixed_precision": "fp32"},
    ],
    ids=str,
)
def test_no_candidate_is_faster_than_its_least_seconds(fields, card):
    given = planned(3, **fields)
    clock = Clock(rates_of(card), ModelSizes.of(given.model))
    found = list(random_candidates(given, clock, 12))
    assert len(found) > 6
    assert all(seconds >= least * (1 - 1e-9) for seconds, least in found)


def test_the_rates_of_the_card_decide():
    """States move to host memory where the bus is fast; else micro-batches are smaller."""
    card = replace(rates_of("H100"), launch=1e-9)  # else what keeps graphs is faster
    given = planned(9)
    slow = fit_settings(given, rates=card).taken.settings
    assert slow == {"batch_size": 2, "gradient_accumulation_steps": 8}
    fast = fit_settings(given, rates=replace(card, host=1000 * card.host)).taken.settings
    assert fast == {"memory": ["auto", "offload_optimizer_states"]}


def test_the_rates_of_the_first_process_decide():
    card = replace(rates_of("H100"), launch=1e-9)  # else what keeps graphs is faster
    given = planned(9)
    fast = replace(card, host=1000 * card.host)

    def gather(value):
        return [fast.to_dict(), value] if isinstance(value, dict) else [value, value]

    together = fit_settings(given, gather, card).taken.settings
    assert together == fit_settings(given, rates=fast).taken.settings
    assert together != fit_settings(given, rates=card).taken.settings


def test_the_smallest_card_of_several_processes_counts():
    given = planned(80)
    settled = fit_settings(given, lambda value: [value, 4 * GB] if value == 80 * GB else [value])
    assert settled.facts.total == 4 * GB and settled.taken.changes


def test_what_no_setting_fits_names_the_card_and_the_number_that_would_do():
    given = planned(2.5)
    settled = fit_settings(given)
    with pytest.raises(ConfigurationError, match="no settings that change no result") as raised:
        refuse_what_no_setting_fits(settled)
    words = str(raised.value)
    found = re.search(r"; a card of (\d+) GB, or (\d+) cards of 2.5 GB would do. Less is", words)
    card, count = int(found[1]), int(found[2])
    smaller = CARDS[CARDS.index(card) - 1] if card > CARDS[0] else 2.5
    assert not fit_settings(replace(given, total=int(smaller * GB))).taken.fits
    assert fit_settings(replace(given, total=card * GB)).taken.fits
    assert can_fit(on_cards(given, count)) and not can_fit(on_cards(given, count // 2))
    assert "max_seq_length=1024" in words and "check_memory=False" in words
    unchecked = replace(given, config=given.config.replace(check_memory=False))
    refuse_what_no_setting_fits(fit_settings(unchecked))


@pytest.mark.slow
def test_several_larger_cards_would_do_where_no_number_of_these_does(monkeypatch):
    """Weights are divided, and not what the loss and one layer make of a pack."""
    given = planned(1, memory=[], batch_size=1, max_seq_length=512)
    monkeypatch.setattr("chronicals.policies.fit.CARDS", (1, 2, 4))
    assert what_would_do(given) == "32 cards of 4 GB"


def test_nothing_would_do_for_what_no_card_holds():
    assert what_would_do(planned(1, memory=[], batch_size=4096, max_seq_length=65536)) == ""


def test_without_a_card_there_is_nothing_to_fit():
    settled = fit_settings(planned(0))
    assert settled.taken is settled.usual and "no card" in settled.words[0]


def test_every_setting_without_a_price_is_one_of_a_policy_of_memory_or_of_the_batch():
    """What has no price changes no result: a new one is to be looked at here."""
    given = planned(4, use_fp8=True, adapters=True)
    free = set()
    for policy in policies():
        for remedy in policy.settings(given):
            if not remedy.price:
                free |= remedy.fields.keys()
    assert free == {"memory", "batch_size", "gradient_accumulation_steps", "logits_chunk_size"}


def test_a_plan_takes_the_settings_of_the_trainer():
    given = planned(4)
    settled = fit_settings(given, rates=Machines().rates)
    one = plan(given.model, given.config, 1, Machines(memory=4 * GB))
    assert one.settings == settled.taken.settings and one.held == settled.taken.fitted.held
    assert one.fits and one.words == settled.words


@pytest.mark.slow
def test_the_loss_has_the_rows_of_logits_that_fit_takes(let_return):
    """The objective is built before; those of a head of 3,000 rows decide on a card of 50 MiB."""
    let_return(facts, card_memory=50 << 20)
    config = ChronicalsConfig(
        fit="settings",
        memory=[],
        batch_size=1,
        gradient_accumulation_steps=1,
        max_seq_length=2048,
        mixed_precision="fp32",
    )
    model = tiny.llama(vocab_size=3000, max_position_embeddings=2048)
    objective = build_objective(config)
    with prepared(model, config, objective) as session:
        taken = session.config.logits_chunk_size
        assert taken < config.logits_chunk_size and objective.chunk_size == taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "cap"),
    [({}, 3 << 20), ({"use_lora": True, "lora_dropout": 0.0, "lora_rank": 4}, 3 << 19)],
)
def test_a_run_with_the_settings_is_the_run_without(
    fields, cap, tmp_path, let_return, caplog, monkeypatch
):
    """Losses and gradient norms, on a card of which so little is left that settings change."""
    caplog.set_level("INFO")
    monkeypatch.setattr(length, "STEPS_AN_EPOCH", 1)  # the default batch stays
    given = runs.config(tmp_path, max_seq_length=64, max_steps=2, trackers=[], **fields)
    batch = {"batch_size", "gradient_accumulation_steps"}
    usual = {name: getattr(given, name) for name in given.explicit - batch}
    for fit in ("off", "settings"):
        folder = tmp_path / fit
        config = ChronicalsConfig(**{**usual, "output_dir": folder / "run"}, fit=fit)
        ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config).train(tiny.chat_rows())
        let_return(facts, card_memory=cap)  # of the second run
    for plain, fitted in zip(*map(runs.trajectory, (tmp_path / "off", tmp_path / "settings"))):
        assert fitted == pytest.approx(plain, rel=1e-4)
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("fit: the fastest settings that fit: batch_size=") for line in said)
    assert any("activation recomputation costs" in line for line in said)


def test_a_run_fills_as_much_of_a_card_as_it_may(tmp_path, let_return):
    """``gpu_memory`` of a card that has more; of one that has less it changes nothing."""
    let_return(facts, card_memory=8 * GB)
    for size, total in (("4GB", 4 * GB), (16, 8 * GB), (None, 8 * GB)):
        config = runs.config(tmp_path, gpu_memory=size)
        assert Facts.of(config, present(tiny.llama(), True, True, 128)).total == total
