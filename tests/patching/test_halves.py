"""Halves of a decoder layer that are fused by themselves, beside a half that its class computes."""

import copy

import pytest
import torch
import transformers
from torch import nn

import families
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import enable_gradient_checkpointing
from chronicals.models import PresentedModel, quantise_layers
from chronicals.patching import (
    decoder_layer,
    halves,
    patch_parts,
    plan,
    recompute_norms_and_units,
    run_in_fp8,
    tile_mlps,
)
from chronicals.patching.decoder_layer import (
    ATTENTION_HALF,
    FUSED_ATTENTION,
    FUSED_LAYER,
    FUSED_MLP,
    MLP_HALF,
    products_of_halves,
    runs,
)
from chronicals.patching.patch import ROUTED_HALF
from interpreted import kernels_run
from mutants import mutant

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "experts_implementation": "eager"}
ROUTED = {
    "Mixtral": EXPERTS | {"num_local_experts": 4, "sliding_window": 4},
    "Qwen2Moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
    "GptOss": families.GPT_OSS,
}


def build(name, **sizes):
    config = getattr(transformers, f"{name}Config")(**{**families.SIZES, **sizes})
    return families.randomise(getattr(transformers, f"{name}ForCausalLM")(config).double().train())


def same_with(model, by):
    """States and gradients as the class gives them, with every layer run as ``by`` says; what
    the report says.
    """
    batch = families.documents_batch()
    layers = len(model.get_decoder().layers)
    expected = families.states_and_gradients(copy.deepcopy(model), batch)
    report = patch_parts(model, whole_layers=True)
    before = runs.copy()
    families.assert_same(expected, families.states_and_gradients(model, batch))
    assert runs - before == {by: layers}
    return report


def left_of(report, half):
    return [entry.path for entry in report.left if entry.part == half]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen2Moe"])
def test_a_mixture_keeps_what_fused_halves_keep_if_its_experts_are_fused(name):
    """Shared experts beside the routed ones are the class's own, as is what they keep."""
    made = plan.plan_for(build(name, **ROUTED[name]))
    assert {form.by for form in made.layers.values()} == {FUSED_ATTENTION}
    assert made.fuses_halves and not made.without(plan.EXPERTS).fuses_halves


@pytest.mark.slow
def test_a_dense_model_keeps_what_fused_halves_keep():
    assert plan.plan_for(build("Llama")).fuses_halves


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ROUTED)
def test_attention_is_fused_beside_experts(name, adapted):
    model = build(name, **ROUTED[name])
    if adapted:
        apply_lora(
            model, LoRAConfig(rank=3, dropout=0.0, target_modules=["q_proj", "v_proj", "o_proj"])
        ).double()
        for parameter_name, p in model.named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(p, std=0.3)
    report = same_with(model, FUSED_ATTENTION)
    assert report.counts()[FUSED_ATTENTION] == 2 and FUSED_LAYER not in report.counts()
    assert left_of(report, MLP_HALF) == ["model.layers.0", "model.layers.1"] and MLP_HALF in str(
        report
    )
    assert {entry.reason for entry in report.left} == {ROUTED_HALF}


ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("in_4_bits", [False, True], ids=["16-bit", "4-bit"])
@pytest.mark.parametrize(
    "parameters", [[], ON_EXPERTS, ["mlp.gate.weight"]], ids=["attention", "experts", "router"]
)
def test_attention_is_fused_beside_experts_in_4_bits_and_adapters_of_experts_and_routers(
    parameters, in_4_bits
):
    model = build("Qwen3Moe", **ROUTED["Qwen3Moe"])
    if in_4_bits:
        quantise_layers(model.float())
    config = LoRAConfig(
        rank=3,
        dropout=0.0,
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=parameters,
    )
    apply_lora(model.double(), config).double()
    for parameter_name, p in families.frozen_codes(model).named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(p, std=0.1)
    report = same_with(model, FUSED_ATTENTION)
    assert {entry.reason for entry in report.left if entry.part == MLP_HALF} == {ROUTED_HALF}


