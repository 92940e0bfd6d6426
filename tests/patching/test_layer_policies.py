"""Fused layers whose products run in FP8: which do, how near they stay, and that policies of
memory change nothing; gated MLPs in tiles.
"""

import contextlib
import copy
import math
import statistics
import sys

import pytest
import torch
from torch import nn

import families
from chronicals.kernels.fp8 import Amax, Scaled
from chronicals.kernels.launch import interpreting
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import enable_gradient_checkpointing, recompute
from chronicals.models import PresentedModel
from chronicals.patching import (
    decoder_layer,
    forget_policies,
    fused_weights,
    layer_policies,
    layers_in_fp8,
    offload_frozen_weights,
    patch_parts,
    recompute_norms_and_units,
    run_in_fp8,
    tile_mlps,
    unfuse_weights,
    unpatch_model,
    untile_mlps,
)
from chronicals.patching.decoder_layer import FUSED_LAYER
from chronicals.patching.fused_weights import DEVICES, MERGED, PRODUCT_FORMATS
from chronicals.patching.layer_policies import FormattedProducts
from chronicals.quantization import FP8Base

FORMAT = sys.modules["chronicals.quantization.fp8"]


@pytest.fixture(autouse=True)
def small_products_too(set_constants):
    set_constants(layer_policies, MIN_FP8_WIDTH=16)


def fused(family, adapted=False, device="cpu"):
    model = families.build(family).to(device)
    if adapted:
        apply_lora(model, LoRAConfig(rank=4, dropout=0.0))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
    assert patch_parts(model, whole_layers=True).counts()[FUSED_LAYER] == len(
        model.get_decoder().layers
    )
    return model


def batch(device="cpu"):
    """The same 32 tokens each time."""
    torch.manual_seed(11)
    return families.documents_batch((7, 1, 12, 5, 7)).to(device)


def found_in(model, rows):
    return families.states_and_gradients(model, rows)


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(
        a.double().flatten(), b.double().flatten(), 0
    ).item()


def exact_quantize(x, scaling="tensor", dtype=None, layout="rows", scale=None, amax=None):
    one = torch.ones((), device=x.device)
    return Scaled(x.double(), one), Scaled(x.double().t(), one)


def exact_product(left, right, dtype, fast=False, bias=None):
    y = left.values @ right.values.t()
    return (y if bias is None else y + bias).to(dtype)


@pytest.fixture
def without_rounding(monkeypatch):
    """What would be FP8 is fp64: all that is done around it is left."""
    monkeypatch.setattr(FORMAT, "fp8_quantize", exact_quantize)
    monkeypatch.setattr(FORMAT, "scaled_product", exact_product)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma3", "olmo2", "granite"])
@pytest.mark.usefixtures("without_rounding")
def test_but_for_rounding_it_is_the_same(family, adapted, device):
    model = fused(family, adapted, device).double()
    expected = found_in(model, batch(device))
    found = run_in_fp8(model)
    assert found.chosen == found.total == 4 * len(model.get_decoder().layers) and not found.left
    families.assert_same(expected, found_in(model, batch(device)))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_rounded_it_stays_near(adapted, device):
    """8 bits are 2.6 % of a value in the root mean square, 5.2 % of a gradient; scores of
    attention magnify it.
    """
    model = fused("llama", adapted, device)
    exact = found_in(model, batch(device))
    run_in_fp8(model)
    got = found_in(model, batch(device))
    of_gradients = [
        torch.cat([found[name].flatten() for name in exact if name != "states"])
        for found in (exact, got)
    ]
    assert 0.98 < cosine(exact["states"], got["states"]) < 0.99999
    assert 0.9 < cosine(*of_gradients) < 0.9999


