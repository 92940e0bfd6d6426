"""The native model against its formulas, and its implementations against each other."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mixture_definition
from chronicals.moe import ChronicalsMoeConfig
from comparison import equal
from mixtures import configuration, in_fp64, mixture, token_ids


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False, "num_key_value_heads": 4},
        {"sliding_window": 3, "num_experts": 3},
    ],
    ids=["usual", "plain weights", "narrow"],
)
def test_it_is_its_formulas(changes, seed):
    """transformers' norms and rotary tables are in fp32 whatever the model is in."""
    model = mixture(seed, **changes, experts_implementation="eager").double()
    ids = token_ids(29)
    torch.testing.assert_close(
        model(ids[None]).logits[0], mixture_definition.logits(model, ids), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_implementations_agree(attention, experts, seed):
    ids = token_ids(2, 37)
    with torch.no_grad():
        found, expected = (
            logits(in_fp64(mixture(seed)), ids, *ways)
            for ways in ((attention, experts), ("eager", "eager"))
        )
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_implementations_of_experts_agree(implementation, seed):
    """Layer by layer in fp32, which grouped products have at most."""
    model = mixture(seed)
    x = torch.randn(2, 37, configuration().hidden_size)
    with torch.no_grad():
        for layer in model.model.layers:
            model.set_experts_implementation("eager")
            expected = layer.mlp(x)
            model.set_experts_implementation(implementation)
            found = layer.mlp(x)
            assert all(
                (one - other).abs().max() <= 1e-5
                for one, other in zip(tensors(found), tensors(expected), strict=True)
            )


def tensors(returned):
    return (
        [returned]
        if isinstance(returned, torch.Tensor)
        else [part for part in returned if part.is_floating_point()]
    )


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_implementations_err_alike_in_bf16(attention, experts, seed):
    """Every expert takes part, for a rounding may choose another one; beside fp32, eager's own
    error is the measure.
    """
    model = mixture(seed, num_experts=2)
    ids = token_ids(2, 37)
    with torch.no_grad():
        exact = logits(model, ids, "eager", "eager")
        plain, found = (
            logits(model.bfloat16(), ids, *ways)
            for ways in (("eager", "eager"), (attention, experts))
        )
    assert (found - exact).norm() <= 1.5 * (plain - exact).norm()
    if attention == "eager":
        assert (found - plain).norm() <= 2e-2 * plain.norm()


def logits(model, ids, attention, experts):
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    return model(ids).logits


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_generated_text_is_that_of_eager(implementation, seed):
    model = mixture(seed)
    ids = token_ids(2, 11)
    texts = []
    for name in ("eager", implementation):
        model.set_experts_implementation(name)
        texts.append(model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None))
    assert equal(*texts)


def test_gradients_are_those_of_eager(seed):
    ids = token_ids(2, 23)
    found = []
    for name in ("eager", "grouped_mm"):
        model = mixture(seed)
        model.set_experts_implementation(name)
        model(ids, labels=ids, output_router_logits=True).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in found[0].items():
        difference = (found[1][name] - expected).norm()
        assert difference <= 1e-4 * expected.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("output_lookahead", [False, True])
def test_a_step_never_waits_for_the_device(output_lookahead):
    """Tensors without values: whatever asks for one, as .item(), .any() in an if, or a copy to
    the host, fails.
    """
    with FakeTensorMode():
        model = mixture(random=False)
        model.set_experts_implementation("batched_mm")
        ids = torch.zeros(2, 40, dtype=torch.long)
        positions = torch.arange(40).expand(2, 40)
        mask = torch.ones(2, 1, 40, 40, dtype=torch.bool)
        given = {"position_ids": positions, "attention_mask": mask, "use_cache": False}
        out = model.model(
            ids, **given, output_router_logits=True, output_lookahead=output_lookahead
        )
        (out.last_hidden_state.sum() + sum(x.sum() for x in out.router_logits)).backward()
        assert all(
            p.grad is not None for name, p in model.model.named_parameters() if "_ahead" not in name
        )


