"""Models that transformers loaded with ``BitsAndBytesConfig``: fused layers over the memory of
bitsandbytes' layers.
"""

import copy
import logging

import pytest
import torch
from torch import nn

import families
import generic_bitsandbytes  # noqa: F401
import runs
import tiny
from chronicals.log_once import LOGGED
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import load_model
from chronicals.patching import decoder_layer, patch_model, patch_parts, unpatch_model
from chronicals.patching.decoder_layer import FUSED_LAYER
from chronicals.patching.fused_weights import MERGED
from chronicals.quantization import NF4, bitsandbytes
from mutants import mutant

LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("models")
    tiny.llama(attention_bias=True).save_pretrained(folder / "dense")
    return folder


def loaded(folder, dtype=torch.float32, **options):
    """In training mode: in evaluation bitsandbytes lays the codes out anew on some CPUs."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    usual = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    four = BitsAndBytesConfig(load_in_4bit=True, **{**usual, **options})
    place = {"device_map": {"": "cpu"}, "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=four, **place
    ).train()


def adapted(model, by="ours"):
    if by == "peft":
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear")
        )
    else:
        apply_lora(model, LoRAConfig(rank=3, alpha=5, dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def inner(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def states_of(model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        batch = families.documents_batch()
    return families.states_and_gradients(inner(model), batch)


def fused_states_of(model):
    report = patch_parts(inner(model), whole_layers=True)
    before = decoder_layer.runs[FUSED_LAYER]
    assert report.counts()[FUSED_LAYER] == LAYERS
    found = states_of(model)
    assert decoder_layer.runs[FUSED_LAYER] == before + LAYERS
    return found


CASES = [
    ("ours", {}),
    ("peft", {}),
    ("ours", {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "fp4"}),
    ("peft", {"bnb_4bit_quant_storage": torch.float32}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("by", "options"), CASES, ids=str)
def test_states_and_gradients_are_those_of_the_plain_model(folder, options, by):
    """The gradients of the first layer's adapters have passed through every product of the
    layers above.
    """
    model = adapted(loaded(folder, **options), by)
    families.assert_same(states_of(model), fused_states_of(model))


@pytest.mark.slow
def test_nothing_is_copied(folder):
    model = adapted(loaded(folder))
    fused_states_of(model)
    bases = [
        merged.base
        for module in model.modules()
        for merged in vars(module).get(MERGED, {}).values()
    ]
    assert len(bases) == 4 * LAYERS and all(isinstance(base, NF4) for base in bases)
    theirs = {
        layer.weight.data_ptr()
        for layer in model.modules()
        if bitsandbytes.is_of_bitsandbytes(layer)
    }
    assert {part.codes.data_ptr() for base in bases for part in base.packed} == theirs and len(
        theirs
    ) == 7 * LAYERS


def test_weights_that_were_replaced_are_read_anew(folder):
    model = adapted(loaded(folder))
    fused_states_of(model)
    other = copy.deepcopy(model)
    unpatch_model(other)
    for layer in (*model.modules(), *other.modules()):
        if bitsandbytes.is_of_bitsandbytes(layer):
            layer.weight.data = layer.weight.data.flip(0)
            layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.flip(0)
    families.assert_same(states_of(other), states_of(model))


def test_unpatched_it_is_theirs_again(folder):
    model = loaded(folder)
    before = model.state_dict()
    expected = states_of(model)
    patch_model(model)
    unpatch_model(model)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    families.assert_same(expected, states_of(model))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.register_forward_hook(lambda *_: None), "down_proj has hooks"),
        (
            lambda layer: setattr(layer, "forward", type(layer).forward.__get__(layer)),
            "down_proj has another forward",
        ),
    ],
)
def test_a_layer_that_does_more_is_called(folder, change, reason, caplog):
    model = adapted(loaded(folder))
    patch_parts(model, whole_layers=True)
    change(model.model.layers[0].mlp.down_proj.base_layer)
    with caplog.at_level(logging.WARNING):
        states_of(model)
    assert reason in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said"), [(torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_products_in_another_dtype_are_said(folder, asked, said, caplog, seed):
    """They are off by no more than a few times what products in bf16 change by themselves (1 to
    2 as a rule).
    """
    LOGGED.clear()

    def made(kind):
        torch.manual_seed(seed)
        return adapted(loaded(folder, torch.bfloat16, bnb_4bit_compute_dtype=kind))

    model = made(asked)
    wide = made(torch.float32)
    narrow = made(torch.bfloat16)
    expected = states_of(model)
    (exact, rounded) = (states_of(other)["states"].float() for other in (wide, narrow))
    with caplog.at_level(logging.WARNING):
        got = fused_states_of(model)
    assert (
        "bnb_4bit_compute_dtype=torch.float32: fused layers multiply in torch.bfloat16"
        in caplog.text
    ) == said
    assert (got["states"].float() - expected["states"].float()).norm() < 3 * (
        rounded - exact
    ).norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "Scales(state.absmax, nested.absmax, nested.code, state.offset, nested.blocksize)",
            (
                "Scales(state.absmax, nested.absmax, nested.code, state.offset * 1.5, "
                "nested.blocksize)"
            ),
        ),
        (
            (
                "known is not None and known.state is layer.weight.quant_state and known.places "
                "== _places(layer)"
            ),
            "known is not None and known.ours is not None",
        ),
    ],
)
def test_a_planted_fault_is_found(folder, old, new, monkeypatch):
    monkeypatch.setattr(
        "chronicals.models.linear.shared",  # where layers are read
        mutant(bitsandbytes, old, new).shared,
    )
    model = adapted(loaded(folder))
    patch_parts(model, whole_layers=True)
    states_of(model)
    for layer in model.modules():
        if bitsandbytes.is_of_bitsandbytes(layer):
            layer.weight.data = layer.weight.data.flip(0)
    got = states_of(model)
    unpatch_model(model)
    with pytest.raises(AssertionError):
        families.assert_same(states_of(model), got)


@pytest.mark.slow
def test_the_report_is_of_parts_that_kernels_run(folder, tmp_path):
    theirs = loaded(folder)
    theirs.save_pretrained(tmp_path / "packed")
    for model in (theirs, load_model(tmp_path / "packed", torch.float32)):
        assert "Linear4bit" not in str(patch_model(model))


@pytest.mark.slow
def test_a_run_is_that_of_our_layers(folder, tmp_path):
    theirs = loaded(folder)
    theirs.save_pretrained(tmp_path / "packed")
    for name, model in (
        ("theirs", theirs),
        ("ours", load_model(tmp_path / "packed", torch.float32)),
    ):
        runs.train(tmp_path / name, model=model, max_steps=3, use_lora=True, trackers=[])
    assert runs.trajectory(tmp_path / "theirs") == runs.trajectory(tmp_path / "ours")
