"""A run that its card cannot hold ends before its first step or at it, and says what fits."""

import re

import pytest
import torch

import runs
import tiny
from chronicals import ChronicalsConfig
from chronicals.config import ConfigurationError
from chronicals.memory import CHEAP, LAYERS, NOTHING, Estimate
from chronicals.policies import facts
from chronicals.policies.needed_memory import (
    FILLED,
    cache_room,
    longest_that_fits,
    refuse_what_cannot_fit,
    what_helps,
)
from chronicals.training import TrainingError, session

GIB = 2**30


def estimated(length, total=20):
    """Of four layers that keep a MiB a token, beside 10 GiB."""
    kept = {NOTHING: length << 20, CHEAP: length << 19, LAYERS: length << 17}
    return Estimate(10 * GIB, 4, kept, total * GIB)


def test_it_says_what_is_short_and_the_longest_length_that_fits():
    config = ChronicalsConfig(max_seq_length=8192, batch_size=1, memory=[])
    with pytest.raises(ConfigurationError) as raised:
        refuse_what_cannot_fit(config, estimated(8192), NOTHING, estimated)
    words = str(raised.value)
    assert (
        "max_seq_length=8192: a step would hold about 42.0 GiB" in words
        and "23.0 GiB are short" in words
    )
    assert (
        "the longest max_seq_length that fits as the run is set is 2,304" in words
    )  # 9 GiB for four layers' MiB a token
    assert (
        "recompute_layers" in words
        and "max_seq_length=4096" not in words
        and "check_memory=False" in words
    )
    refuse_what_cannot_fit(config, estimated(2304), NOTHING, estimated)


def test_what_the_memory_decides_is_refused_where_the_leanest_does_not_fit():
    config = ChronicalsConfig(max_seq_length=65536, batch_size=1)
    with pytest.raises(
        ConfigurationError, match="the longest max_seq_length that fits as the run is set"
    ) as raised:
        refuse_what_cannot_fit(config, estimated(65536), None, estimated)
    longest = int(re.search(r"set is ([\d,]+)", str(raised.value))[1].replace(",", ""))
    refuse_what_cannot_fit(config, estimated(longest), None, estimated)
    assert estimated(longest + 256).needed(*estimated(longest + 256).choice()) > FILLED * 20 * GIB


def test_weights_alone_that_do_not_fit():
    config = ChronicalsConfig(max_seq_length=512, batch_size=1)
    with pytest.raises(
        ConfigurationError,
        match="weights and states alone take 10.0 GiB, so no shorter max_seq_length helps",
    ):
        refuse_what_cannot_fit(
            config, estimated(512, total=8), None, lambda length: estimated(length, total=8)
        )


@pytest.mark.parametrize("config", [{"check_memory": False}, {}], ids=["turned off", "no card"])
def test_nobody_is_refused(config):
    needed = estimated(65536, total=20 if config else 0)
    refuse_what_cannot_fit(ChronicalsConfig(**config), needed, NOTHING, estimated)