def test_outputs_are_a_model_output(seed):
    model = mixture(seed, num_experts=5, num_hidden_layers=4)
    ids = token_ids(2, 9)
    out = model(
        ids, labels=ids, output_router_logits=True, output_lookahead=True, output_hidden_states=True
    )
    assert [tuple(x.shape) for x in out.lookahead.layers] == [(2, 9, n, 5) for n in (4, 3, 2, 1)]
    assert out.lookahead.tokens.shape == (2, 9, 2, 4, 5)
    assert [tuple(x.shape) for x in out.router_logits] == [(18, 5)] * 4 and len(
        out.hidden_states
    ) == 5
    plain = model(ids)
    assert plain.lookahead is None and plain.router_logits is None
    assert isinstance(model(ids, return_dict=False), tuple)
    nothing = mixture(lookahead_layers=None, lookahead_tokens=0)
    assert nothing(ids, output_lookahead=True).lookahead.to_tuple() == ()


def test_new_heads_are_gate_reuse(seed):
    """Level 0: the routers of later layers, applied to a layer's normed input."""
    model = mixture(seed, random=False)
    ids = token_ids(1, 9)
    out = model(ids, output_lookahead=True, output_hidden_states=True)
    for n, predicted in enumerate(out.lookahead.layers):
        features = model.model.layers[n].input_layernorm(out.hidden_states[n])
        for d in range(predicted.shape[2]):
            expected = features @ model.model.layers[n + d].mlp.gate.weight.T
            torch.testing.assert_close(predicted[:, :, d], expected)


def test_tokens_ahead_of_a_sampled_token(seed):
    model = mixture(seed).model
    ids = token_ids(1, 9)
    out = model(ids, output_lookahead=True)
    found = model.predict_tokens(out.last_hidden_state[:, 4], ids[:, 5])
    torch.testing.assert_close(found, out.lookahead.tokens[:, 4])
    with pytest.raises(ValueError, match="lookahead_tokens=0"):
        mixture(lookahead_tokens=0).model.predict_tokens(out.last_hidden_state, ids)


@pytest.mark.parametrize("trunk", [False, True])
def test_whom_lookahead_may_teach(trunk, seed):
    model = mixture(seed, lookahead_trunk_gradient=trunk)
    ids = token_ids(1, 9)
    found = model(ids, output_lookahead=True).lookahead
    (sum(x.square().sum() for x in found.layers) + found.tokens.square().sum()).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    heads = {name for name, _ in model.named_parameters() if "_ahead." in name}
    assert heads <= reached and (reached - heads != set()) == trunk
    assert not any("gate.weight" in name for name in reached) or trunk


def test_shared_experts_are_always_on(seed):
    model = mixture(seed)
    ids = token_ids(1, 9)
    before = model(ids).logits
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.zero_()
        without = model(ids).logits
        for layer in model.model.layers:
            layer.mlp.shared_experts.down_proj.weight.zero_()
    assert not torch.allclose(without, before) and not torch.allclose(model(ids).logits, without)


WRONG = [
    ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
    ({"layer_types": ["full_attention"] * 3 + ["linear"]}, r"layer_types=\['linear'\]"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim=3"),
    ({"lookahead_layers": -1}, "lookahead_layers=-1"),
]


@pytest.mark.parametrize("changes, says", WRONG, ids=[says for _, says in WRONG])
def test_wrong_sizes_are_named(changes, says):
    with pytest.raises(Exception, match=says):
        configuration(**changes)


def test_defaults_are_a_model():
    with torch.device("meta"):
        from chronicals.moe import ChronicalsMoeForCausalLM

        model = ChronicalsMoeForCausalLM(ChronicalsMoeConfig())
    assert model.config.layer_types[:3] == ["full_attention", "sliding_attention", "full_attention"]
    assert model.num_parameters() > 1e8
