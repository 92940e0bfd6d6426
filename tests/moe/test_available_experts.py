"""The shared experts stand in for those that are not available, by the formula."""

import pytest
import torch

import families
from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM
from chronicals.moe import model as module
from mutants import mutant

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
IDS = torch.arange(1, 25).view(2, 12)


def build(**changes):
    torch.manual_seed(4)
    config = ChronicalsMoeConfig(**{**SIZES, **changes})
    return families.randomise(ChronicalsMoeForCausalLM(config).float().eval())


def by_formula(block, x_TD, available_E):
    _, weights, experts = block.gate(x_TD)
    shared = block.shared_experts(x_TD)
    out = shared.clone()
    for token in range(len(x_TD)):
        for weight, expert in zip(weights[token], experts[token].tolist()):
            one = torch.tensor([[expert]])
            own = block.experts(x_TD[token : token + 1], one, torch.ones(1, 1).to(x_TD))[0]
            out[token] += weight * (own if available_E[expert] else shared[token])
    return out


def test_by_the_formula():
    block = build().model.layers[0].mlp
    x = torch.randn(11, 32)
    available = torch.tensor([True, False, True, False, False, True])
    with torch.no_grad():
        got = block(x[None], available)[0]
        expected = by_formula(block, x, available)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        wrong = mutant(module, "1 + fallback_T1", "1 - fallback_T1").MixtureOfExperts.forward
        assert not torch.allclose(wrong(block, x[None], available)[0], expected)


def test_no_expert_is_called_that_is_not_available(monkeypatch):
    model = build()
    called = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args: called.append(args[1].unique().tolist())
        )
    masks = torch.zeros(2, 6, dtype=torch.bool)
    masks[0, 2] = masks[1, 4] = masks[1, 5] = True
    with torch.no_grad():
        model(IDS, available_expert_masks=masks)
    assert called[0] == [2] and set(called[1]) <= {4, 5}


def test_all_available_is_the_model():
    model = build()
    with torch.no_grad():
        got = model(IDS, available_expert_masks=torch.ones(2, 6, dtype=torch.bool)).logits
        torch.testing.assert_close(got, model(IDS).logits, rtol=1e-4, atol=1e-4)
        none = model(IDS, available_expert_masks=torch.zeros(2, 6, dtype=torch.bool)).logits
    assert not torch.allclose(none, got)


def test_what_does_not_fit():
    masks = torch.ones(2, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="has no shared experts that could stand in"):
        build(num_shared_experts=0)(IDS, available_expert_masks=masks)
    with pytest.raises(ValueError, match=r"expected torch.bool \(2, 6\)"):
        build()(IDS, available_expert_masks=masks[:1])
    model = build()
    model.model.layers[0].forward = model.model.layers[0].forward
    with pytest.raises(ValueError, match="its layers run fused and would not see them"):
        model(IDS, available_expert_masks=masks)
