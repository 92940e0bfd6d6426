"""The bytes that a micro-step of fused layers holds are those of its moments, by recomputation."""

from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import tiny
from chronicals.kernels import linear_cross_entropy
from chronicals.kernels.launch import interpreting
from chronicals.kernels.linear_cross_entropy import cross_entropy_bytes
from chronicals.kernels.linear_head import HeadShape
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import (
    CHEAP,
    LAYERS,
    NOTHING,
    StepShape,
    WeightBytes,
    enable_gradient_checkpointing,
    estimate,
    recompute,
)
from chronicals.memory.attention_results import ResultsOnDevice
from chronicals.memory.peak import ACTIVATIONS, TableBytes
from chronicals.memory.tiled_layers import LayerTiles
from chronicals.models import quantise_layers
from chronicals.patching import (
    decoder_layer,
    fuse_weights,
    head_groups,
    patch_parts,
    recompute_norms_and_units,
    tile_layers,
    tile_mlps,
)
from chronicals.policies.needed_memory import adapter_columns
from chronicals.quantization.packed import _BUFFERS
from tracked import Tracked

TOKENS = 512
LAYER_COUNT = 4
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 352,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""No sum of few of these widths is another one."""


class Attention(torch.autograd.Function):
    """Attention that keeps and makes the tensors of FlashAttention, without its values."""

    @staticmethod
    def forward(ctx, q, k, v, padding):
        tokens, heads, width = q.shape
        rows = q.new_zeros((tokens, heads * width + padding))
        out = rows[:, : heads * width].unflatten(1, (heads, width))
        ctx.save_for_backward(q, k, v, out, q.new_zeros((heads, tokens)))
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, *_ = ctx.saved_tensors
        return *(torch.zeros_like(x) for x in (q, k, v)), None


def fused(way, policy, again, tile):
    """A model whose decoder layers run fused, as ``way`` trains it and with these memory policies."""
    model = tiny.llama(num_hidden_layers=LAYER_COUNT, **SIZES)
    if way == "NF4":
        quantise_layers(model)
    if way != "full":
        apply_lora(model, LoRAConfig(rank=2, dropout=0.0, use_dora=way == "DoRA"))
    model.train()
    patch_parts(model, whole_layers=True)
    if again:
        enable_gradient_checkpointing(model, True, again)
    if policy == CHEAP:
        recompute_norms_and_units(model)
    if tile:
        tile_mlps(model)
    fuse_weights(model)
    return model


def tracked_micro_step(model):
    """Bytes that the forward pass of the layers keeps, and the most bytes of a micro-step."""
    hidden = torch.randn(1, TOKENS, SIZES["hidden_size"])
    bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
    given = {
        "inputs_embeds": hidden,
        "position_ids": torch.arange(TOKENS)[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": TOKENS,
        "max_length_k": TOKENS,
        "use_cache": False,
    }
    model.get_decoder()(**given).last_hidden_state.sum().backward()  # gradients stand
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    there = [*parameters, *gradients, *model.buffers(), *(b.matrix for b in _BUFFERS.values())]
    with Tracked([*there, hidden, bounds, given["position_ids"]]) as tracked:
        last = model.get_decoder()(**given).last_hidden_state
        kept = tracked.held - last.nbytes
        loss = last.sum()
        del last
        loss.backward()
    return kept, tracked.peak


PLANS = [(NOTHING, 0), (CHEAP, 0), (CHEAP, 2), (LAYERS, LAYER_COUNT)]
TILE = 128
QUERIES_AND_KEYS = (6 + 2 * 2) * 16
"""Outputs of the product that makes queries, keys and values."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "LoRA", "NF4", "DoRA"])
@pytest.mark.parametrize("tile", [0, TILE], ids=["whole", "tiles"])
@pytest.mark.parametrize(("policy", "again"), PLANS, ids=str)
def test_a_micro_step_holds_what_its_moments_have(way, tile, policy, again, monkeypatch):
    """In fp32, whose products make no copies on the CPU; what a forward pass keeps, and the peak."""
    model = fused(way, policy, again, tile)  # proved with kernels that run
    monkeypatch.setattr(
        decoder_layer,
        "document_attention",
        lambda q, k, v, *_, padding=0, **__: Attention.apply(q, k, v, padding),
    )
    # Kernels that do not run leave arbitrary values, in tensors of the same sizes.
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(recompute, "TILE", TILE)
    with interpreting():
        kept, peak = tracked_micro_step(model)

    of_weight = 4 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    step = StepShape(
        TOKENS,
        fused=True,
        element=4,
        logit_rows=1,
        magnitudes=way == "DoRA",
        tile=tile,
        tile_sums=of_weight if tile and way == "full" else 0,
        columns=adapter_columns(model),
    )
    expected = estimate(model, step, WeightBytes(4, 4))
    loss, _, last, *_ = expected.moments(policy, again)
    row = 4 * TOKENS
    # The last norm keeps its input and an fp32 value of each row; both rotary tables are there.
    beside = row * (1 + 2 * SIZES["head_dim"])
    if way == "DoRA":  # norms of a layer's weights stay until the update
        outputs = 2 * SIZES["hidden_size"] + QUERIES_AND_KEYS + 2 * SIZES["intermediate_size"]
        beside += 4 * LAYER_COUNT * outputs
    assert loss.parts[ACTIVATIONS] == pytest.approx(kept - beside, rel=0.006)
    # The input of the layers was there before, and a last layer that is recomputed has its own twice.
    before = row * SIZES["hidden_size"] * (2 if policy == LAYERS else 1)
    assert last.held - expected.fixed - before == pytest.approx(peak, rel=0.03)