@pytest.mark.slow
def test_sinks_and_biases_of_attention_are_in_its_half(planned_with):
    """gpt-oss's: all its products have biases, and its tables a channel of each pair. Without
    its sinks it is not taken.
    """
    model = build("GptOss", **ROUTED["GptOss"])
    attention = model.model.layers[0].self_attn
    assert all(
        getattr(attention, name).bias is not None
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    wrong = mutant(halves, 'getattr(attention, "sinks", None)', "None")
    planned_with(decoder_layer, AttentionHalf=wrong.AttentionHalf, FusedHalf=wrong.FusedHalf)
    assert not plan.plan_for(model).layers


@pytest.mark.slow
def test_a_dense_layer_among_routed_ones_runs_whole():
    model = build("Qwen3Moe", **ROUTED["Qwen3Moe"], mlp_only_layers=[0])
    report = patch_parts(model, whole_layers=True)
    assert (report.counts()[FUSED_LAYER], report.counts()[FUSED_ATTENTION]) == (1, 1) and left_of(
        report, MLP_HALF
    ) == ["model.layers.1"]
    before = runs.copy()
    families.states_and_gradients(model, families.documents_batch())
    assert runs - before == {FUSED_LAYER: 1, FUSED_ATTENTION: 1}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, recompute_norms_and_units, tile_mlps])
def test_the_mlp_is_fused_beside_another_attention(policy):
    """DiffLlama subtracts one attention from another: its products have the usual names, and the
    twin disagrees.
    """
    model = build("DiffLlama", attn_implementation="eager")
    if policy is not None:
        policy(model)
    report = same_with(model, FUSED_MLP)
    assert report.counts()[FUSED_MLP] == 2
    reasons = {entry.reason for entry in report.left if entry.part == ATTENTION_HALF}
    assert reasons == {"the whole twin did not agree with it"}


LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.7,
}
YARN |= {"mscale_all_dim": 0.8}
WITH_LATENTS = {
    "DeepseekV3": ("DeepseekV3", LATENT),
    "DeepseekV3, queries without a latent": ("DeepseekV3", {**LATENT, "q_lora_rank": None}),
    "DeepseekV3, channels of a pair apart": ("DeepseekV3", {**LATENT, "rope_interleave": False}),
    "DeepseekV3, longer than it was made for": ("DeepseekV3", {**LATENT, "rope_parameters": YARN}),
    "DeepseekV3, biases": ("DeepseekV3", {**LATENT, "attention_bias": True}),
    "DeepseekV2, a rotation of complex numbers": ("DeepseekV2", LATENT),
    "DeepseekV2, queries without a latent": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
}
OF_LATENTS = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("kind", WITH_LATENTS)
def test_latent_attention_is_fused(kind, adapted):
    name, sizes = WITH_LATENTS[kind]
    model = build(name, **sizes)
    of_queries = ["q_a_proj", "q_b_proj"] if sizes["q_lora_rank"] else ["q_proj"]
    if adapted:
        apply_lora(
            model, LoRAConfig(rank=3, dropout=0.0, target_modules=[*of_queries, *OF_LATENTS])
        ).double()
        for parameter_name, p in model.named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(p, std=0.3)
    report = same_with(model, FUSED_LAYER)
    assert not left_of(report, ATTENTION_HALF)
    attention, _ = products_of_halves(model.model.layers[0])
    first, *second = of_queries
    assert [names for _, names, _ in attention] == [
        (first, "kv_a_proj_with_mqa"),
        ("o_proj",),
        *((name,) for name in second),
        ("kv_b_proj",),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_LATENTS)
def test_latent_attention_on_the_kernels(kind):
    """As the kernels run on a card, of latents that lie beside each other in one product's
    output.
    """
    name, sizes = WITH_LATENTS[kind]
    model = build(name, **sizes)
    batch = families.documents_batch()
    expected = families.states_and_gradients(copy.deepcopy(model), batch)
    patch_parts(model.float(), whole_layers=True)
    before = runs.copy()
    with kernels_run():
        found = families.states_and_gradients(model, batch)
    families.assert_same(expected, {name: value.double() for name, value in found.items()})
    assert runs - before == {FUSED_LAYER: 2}


def test_latent_attention_of_the_native_model_is_fused_beside_its_experts():
    from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM

    sizes = {
        **families.SIZES,
        **{name: size for name, size in LATENT.items() if name != "first_k_dense_replace"},
    }
    config = ChronicalsMoeConfig(**sizes, **{**EXPERTS, "num_experts": 4}, sliding_window=4)
    model = families.randomise(ChronicalsMoeForCausalLM(config).double().train())
    report = same_with(model, FUSED_ATTENTION)
    assert report.counts()[FUSED_ATTENTION] == 2 and left_of(report, MLP_HALF) == [
        "model.layers.0",
        "model.layers.1",
    ]


