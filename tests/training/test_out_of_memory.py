"""A run that does not fit ends with what to do about it, and what it says can be done."""

import pytest
import torch

import runs
import tiny
from chronicals.config import ChronicalsConfig
from chronicals.policies.needed_memory import what_helps
from chronicals.training import TrainingError, session

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