class AttentionOfFlash(Attention):
    """The same with what FlashAttention's backward pass makes beside the gradients: an accumulator
    of the queries' in fp32, and gradients of keys and values for each query head."""

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, *_ = ctx.saved_tensors
        beside = [torch.zeros_like(q) for _ in range(4)]  # 16 bits and fp32 are alike here
        found = tuple(torch.zeros_like(x) for x in (q, k, v))
        del beside
        return *found, None


class Gathered(torch.autograd.Function):
    """Keys or values of answers that share prompts: as many here as there are."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


def tracked_tiles(model, tile, key_heads, monkeypatch, gathers=False):
    """What ``tracked_micro_step`` returns of a model whose layers run in tiles."""
    tile_layers(model)

    def attend(q, k, v, *_, padding=0, **__):
        if gathers:
            k, v = Gathered.apply(k), Gathered.apply(v)
        return AttentionOfFlash.apply(q, k, v, padding)

    monkeypatch.setattr(decoder_layer, "document_attention", attend)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(recompute, "TILE", tile)
    monkeypatch.setattr(recompute, "GROUP_ROWS", 3 * TOKENS * key_heads)
    with interpreting():
        return tracked_micro_step(model)


def expected_in_tiles(model, tile, gathers=False, **of_tiles):
    """The estimate of such a model."""
    step = StepShape(
        TOKENS,
        fused=True,
        element=4,
        logit_rows=1,
        layer_tiles=LayerTiles(tile, **of_tiles),
        columns=adapter_columns(model),
        gathers_keys=gathers,
    )
    return estimate(model, step, WeightBytes(4, 4))


def assert_held(expected, kept, peak):
    """What layers keep, and the peak, are those of an estimate."""
    loss, _, last, *_ = expected.moments(LAYERS, LAYER_COUNT)
    row = 4 * TOKENS
    beside = row * (1 + 2 * SIZES["head_dim"])
    assert loss.parts[ACTIVATIONS] == pytest.approx(kept - beside, rel=0.01)
    # the input of the first layer was there before
    before = row * SIZES["hidden_size"]
    assert last.held - expected.fixed - before == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True], ids=["", "shared prompts"])
@pytest.mark.parametrize("way", ["full", "LoRA", "NF4"])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("tile", [16, TILE])
def test_layers_in_tiles_hold_what_their_estimate_has(way, key_heads, tile, gathers, monkeypatch):
    """What the layers keep is their inputs; at the peak a small tile holds less than a group."""
    model = fused(way, NOTHING, 0, 0)
    kept, peak = tracked_tiles(model, tile, key_heads, monkeypatch, gathers)
    layer = sum(p.numel() for p in model.get_decoder().layers[0].parameters() if p.requires_grad)
    sums = 4 * layer if way == "full" else 0
    down = 4 * SIZES["hidden_size"] * SIZES["intermediate_size"] if way == "full" else 0
    assert_held(expected_in_tiles(model, tile, gathers, sums=sums, down=down), kept, peak)


@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("results", [1, 3, LAYER_COUNT])
def test_layers_that_keep_results_hold_what_their_estimate_has(results, key_heads, monkeypatch):
    """The last layers keep what attention gave; the peak is the backward pass of the last one."""
    model = fused("LoRA", NOTHING, 0, 0)
    with ResultsOnDevice(model.get_decoder().layers[-results:]):
        kept, peak = tracked_tiles(model, 16, key_heads, monkeypatch)
    expected = expected_in_tiles(model, 16)
    expected = replace(expected, kept_results=results, results_here=results)
    assert_held(expected, kept, peak)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [16, TILE])
def test_heads_that_are_made_at_once_hold_what_their_estimate_has(tile, monkeypatch):
    model = fused("LoRA", NOTHING, 0, 0)
    monkeypatch.setattr(head_groups, "divides_heads", lambda half: False)
    kept, peak = tracked_tiles(model, tile, 1, monkeypatch)
    assert_held(expected_in_tiles(model, tile, at_once=True), kept, peak)


VOCABULARY = 8192


@pytest.fixture
def tables():
    """A bf16 head, an embedding that is the head's or another, and what is trained with them."""

    def made(tied):
        head = torch.nn.Parameter(torch.zeros(VOCABULARY, 32, dtype=torch.bfloat16))
        table = head if tied else torch.nn.Parameter(head.detach().clone())
        return head, table

    return made


@pytest.mark.slow
@pytest.mark.parametrize("standing", [0, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_gradients_of_head_and_embedding_take_their_copies(tables, tied, standing, monkeypatch):
    """Of a model without layers, after the loss: gradients that are new, and that stand in 16 bits
    or in fp32.
    """
    head, table = tables(tied)
    for weight in {head, table} if standing else ():
        wide = torch.float32 if standing == 4 else torch.bfloat16
        weight.grad_dtype = wide
        weight.grad = torch.zeros(weight.shape, dtype=wide)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    ids = torch.zeros(16, dtype=torch.int64)
    there = [head, table, ids, *(w.grad for w in (head, table) if w.grad is not None)]
    with interpreting(), Tracked(there) as tracked:
        hidden = torch.nn.functional.embedding(ids, table)
        loss = linear_cross_entropy(hidden, head, ids, chunk_size=8)
        tracked.peak = tracked.held
        loss.backward()

    shape = HeadShape(16, 8, 32, VOCABULARY, 2, trained=True)
    weights = WeightBytes(2, 4, 0.0 if standing else 2.0, standing=float(standing))
    found = TableBytes.of(table, head, cross_entropy_bytes(shape), weights, 2)
    at_the_end = found.head + found.embedding + found.waiting + found.again
    if tied:
        # Where its operators are seen, autograd adds gradients in another tensor, after a cast.
        at_the_end += 2 * head.numel()
    assert max(found.returned, at_the_end) == pytest.approx(tracked.peak, rel=0.02)