@pytest.mark.parametrize("most", [1, 256, 511, 1000, 5000])
def test_the_longest_is_the_last_multiple_that_fits(most):
    assert longest_that_fits(4096, lambda length: length <= most) == min(most // 256 * 256, 3840)


@pytest.mark.slow
def test_a_run_is_refused_before_its_first_step(tmp_path, let_return):
    """On a card of which so little is left that a few hundred tokens fit; with that length the
    same run trains.
    """
    held = (64 << 20) + sum(p.numel() * 16 for p in tiny.llama().parameters())
    let_return(facts, card_memory=held)
    fields = {
        "memory": [],
        "batch_size": 1,
        "logits_chunk_size": 64,
        "trackers": [],
        "max_steps": 1,
    }
    with pytest.raises(
        ConfigurationError, match=r"max_seq_length=65536: a step would hold"
    ) as raised:
        runs.train(tmp_path, max_seq_length=65536, gate={}, **fields)
    assert (
        not (tmp_path / "run" / "metrics.jsonl").exists()
        and not (tmp_path / "run" / "model").exists()
    )
    longest = int(
        re.search(r"as the run is set is ([\d,]+)", str(raised.value))[1].replace(",", "")
    )
    assert longest >= 256
    assert runs.train(tmp_path / "fits", max_seq_length=longest, **fields).steps == 1


CONFIGURATIONS = {
    "default": {},
    "one row": {"batch_size": 1, "max_seq_length": 1},
    "switched off": {"use_gradient_checkpointing": False, "activation_offload": False},
    "in part": {
        "memory": ["recompute_elementwise", "tiled_mlp"],
        "use_gradient_checkpointing": True,
    },
    "without masters": {
        "master_weights": False,
        "optimizer_state_dtype": "bf16",
        "logits_chunk_size": 64,
    },
    "in the backward pass": {
        "memory": ["optimizer_in_backward"],
        "max_grad_norm": float("inf"),
        "gradient_accumulation_steps": 1,
        "batch_size": 2,
    },
    "8-bit states": {"use_8bit_optimizer": True},
    "adapters": {"use_lora": True, "memory": ["recompute_layers", "offload_activations"]},
    "over 4 bits": {"quantization": "nf4"},
    "over FP8": {"use_lora": True, "use_fp8": True},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_is_said_to_help_is_a_configuration(name):
    config = ChronicalsConfig(**CONFIGURATIONS[name])
    ways = list(what_helps(config))
    for fields, _ in ways:
        changed = config.replace(**fields)
        assert all(getattr(changed, field) == value for field, value in fields.items())
        assert all(getattr(config, field) != value for field, value in list(fields.items())[:1])
    tokens = config.batch_size * config.gradient_accumulation_steps
    for changed in (config.replace(**fields) for fields, price in ways if not price):
        assert changed.batch_size * changed.gradient_accumulation_steps == tokens
    assert ways or name == "one row"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_base_in_4_bits_is_among_it_where_adapters_are_trained_over_16(name):
    config = ChronicalsConfig(**CONFIGURATIONS[name])
    assert any("quantization" in fields for fields, _ in what_helps(config)) == (name == "adapters")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_8_bit_states_are_among_it_where_they_are_not_yet(name):
    config = ChronicalsConfig(**CONFIGURATIONS[name])
    named = [fields for fields, _ in what_helps(config) if "use_8bit_optimizer" in fields]
    assert bool(named) == (not config.use_lora and not config.use_8bit_optimizer)


def test_a_run_that_runs_out_of_memory_says_what_helps(tmp_path, monkeypatch):
    def step(*_):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(session, "train_step", step)
    with pytest.raises(
        TrainingError,
        match=r"out of memory.*batch_size=1 with gradient_accum.*memory=\['off.*use_lora=True",
    ) as told:
        runs.train(tmp_path, model=tiny.llama(), batch_size=2)
    assert isinstance(told.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_card_that_is_full_says_what_helps_and_goes_on_afterwards(tmp_path, graphs):
    options = {"mixed_precision": "bf16", "use_cuda_graphs": graphs, "max_steps": 4}
    model = tiny.llama()
    runs.train(tmp_path / "first", model=model, **options)
    whole = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**20) / whole)
    try:
        with pytest.raises(
            TrainingError,
            match=r"out of memory on cuda.* GiB; this run held up to .*Less is taken by",
        ):
            runs.train(tmp_path / "full", model=model, batch_size=64, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    runs.train(tmp_path / "after", model=model, **options)


def test_keys_and_values_take_what_the_peak_leaves_or_turns_with_activations():
    card = 80 * 2**30
    fill = int(FILLED * card)
    assert cache_room(card, peak=20 * 2**30, held=10 * 2**30) == fill - 20 * 2**30
    # a step gives back more than its peak leaves
    assert cache_room(card, peak=70 * 2**30, held=10 * 2**30) == 60 * 2**30
    # before the first step
    assert cache_room(card, peak=0, held=10 * 2**30) == fill - 10 * 2**30