@pytest.mark.parametrize("forget", [forget_policies, unfuse_weights])
def test_forgotten_it_is_as_before(forget, device):
    model = fused("llama", device=device)
    before = found_in(model, batch(device))
    run_in_fp8(model)
    forget(model)
    after = found_in(model, batch(device))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(PRODUCT_FORMATS in vars(module) for module in model.modules())


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_made_again_is_the_same(adapted, device):
    model = fused("qwen2", adapted, device)
    run_in_fp8(model)
    kept = found_in(model, batch(device))
    recompute_norms_and_units(model)
    again = found_in(model, batch(device))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("first", [None, 1], ids=["all", "first"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_made_again_are_the_same(family, adapted, first, device):
    """Where the product behind a unit is left out the second time, and where a norm reads it."""
    model = fused(family, adapted, device)
    run_in_fp8(model)
    kept = found_in(model, batch(device))
    model.train()
    enable_gradient_checkpointing(model, whole_layers=True, first=first)
    again = found_in(model, batch(device))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.usefixtures("without_rounding")
def test_tiles_are_the_same_but_for_rounding(family, adapted, device, set_constants):
    """A tile has a scale of its own."""
    set_constants(recompute, TILE=16)
    model = fused(family, adapted, device)
    run_in_fp8(model)
    whole = found_in(model, batch(device))
    tile_mlps(model)
    families.assert_same(whole, found_in(model, batch(device)))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_both_layouts_are_made_in_one_pass_where_the_backward_pass_wants_both(
    adapted, device, monkeypatch
):
    """Of dy and of x, which is kept in 8 bits, attention's output apart, which attention keeps;
    without gradients nobody wants columns."""
    layouts = []
    kept = []
    weights = set()
    usual = FORMAT.fp8_quantize
    usual_weight = FP8Base.dense

    def quantize(x, layout="rows", **options):
        if x.data_ptr() not in weights:
            layouts.append(layout)
        return usual(x, layout=layout, **options)

    monkeypatch.setattr(
        FP8Base,
        "dense",
        lambda self: weights.add(self.weight.matrix.data_ptr()) or usual_weight(self),
    )

    model = fused("llama", adapted, device)
    run_in_fp8(model)
    monkeypatch.setattr(FORMAT, "fp8_quantize", quantize)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        found_in(model, batch(device))
    layers = len(model.get_decoder().layers)
    backwards = ["both", "both", "both", "columns", "both"]
    expected = ["both", "rows", "both", "both"] * layers + backwards * layers
    assert layouts == (
        ["rows"] * (8 * layers - 1) if adapted else expected
    )  # nothing is below the first A
    assert kept.count(torch.float8_e4m3fn) == (0 if adapted else 3 * layers)
    layouts.clear()
    with (
        torch.no_grad(),
        PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented,
    ):
        presented.hidden_states(batch(device))
    assert layouts == ["rows"] * 4 * layers


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.interpreted
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_norms_units_and_rotations_find_what_is_quantised(
    family, adapted, device, monkeypatch, let_return
):
    """Six of a layer's eight x and dy; what attention gives and what comes back to the last
    product are others'.
    """
    told = []
    usual = FORMAT.fp8_quantize

    def quantize(x, amax=None, **options):
        told.append(amax is not None)
        assert amax is None or amax == x.abs().max().float()
        return usual(x, amax=amax, **options)

    with interpreting() if device.type == "cpu" else contextlib.nullcontext():
        model = fused(family, adapted, device)
        run_in_fp8(model)
        monkeypatch.setattr(FORMAT, "fp8_quantize", quantize)
        found = found_in(model, batch(device))
        layers = len(model.get_decoder().layers)
        assert sum(told) == 6 * layers - adapted  # nothing is below the first A
        let_return(Amax, take=None)
        again = found_in(model, batch(device))
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_products_that_are_too_small_stay(device, set_constants):
    model = fused("llama", device=device)
    inner = model.config.intermediate_size
    width = model.config.hidden_size
    layers = len(model.get_decoder().layers)
    largest = statistics.harmonic_mean((2 * inner, width))
    set_constants(layer_policies, MIN_FP8_WIDTH=math.ceil(largest) + 1)
    assert run_in_fp8(model) == FormattedProducts(0, 4 * layers, ())
    set_constants(layer_policies, MIN_FP8_WIDTH=math.floor(largest))
    assert run_in_fp8(model) == FormattedProducts(layers, 4 * layers, ())
    forget_policies(model)
    set_constants(layer_policies, FP8_MULTIPLE=7)
    set_constants(layer_policies, MIN_FP8_WIDTH=1)
    assert run_in_fp8(model).chosen == 0


def test_rows_that_are_no_multiple_run_in_16_bit(device, caplog):
    model = fused("llama", device=device)
    rows = families.documents_batch().to(device)
    exact = found_in(model, rows)
    run_in_fp8(model)
    got = found_in(model, rows)
    assert all(torch.equal(exact[name], got[name]) for name in exact)
    assert "a batch of 25 rows runs in 16 bit: FP8 products need multiples of 16" in caplog.text


def down_of(layer):
    return layer.mlp.down_proj.base_layer


CHANGES = {
    "moved": lambda layer: setattr(down_of(layer).weight, "data", down_of(layer).weight.data * 2),
    "another parameter in its memory": lambda layer: setattr(
        down_of(layer),
        "weight",
        nn.Parameter(down_of(layer).weight.data.mul_(2), requires_grad=False),
    ),
    "written to": lambda layer: down_of(layer).weight.mul_(2),
    "an adapter that came and went": lambda layer: (
        down_of(layer).weight.data.mul_(2),
        setattr(layer.mlp, "down_proj", down_of(layer)),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_weights_that_change_are_found(change, device):
    """As a load, a change of type or a merge changes them."""
    model = fused("llama", True, device)
    run_in_fp8(model)
    before = states_of(model)
    for layer in model.get_decoder().layers:
        CHANGES[change](layer)
    now = states_of(model)
    forget_policies(model)
    exact = states_of(model)
    assert (now - exact).norm() < 0.2 * exact.norm() < (now - before).norm()


def states_of(model):
    rows = batch(next(model.parameters()).device)
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        return presented.hidden_states(rows)


@torch.no_grad()
def test_what_is_quantised_again_stays_where_graphs_read_it(device):
    model = fused("llama", True, device)
    run_in_fp8(model)
    states_of(model)

    def places():
        held = [
            vars(layer.mlp)[MERGED][("down_proj",)].base._known[1]
            for layer in model.get_decoder().layers
        ]
        return [part.data_ptr() for layouts in held for scaled in layouts for part in scaled]

    before = places()
    for layer in model.get_decoder().layers:
        down_of(layer).weight.mul_(2)
    states_of(model)
    assert places() == before


@pytest.mark.parametrize(
    ("family", "spoil", "reason", "lost"),
    [
        ("phi3", lambda layer: setattr(layer.resid_mlp_dropout, "p", 0.1), "it has dropout", 4),
        (
            "llama",
            lambda layer: layer.self_attn.q_proj.register_forward_hook(lambda *_: None),
            "q_proj has hooks",
            2,
        ),
    ],
    ids=["dropout", "hook"],
)
def test_halves_that_do_not_run_fused_are_named(family, spoil, reason, lost, device):
    model = fused(family, device=device)
    spoil(model.get_decoder().layers[0])
    found = run_in_fp8(model)
    assert found.chosen == found.total == 4 * len(model.get_decoder().layers) - lost
    (left,) = found.left
    assert reason in left
    assert not any(
        f"layers.0.{part}" in name
        for name in layers_in_fp8(model)
        for part in ("self_attn", "mlp")[: lost // 2]
    )


class TestWeightsThatWait:
    """In host memory, while their rows in FP8 stand in for them."""

    def waiting(self, device, family="qwen2"):
        model = fused(family, True, device)
        run_in_fp8(model)
        return model

    @pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma3", "olmo2"])
    def test_nothing_changes(self, family, device):
        model = self.waiting(device, family)
        here = found_in(model, batch(device))
        layers = model.get_decoder().layers
        frozen = [p for name, p in layers.named_parameters() if "base_layer.weight" in name]
        assert offload_frozen_weights(model) == sum(p.nbytes for p in frozen) > 0
        assert {p.device.type for p in frozen} == {"cpu"} and offload_frozen_weights(model) == 0
        away = found_in(model, batch(device))
        assert all(torch.equal(here[name], away[name]) for name in here)

    def test_layers_without_adapters_run_fused_too(self, device):
        model = families.build("qwen2").to(device)
        apply_lora(model, LoRAConfig(rank=4, dropout=0.0, target_modules=["q_proj", "v_proj"]))
        patch_parts(model, whole_layers=True)
        run_in_fp8(model)
        here = found_in(model, batch(device))
        before = decoder_layer.runs[FUSED_LAYER]
        assert offload_frozen_weights(model) > 0
        away = found_in(model, batch(device))
        assert decoder_layer.runs[FUSED_LAYER] - before == len(model.get_decoder().layers)
        assert all(torch.equal(here[name], away[name]) for name in here)

    def test_only_rows_in_fp8_are_kept(self, device):
        model = self.waiting(device)
        offload_frozen_weights(model)
        found_in(model, batch(device))
        held = [
            merged.base
            for module in model.modules()
            for merged in vars(module).get(MERGED, {}).values()
        ]
        assert held and all(isinstance(base, FP8Base) and len(base._known[1]) == 1 for base in held)
        assert all(
            base._known[1][0].values.device == next(model.parameters()).device for base in held
        )

    def test_rows_that_run_in_16_bit_fetch_them(self, device):
        """31 rows are no multiple of 16."""
        model = self.waiting(device)
        rows = families.documents_batch((7, 12, 5, 7)).to(device)
        here = found_in(model, rows)
        offload_frozen_weights(model)
        away = found_in(model, rows)
        assert all(torch.equal(here[name], away[name]) for name in here)

    def test_layers_called_by_themselves_are_given_theirs(self, device):
        """As generation calls them."""
        model = self.waiting(device)
        ids = torch.arange(5, 12, device=device)[None]
        with torch.no_grad():
            here = model(input_ids=ids).logits
            offload_frozen_weights(model)
            assert torch.equal(model(input_ids=ids).logits, here)

    def test_written_to_they_are_quantised_anew(self, device):
        model = self.waiting(device)
        offload_frozen_weights(model)
        before = found_in(model, batch(device))
        with torch.no_grad():
            model.get_decoder().layers[0].mlp.down_proj.base_layer.weight.mul_(1.5)
        assert not torch.equal(found_in(model, batch(device))["states"], before["states"])

    @pytest.mark.parametrize("undo", [forget_policies, unfuse_weights])
    def test_they_come_back(self, undo, device):
        model = self.waiting(device)
        weights = {name: p.clone() for name, p in model.named_parameters()}
        offload_frozen_weights(model)
        assert all(torch.equal(p.to(device), weights[name]) for name, p in model.named_parameters())
        undo(model)
        for name, p in model.named_parameters():
            assert p.device == weights[name].device and torch.equal(p, weights[name])
        assert not any(
            DEVICES in vars(m) or (isinstance(m, nn.Linear) and "forward" in vars(m))
            for m in model.modules()
        )

    def test_what_did_not_fit_comes_back_later(self, device, monkeypatch):
        """Say while a step that ran out of memory still holds its own; what stood for them has
        gone by then.
        """
        model = self.waiting(device)
        weights = {name: p.clone() for name, p in model.named_parameters()}
        offload_frozen_weights(model)
        found_in(model, batch(device))
        made = []
        usual = fused_weights.bring_back

        def full(model):
            assert not any(PRODUCT_FORMATS in vars(module) for module in model.modules())
            down = model.get_decoder().layers[1].mlp.down_proj
            base = down.base_layer
            down.base_layer = None
            made.append(base)
            try:
                usual(model)
            finally:
                down.base_layer = base

        monkeypatch.setattr(fused_weights, "bring_back", full)
        with pytest.raises(AttributeError):
            unfuse_weights(model)
        monkeypatch.undo()
        assert made and any(DEVICES in vars(module) for module in model.modules())
        unfuse_weights(model)
        for name, p in model.named_parameters():
            assert p.device == weights[name].device and torch.equal(p, weights[name])
        assert not any(
            DEVICES in vars(m) or (isinstance(m, nn.Linear) and "forward" in vars(m))
            for m in model.modules()
        )

    def test_they_come_back_whatever_their_adapters_are(self, device):
        """Two at a time run part by part."""
        peft = pytest.importorskip("peft")
        model = families.build("qwen2").to(device)
        config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
        wrapped = peft.get_peft_model(model, config)
        patch_parts(wrapped, whole_layers=True)
        run_in_fp8(wrapped)
        assert offload_frozen_weights(wrapped)
        wrapped.add_adapter("other", config)
        wrapped.base_model.set_adapter(["default", "other"])
        unfuse_weights(wrapped)
        assert not any(isinstance(m, nn.Linear) and "forward" in vars(m) for m in wrapped.modules())
        own = [
            p for name, p in wrapped.named_parameters() if ".other." not in name
        ]  # PEFT laid those beside what waited
        assert {p.device.type for p in own} == {device.type}

    def test_other_adapters_find_room_for_their_margins(self, device):
        """Such as come while the weights wait."""
        model = self.waiting(device)
        offload_frozen_weights(model)
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.lora_A = nn.Parameter(
                    torch.cat([module.lora_A, torch.zeros_like(module.lora_A)])
                )
                module.lora_B = nn.Parameter(
                    torch.cat([module.lora_B, torch.ones_like(module.lora_B)], 1)
                )
        away = found_in(model, batch(device))
        unfuse_weights(model)
        run_in_fp8(model)
        here = found_in(model, batch(device))
        assert all(torch.equal(here[name], away[name]) for name in here)

    def test_trained_weights_stay(self, device):
        model = fused("qwen2", False, device)
        run_in_fp8(model)
        assert offload_frozen_weights(model) == 0


TILES = [1, 7, 24, 25]
"""Of 25 rows."""


def adapted(model):
    apply_lora(model, LoRAConfig(rank=3, alpha=5, dropout=0.0))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize(
    "runs", ["as it was", "parts", "layers", "layers, in part again", "layers, again"]
)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3"])
def test_equals_the_class(family, runs, lora, tile, set_constants):
    set_constants(recompute, TILE=tile)
    model = families.build(family).double()
    model = adapted(model).double() if lora else model
    batch = families.documents_batch()
    plain = families.states_and_gradients(copy.deepcopy(model), batch)
    if runs != "as it was":
        patch_parts(model, whole_layers=runs != "parts")
    if runs == "layers, in part again":
        recompute_norms_and_units(model)
    if runs == "layers, again":
        enable_gradient_checkpointing(model, whole_layers=True)
    assert tile_mlps(model) == len(model.get_decoder().layers)
    families.assert_same(plain, families.states_and_gradients(model, batch))


def test_rows_of_a_batch_are_rows(set_constants):
    set_constants(recompute, TILE=7)
    model = families.build("llama")
    ids = torch.randint(0, families.VOCABULARY, (3, 11))
    expected = model(input_ids=ids).logits
    tile_mlps(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("whole_layers", [False, True])
def test_only_a_tile_is_wide(whole_layers, set_constants):
    """Of what autograd keeps over the forward pass; the inner width is that of nothing else."""
    set_constants(recompute, TILE=7)
    model = families.build("llama", intermediate_size=104)
    seen = []
    patch_parts(model, whole_layers=whole_layers)
    for tiles in (False, True):
        if tiles:
            tile_mlps(model)
        seen.clear()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def see(x, weights=weights):
            if x.untyped_storage().data_ptr() not in weights:
                seen.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
            families.states_and_gradients(model, families.documents_batch())
        assert any(104 in shape or 208 in shape for shape in seen) != tiles


def test_a_forward_of_somebody_elses_is_left_alone(set_constants):
    set_constants(recompute, TILE=7)
    model = families.build("llama")
    calls = []
    mlp = model.get_decoder().layers[0].mlp
    usual = mlp.forward
    mlp.forward = lambda x: calls.append(len(x)) or usual(x)
    assert tile_mlps(model) == len(model.get_decoder().layers) - 1
    families.states_and_gradients(model, families.documents_batch())
    assert calls


def test_copied_and_undone(set_constants):
    set_constants(recompute, TILE=7)
    model = families.build("llama")
    batch = families.documents_batch()
    before = families.states_and_gradients(model, batch)
    tile_mlps(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    families.assert_same(before, families.states_and_gradients(other, batch))
    parts = families.build("llama")
    patch_parts(parts)
    tile_mlps(parts)
    untile_mlps(parts)
    assert parts.get_decoder().layers[0].mlp.forward.__func__.chronicals_form == "fused_swiglu"
    unpatch_model(other)
    assert not any("forward" in vars(module) for module in other.modules())
    rows = []
    other.get_decoder().layers[0].mlp.register_forward_hook(
        lambda _, args, out: rows.append(out.shape[-2])
    )
    families.states_and_gradients(other, batch)
    assert rows == [25]
