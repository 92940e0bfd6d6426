"""Decoder layers in tiles of rows and groups of heads: the numbers of layers in one piece."""

import contextlib
import math

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

import choosers
import families
from chronicals.kernels import linear_head
from chronicals.kernels.dropped_products import RepeatedSeeds, draw_seed
from chronicals.log_once import LOGGED
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import enable_gradient_checkpointing, heads_at_a_time, recompute
from chronicals.models import PresentedModel
from chronicals.patching import (
    decoder_layer,
    head_groups,
    layer_policies,
    patch_parts,
    run_in_fp8,
    tile_layers,
    tiled_layer,
    unpatch_model,
    untile_layers,
)
from chronicals.patching.decoder_layer import FUSED_LAYER, runs
from chronicals.patching.head_groups import HeadGroup
from chronicals.quantization import PackedStorage
from interpreted import kernels_run
from mutants import mutant

DENSE = [
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
    "mistral",
    "ministral3",
    "smollm3",
]
LENGTHS = (7, 1, 12, 5, 7)
"""Of documents, 32 tokens in all."""


@pytest.fixture(autouse=True)
def one_key_head_at_a_time(set_constants):
    set_constants(recompute, TILE=7, GROUP_ROWS=1)


def fused(family, adapted=True, dropout=0.0, use_dora=False, **sizes):
    """In fp64, with adapters that change something, of which norms and biases are trained, too."""
    model = families.build(family, **sizes).double()
    if adapted:
        config = LoRAConfig(rank=4, dropout=dropout, use_dora=use_dora)
        apply_lora(model, config).double()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
    patch_parts(model, whole_layers=True)
    return model


def batch():
    torch.manual_seed(11)
    return families.documents_batch(LENGTHS)


def states(model):
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as shown:
        return shown.hidden_states(batch())


def gradients(model):
    """Gradients of what is trained by name, made while documents are attended to, as in a run."""
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as shown:
        found = families.gradients(model, lambda: shown.hidden_states(batch()).square().sum())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.sample(6)