def test_a_latent_whose_weights_others_hold_elsewhere_runs_as_its_class():
    model = build("DeepseekV3", **LATENT)
    model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    batch = families.documents_batch()
    expected = families.states_and_gradients(copy.deepcopy(model), batch)
    patch_parts(model, whole_layers=True)
    before = runs.copy()
    families.assert_same(expected, families.states_and_gradients(model, batch))
    assert runs - before == {FUSED_LAYER: 1, FUSED_MLP: 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k_rotary.expand(-1, heads, -1)", "key.unsqueeze(1).expand(-1, heads, -1)"),
        ("(plain, value)", "(value, plain)"),
        (
            "fused_rmsnorm(latent, *arguments)",
            "latent",
        ),
        ("cos[:, : rotary // 2].repeat_interleave(2, 1)", "cos[:, : rotary // 2].repeat(1, 2)"),
    ],
    ids=[
        "a key that is not rotated",
        "values that are keys",
        "a latent that is not normed",
        "angles of other pairs",
    ],
)
def test_a_wrong_latent_half_is_not_taken(old, new, planned_with):
    model = build("DeepseekV3", **LATENT, qk_head_dim=18)
    wrong = mutant(halves, old, new)
    names = ("LatentHalf", "LatentReads", "FusedHalf", "Unmerged")
    planned_with(decoder_layer, **{name: getattr(wrong, name) for name in names})
    assert all(form.by == FUSED_MLP for form in plan.plan_for(model).layers.values())


@pytest.mark.parametrize(("name", "by"), [("DiffLlama", FUSED_MLP), ("Mixtral", FUSED_ATTENTION)])
def test_layers_made_again_give_the_same(name, by):
    model = build(name, **ROUTED.get(name, {"attn_implementation": "eager"}))
    batch = families.documents_batch()
    patch_parts(model, whole_layers=True)
    expected = families.states_and_gradients(model, batch)
    enable_gradient_checkpointing(model, whole_layers=True)
    before = runs.copy()
    with PresentedModel(
        model, packed=True, head_is_read=False
    ).attending_documents():  # when they are made again, too
        got = families.states_and_gradients(model, batch)
    assert runs - before == {by: 4} and all(
        torch.equal(expected[key], got[key]) for key in expected
    )


@pytest.mark.parametrize(
    ("part", "half"),
    [
        ("mlp", FUSED_ATTENTION),
        ("self_attn", FUSED_MLP),
        ("post_attention_layernorm", FUSED_ATTENTION),
    ],
)
def test_a_hook_keeps_its_half_alone(part, half):
    model = families.build("llama").double()
    batch = families.documents_batch()
    layer = model.get_decoder().layers[0]
    seen = []
    layer.get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    expected = families.states_and_gradients(copy.deepcopy(model), batch)
    patch_parts(model, whole_layers=True)
    before = runs.copy()
    seen.clear()
    families.assert_same(expected, families.states_and_gradients(model, batch))
    assert runs - before == {FUSED_LAYER: 1, half: 1} and seen == [part]


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "granite"])
@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_norms_and_multipliers_of_a_half_that_its_class_computes(family, part):
    model = families.build(family).double()
    batch = families.documents_batch()
    expected = families.states_and_gradients(copy.deepcopy(model), batch)
    patch_parts(model, whole_layers=True)
    for layer in model.get_decoder().layers:
        layer.get_submodule(part).register_forward_hook(lambda *_: None)
    before = runs.copy()
    families.assert_same(expected, families.states_and_gradients(model, batch))
    assert runs - before == {FUSED_ATTENTION if part == "mlp" else FUSED_MLP: 2}


def test_only_products_of_fused_halves_are_found():
    model = build("Qwen3Moe", **ROUTED["Qwen3Moe"])
    patch_parts(model, whole_layers=True)
    assert [[names for _, names, _ in products] for products in products_of_halves(model)] == 2 * [
        [("q_proj", "k_proj", "v_proj"), ("o_proj",)]
    ]
    assert run_in_fp8(model).total == 4


def test_a_second_call_changes_no_report():
    model = build("Mixtral", **ROUTED["Mixtral"])
    report = patch_parts(model, whole_layers=True)
    before = len(report.replaced), len(report.left)
    assert (
        patch_parts(model, whole_layers=True) is report
        and (len(report.replaced), len(report.left)) == before
    )
