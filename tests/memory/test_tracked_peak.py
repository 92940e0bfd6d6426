"""The bytes that a micro-step of fused layers holds are those of its moments, by recomputation."""

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import tiny
from chronicals.kernels.launch import interpreting
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import (
    CHEAP,
    LAYERS,
    NOTHING,
    StepShape,
    WeightBytes,
    enable_gradient_checkpointing,
    estimate,
)
from chronicals.patching import decoder_layer, fuse_weights, patch_parts, recompute_norms_and_units
from chronicals.policies.needed_memory import adapter_columns
from tracked import Tracked

TOKENS = 256
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "again"), [(NOTHING, 0), (CHEAP, 0), (CHEAP, 2), (LAYERS, LAYER_COUNT)], ids=str
)
def test_a_micro_step_holds_what_its_largest_moment_has(policy, again, monkeypatch):
    """In fp32, whose products make no copies on the CPU; beside adapters, which have gradients."""
    model = tiny.llama(num_hidden_layers=LAYER_COUNT, **SIZES)
    apply_lora(model, LoRAConfig(rank=2, dropout=0.0))
    model.train()
    patch_parts(model, whole_layers=True)
    if again:
        enable_gradient_checkpointing(model, True, again)
    if policy == CHEAP:
        recompute_norms_and_units(model)
    monkeypatch.setattr(
        decoder_layer,
        "document_attention",
        lambda q, k, v, *_, padding=0, **__: Attention.apply(q, k, v, padding),
    )
    fuse_weights(model)
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
    # Kernels that do not run leave arbitrary values, in tensors of the same sizes.
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    with interpreting():
        model.get_decoder()(**given).last_hidden_state.sum().backward()  # gradients stand
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        there = [*parameters, *gradients, *model.buffers(), hidden, bounds, given["position_ids"]]
        with Tracked(there) as tracked:
            model.get_decoder()(**given).last_hidden_state.sum().backward()

    step = StepShape(TOKENS, fused=True, element=4, logit_rows=1, columns=adapter_columns(model))
    expected = estimate(model, step, WeightBytes(4, 4))
    last = expected.moments(policy, again)[1]
    planned = last.held - expected.fixed
    # The input of a last layer that is recomputed whole counts twice.
    twice = 4 * TOKENS * SIZES["hidden_size"] if policy == LAYERS else 0
    assert planned - twice == pytest.approx(tracked.peak, rel=0.03)