@pytest.mark.parametrize("tile", [1, 7, 16, 31, 32, 40])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("family", DENSE)
def test_sums_differ_by_their_order_only(family, adapted, tile, set_constants):
    """States, and the gradient of every weight and adapter, in fp64; tiles end within documents."""
    set_constants(recompute, TILE=tile)
    model = fused(family, adapted)
    whole = families.states_and_gradients(model, batch())
    layers = len(model.get_decoder().layers)
    assert tile_layers(model) == layers
    before = runs.copy()
    tiled = families.states_and_gradients(model, batch())
    assert runs - before == {FUSED_LAYER: layers}
    families.assert_same(whole, tiled, 1e-11)


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "input_layernorm", "o_proj"])
def test_one_part_of_a_layer_may_be_trained_alone(name):
    """Then queries, keys or values of the first layer have no gradient."""
    model = fused("qwen3", adapted=False)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(name in path)
    whole = gradients(model)
    tile_layers(model)
    tiled = gradients(model)
    assert len(whole) == len(model.get_decoder().layers) and tiled.keys() == whole.keys()
    for path, gradient in whole.items():
        torch.testing.assert_close(tiled[path], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_any_number_of_key_heads_attends_at_a_time(heads, set_constants):
    """Six key heads for twelve query heads, of which the last group may have fewer."""
    model = fused("llama", num_attention_heads=12, num_key_value_heads=6, hidden_size=96)
    whole = families.states_and_gradients(model, batch())
    set_constants(recompute, GROUP_ROWS=32 * 2 * heads)
    assert heads_at_a_time(32, 12, 6) == heads
    tile_layers(model)
    families.assert_same(whole, families.states_and_gradients(model, batch()), 1e-11)


def test_key_heads_that_belong_together_attend_together():
    assert [heads_at_a_time(32, 12, 6, together) for together in (1, 2, 4, 6, 8)] == [1, 2, 4, 6, 6]


def test_in_fp32_loss_and_gradients_are_those_of_one_piece():
    """As the trainer has them: hidden states to loss, gradient norm, every adapter's gradient."""
    model = fused("llama").float()
    found = []
    for tiles in (False, True):
        if tiles:
            tile_layers(model)
        loss = torch.nn.functional.cross_entropy(
            states(model) @ model.lm_head.weight.t(), batch().targets.long()
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, trained)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        found.append((loss.detach(), norm, gradients))
    (loss, norm, whole), (tiled_loss, tiled_norm, tiled) = found
    assert tiled_loss == pytest.approx(loss.item(), rel=1e-6)
    assert tiled_norm == pytest.approx(norm.item(), rel=1e-5)
    for ours, plain in zip(tiled, whole, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6 * plain.abs().max().item())


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapters"])
def test_weights_in_4_bits_are_dequantised_once_a_pass(adapted, monkeypatch):
    """Of each of four products: in the forward pass, and in the backward pass."""
    model, plain = families.four_bit_pair("llama", adapted)
    written = []
    usual = PackedStorage._fill
    monkeypatch.setattr(PackedStorage, "_fill", lambda self: written.append(self) or usual(self))
    whole = families.states_and_gradients(plain, batch())
    patch_parts(model, whole_layers=True)
    tile_layers(model)
    written.clear()
    tiled = families.states_and_gradients(model, batch())
    families.assert_same(whole, tiled)
    layers = len(model.get_decoder().layers)
    assert len(written) == 2 * 4 * layers


def test_other_codes_are_seen_in_the_next_pass():
    model, _ = families.four_bit_pair("llama", True)
    patch_parts(model, whole_layers=True)
    tile_layers(model)
    before = families.states_and_gradients(model, batch())["states"]
    layer = model.get_decoder().layers[0].mlp.down_proj
    getattr(layer, "base_layer", layer).weight.data.bitwise_xor_(1)
    after = families.states_and_gradients(model, batch())["states"]
    assert not torch.allclose(before, after)


def test_dropout_is_the_same_when_a_tile_is_computed_again():
    """The gradient is that of the loss with the masks of the forward pass: by finite differences
    along a random direction of all adapters, in fp64."""
    model = fused("llama", dropout=0.3)
    tile_layers(model)
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss():
        torch.manual_seed(5)
        return states(model).square().sum()

    gradients = torch.autograd.grad(loss(), trained)
    torch.manual_seed(6)
    direction = [torch.randn_like(p) for p in trained]
    slope = sum((g * d).sum() for g, d in zip(gradients, direction)).item()
    step = 1e-6
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(trained, direction):
                p.add_(sign * step * d)
            ends.append(loss().item())
            for p, d in zip(trained, direction):
                p.sub_(sign * step * d)
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


def test_masks_of_tiles_differ_and_are_drawn_once():
    seeds = RepeatedSeeds()
    like = torch.zeros(1)
    drawn = []
    for part in ("first", "second", "first"):
        with seeds.of(part):
            drawn.append([int(draw_seed(like)), int(draw_seed(like))])
    assert drawn[0] == drawn[2] and len({*drawn[0], *drawn[1]}) == 4
    assert int(draw_seed(like)) not in drawn[0]


def test_a_layer_keeps_its_input_alone():
    model = fused("llama")
    tile_layers(model)
    kept = []

    def keep(x):
        kept.append(x.shape)
        return x

    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as shown:
        layer = model.get_decoder().layers[1]
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
        layer.register_forward_hook(lambda *_: hooks.__exit__())
        shown.hidden_states(batch())
    assert kept == [(1, 32, 32)]


def test_it_recomputes_instead_of_transformers():
    model = fused("llama")
    enable_gradient_checkpointing(model, whole_layers=True)
    tile_layers(model)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.get_decoder().layers)
    untile_layers(model)
    unpatch_model(model)


def test_what_cannot_run_fused_is_recomputed_as_a_whole(monkeypatch):
    """A hook on a part: the layer runs by its class, keeps its input, and the log says so."""
    model = fused("llama")
    whole = gradients(model)
    tile_layers(model)
    LOGGED.clear()
    model.get_decoder().layers[0].mlp.register_forward_hook(lambda *_: None)
    recomputed = []
    usual = decoder_layer.checkpoint
    monkeypatch.setattr(
        decoder_layer, "checkpoint", lambda *a, **k: recomputed.append(a) or usual(*a, **k)
    )
    families.assert_same(whole, gradients(model))
    assert len(recomputed) == 1 and any("runs part by part" in said for said in LOGGED)


def test_without_gradients_nothing_is_kept():
    model = fused("llama").eval()
    tile_layers(model)
    with torch.no_grad():
        tiled = states(model)
        untile_layers(model)
        whole = states(model)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)


def test_products_in_fp8_run_in_tiles(set_constants):
    """Each tile has a scale of its own, so that results are near and not equal."""
    set_constants(layer_policies, MIN_FP8_WIDTH=16)
    model = fused("llama", adapted=False).float()
    run_in_fp8(model)
    whole = families.states_and_gradients(model, batch())
    tile_layers(model)
    tiled = families.states_and_gradients(model, batch())
    cosine = torch.nn.functional.cosine_similarity(
        whole["states"].flatten(), tiled["states"].flatten(), 0
    )
    assert 0.98 < cosine.item() < 1 - 1e-9


@pytest.fixture
def heads_together(monkeypatch):
    """Calls a function while queries, keys and values of all heads are made at once."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(head_groups, "divides_heads", lambda half: False)
            return function()

    return call


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", ["full", "adapters", "dropout", "DoRA", "NF4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "mistral"])
def test_heads_by_groups_are_those_that_are_made_at_once(family, way, heads_together):
    """With biases, norms of heads, one product for all, windows and softcaps; adapters drop the same
    elements of a row for each group."""
    if way == "NF4":
        model, _ = families.four_bit_pair(family, True)
        patch_parts(model, whole_layers=True)
        model.train()
    else:
        drops = 0.3 if way in ("dropout", "DoRA") else 0.0
        model = fused(family, way != "full", drops, use_dora=way == "DoRA")
    tile_layers(model)

    def found():
        torch.manual_seed(3)
        return families.states_and_gradients(model, batch())

    families.assert_same(heads_together(found), found(), 1e-11)


@pytest.mark.parametrize("family", ["llama", "phi3", "mistral", "gemma2", "olmo2"])
def test_in_16_bits_sums_are_near_those_of_one_piece(family, device):
    """By the backends of this device: on a card FlashAttention, and FlexAttention for softcaps."""
    model = fused(family).to(device, torch.bfloat16)
    whole = families.states_and_gradients(model, batch().to(device))
    tile_layers(model)
    families.assert_same(whole, families.states_and_gradients(model, batch().to(device)), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_by_groups_on_the_kernels(family, heads_together, set_constants):
    """As they run on a card, with dropout."""
    set_constants(recompute, TILE=20)
    model = fused(family, dropout=0.3, num_hidden_layers=1).float()
    tile_layers(model)

    def found():
        torch.manual_seed(3)
        return families.states_and_gradients(model, batch())

    with kernels_run():
        families.assert_same(heads_together(found), found())


@pytest.mark.parametrize(("family", "groups"), [("llama", 2), ("olmo2", 1)])
def test_one_group_of_heads_exists_at_a_time(family, groups, monkeypatch):
    """Where heads stand alone; a group's queries are gone when those of the next are made."""
    model = fused(family, num_hidden_layers=1)
    tile_layers(model)
    alive = []
    usual = HeadGroup.empty.__func__

    def watched(cls, like, tokens, heads):
        held = [memory for memory in alive if not memory.expired()]
        made = usual(cls, like, tokens, heads)
        alive[:] = [*held, StorageWeakRef(made.q.untyped_storage())]
        most.append(len(alive))
        return made

    most = []
    monkeypatch.setattr(HeadGroup, "empty", classmethod(watched))
    gradients(model)
    heads = model.config.num_key_value_heads
    assert max(most) == (1 if groups > 1 else heads)
    assert len(most) == (3 if groups > 1 else 2) * heads


def test_heads_of_latents_are_made_at_once():
    config = transformers.DeepseekV3Config(**{**choosers.DEEPSEEK, "first_k_dense_replace": 3})
    model = families.randomise(transformers.DeepseekV3ForCausalLM(config)).double().train()
    patch_parts(model, whole_layers=True)
    whole = families.states_and_gradients(model, batch())
    before = runs.copy()
    assert tile_layers(model) == 3
    families.assert_same(whole, families.states_and_gradients(model, batch()), 1e-11)
    assert runs - before == {FUSED_LAYER: 3}


def test_heads_in_fp8_are_made_at_once(set_constants):
    set_constants(layer_policies, MIN_FP8_WIDTH=16)
    model = fused("llama", adapted=False).float()
    layer, anatomy = next(decoder_layer.fused_layers(model))
    assert head_groups.divides_heads(decoder_layer.halves_of(anatomy, layer)[0])
    run_in_fp8(model)
    half, _ = decoder_layer.halves_of(anatomy, layer)
    assert not head_groups.divides_heads(half)
    with pytest.raises(NotImplementedError, match="FP8Base does not multiply by dense values"):
        head_groups.share_of(half, head_groups.HeadRange(slice(0, 2), slice(0, 1)))


FAULTS = {
    "the last row of the last tile is lost": (
        head_groups,
        "LayerHeads.__init__",
        "tiles_of(tokens, tile)",
        "tiles_of(tokens - 1, tile)",
    ),
    "the last row of the last tile has no gradient": (
        tiled_layer,
        "TiledLayer._output_gradients",
        "tiles_of(len(x), self.tile)",
        "tiles_of(len(x) - 1, self.tile)",
    ),
    "a group of heads twice": (
        head_groups,
        "ranges_of_heads",
        "slice(start, end)",
        "slice(0, end - start)",
    ),
    "query heads of another group": (
        head_groups,
        "ranges_of_heads",
        "slice(start * repeats, end * repeats)",
        "slice(0, (end - start) * repeats)",
    ),
    "keys of a group in place of its values": (
        head_groups,
        "share_of",
        "_columns(key_heads, queries + keys, width)",
        "_columns(key_heads, queries, width)",
    ),
    "columns of the first queries in all groups": (
        head_groups,
        "share_of",
        "_columns(heads, 0, width)",
        "_columns(slice(0, heads.stop - heads.start), 0, width)",
    ),
    "adapters of a group's heads are those of other heads": (
        linear_head,
        "Adapter.of_rows",
        "self.b.detach()[rows]",
        "self.b.detach()[: rows.stop - rows.start]",
    ),
    "a group drops other elements than the next": (
        tiled_layer,
        "TiledLayer._heads_of",
        "('heads', rows.start)",
        "('heads', rows.start, id(attention.first))",
    ),
    "positions of the first tile in all": (
        tiled_layer,
        "TiledLayer._heads_of",
        "self.tokens.rows(rows)",
        "self.tokens.rows(slice(0, len(x)))",
    ),
    "a tile's gradients in place of their sum": (
        tiled_layer,
        "GradientSums._add",
        "total.add_(gradient)",
        "pass",
    ),
    "the residual's gradient is left out": (
        tiled_layer,
        "TiledLayer._input_gradients",
        "[*gradients, dr[rows]]",
        "[*gradients, torch.zeros_like(dr[rows])]",
    ),
    "gradients of attention by groups in another order": (
        tiled_layer,
        "TiledLayer.backward",
        "gradients.pop(0)",
        "gradients.pop()",
    ),
    "the residual of the row before": (
        tiled_layer,
        "TiledLayer._outputs",
        "self.mlp(x, branch, request)",
        "self.mlp(x.roll(1, 0), branch, request)",
    ),
}


@pytest.fixture
def planted(monkeypatch):
    """Lets tiled layers run with a fault in one of their modules."""

    def plant(module, within, old, new):
        broken = mutant(module, old, new, within)
        if module is tiled_layer:
            monkeypatch.setattr(decoder_layer, "run_in_tiles", broken.run_in_tiles)
        elif module is head_groups:
            monkeypatch.setattr(tiled_layer, "LayerHeads", broken.LayerHeads)
            monkeypatch.setattr(tiled_layer, "ranges_of_heads", broken.ranges_of_heads)
        else:
            monkeypatch.setattr(module.Adapter, "of_rows", broken.Adapter.of_rows)

    return plant


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, planted, heads_together, monkeypatch):
    """Against heads that are made at once, with dropout; other faults against a layer in one piece."""
    drops = fault == "a group drops other elements than the next"
    one_product = FAULTS[fault][1] == "share_of"  # a linear layer for all heads
    model = fused("phi3" if one_product else "llama", dropout=0.3 if drops else 0.0)

    def found():
        torch.manual_seed(3)
        return families.states_and_gradients(model, batch())

    whole = found()
    tile_layers(model)
    if drops:
        whole = heads_together(found)
        families.assert_same(whole, found(), 1e-11)
    planted(*FAULTS[fault])
    # memory that is not written is NaN, and not by chance what was there before
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with deterministic(), pytest.raises(AssertionError):
        families.assert_same(whole, found())


def test_sums_over_tiles_are_in_fp32():
    """Of bf16 weights: a thousand tiles of equal gradients, which bf16 would stop adding."""
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    sums = tiled_layer.GradientSums([weight])
    for _ in range(1000):
        sums.add([weight * 1.0], [torch.ones_like(weight)], ())
    assert sums.totals[0].dtype == torch.float32 and math.isclose(sums.totals[0].item(), 1000)
