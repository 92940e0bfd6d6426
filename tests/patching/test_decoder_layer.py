"""The fused decoder layer: the same hidden states and gradients as the class's own, over
documents, in every family.
"""

import copy
import inspect
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import DynamicCache

import families
from chronicals.lora import LoRAConfig, apply_lora, without_adapters
from chronicals.memory import ActivationOffload, enable_gradient_checkpointing, recompute
from chronicals.models import PresentedModel
from chronicals.models.presentation import CACHES, packed_arguments
from chronicals.patching import (
    decoder_layer,
    forget_policies,
    fuse_weights,
    fused_weights,
    halves,
    patch_model,
    patch_parts,
    plan,
    recompute_norms_and_units,
    tile_mlps,
    unpatch_model,
)
from chronicals.patching.decoder_layer import FUSED_LAYER
from chronicals.quantization import Dense
from mutants import mutant

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
    "ministral3",
    "phi3",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
]


def fused(model):
    """``model`` patched; every layer must run fused in what follows."""
    report = patch_parts(model, whole_layers=True)
    assert report.counts().get(FUSED_LAYER) == len(model.get_decoder().layers), report
    return model


def both(model, batch):
    plain = families.states_and_gradients(copy.deepcopy(model), batch)
    model = fused(model)
    before = decoder_layer.runs[FUSED_LAYER]
    ours = families.states_and_gradients(model, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + len(model.get_decoder().layers)
    return plain, ours


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_class(family):
    families.assert_same(*both(families.build(family).double(), families.documents_batch()))


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma3"])
def test_with_adapters(family, targets):
    model = families.build(family)
    if targets is not None and family == "phi3":
        targets = ["qkv_proj"]
    apply_lora(model, LoRAConfig(rank=3, alpha=5, dropout=0.0, target_modules=targets))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    families.assert_same(*both(model.double(), families.documents_batch()))


def memory_of(x):
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "olmo2"])
def test_what_is_made_again_is_what_it_was(family, adapted):
    """The same gradients bit for bit, from fewer tensors kept."""
    model = families.build(family).double()
    if adapted:
        apply_lora(model, LoRAConfig(rank=3, dropout=0.4)).double()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.3)
    batch = families.documents_batch()
    found = []
    kept = []
    fused(model)
    for again in (False, True):
        if again:
            recompute_norms_and_units(model)
        sizes = set()
        pack = lambda x, sizes=sizes: sizes.add(memory_of(x)) or x  # noqa: E731
        torch.manual_seed(4)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found.append(families.states_and_gradients(model, batch))
        kept.append(sum(size for _, size in sizes))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert kept[1] < kept[0]


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_made_again_run_fused(family, adapted):
    """Twice, of their inputs alone, to the same gradients bit for bit."""
    model = families.build(family)
    batch = families.documents_batch()
    if adapted:
        apply_lora(model, LoRAConfig(rank=3, dropout=0.4))
    layers = len(model.get_decoder().layers)
    fused(model)
    torch.manual_seed(4)
    expected, kept = seeing_what_is_kept(model, batch)
    enable_gradient_checkpointing(model, whole_layers=True)
    before = decoder_layer.runs[FUSED_LAYER]
    torch.manual_seed(4)
    got, kept_again = seeing_what_is_kept(model, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + 2 * layers
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert kept_again < kept / 3


@pytest.mark.parametrize(
    "policy",
    [recompute_norms_and_units, tile_mlps, enable_gradient_checkpointing],
    ids=lambda policy: policy.__name__,
)
def test_a_policy_does_not_make_a_layer_another_kind(policy):
    """Whatever was asked for first; and a later run can go without it."""
    model = families.build("qwen2")
    batch = families.documents_batch()
    policy(model)
    fused(model)
    model.gradient_checkpointing_disable()
    forget_policies(model)
    before = decoder_layer.runs[FUSED_LAYER]
    families.states_and_gradients(model, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + len(model.get_decoder().layers)
    layer = model.get_decoder().layers[0]
    assert not any(vars(layer).get(name) for name in (halves.RECOMPUTES, halves.TILES))


def test_a_second_backward_of_layers_made_again(set_constants):
    set_constants(recompute, TILE=7)
    model = families.build("llama")
    batch = families.documents_batch()
    fused(model)
    tile_mlps(model)
    enable_gradient_checkpointing(model, whole_layers=True)
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        loss = presented.hidden_states(batch).square().sum()
        first, second = (
            torch.autograd.grad(loss, list(model.get_decoder().parameters()), retain_graph=True)
            for _ in range(2)
        )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_what_falls_back_is_made_again_once(monkeypatch):
    """A layer that cannot run fused runs twice in all, not three times."""
    model = families.build("llama")
    batch = families.documents_batch()
    calls = []
    fused(model)
    enable_gradient_checkpointing(model, whole_layers=True)
    model.get_decoder().layers[0].self_attn.q_proj.register_forward_hook(
        lambda *_: calls.append(None)
    )
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        presented.hidden_states(batch).square().sum().backward()
    assert len(calls) == 2


def seeing_what_is_kept(model, batch):
    """Gradients, and the bytes that autograd keeps beside weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        memory = x.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = families.states_and_gradients(model, batch)
    return found, sum(kept.values())


def test_what_nobody_reads_is_not_made_again(record_calls):
    """The last product of a layer, unless a norm comes after it, which keeps its outputs."""
    for family, left_out in (("llama", 2), ("gemma2", 0)):
        model = families.build(family)
        fused(model)
        enable_gradient_checkpointing(model, whole_layers=True)
        made = record_calls(Dense, "forward")
        families.states_and_gradients(model, families.documents_batch())
        assert len(made) == 2 * 4 * len(model.get_decoder().layers) - left_out


@pytest.mark.parametrize("window", [0, 5_000, 15_000, 50_000])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "made again"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_what_was_in_host_memory_is_what_it_was(adapted, again, window, device):
    """The same gradients bit for bit; on a card nothing of what was moved is held there on the
    side.
    """
    model = families.build("qwen2").to(device)
    if adapted:
        apply_lora(model, LoRAConfig(rank=3, dropout=0.4))
    fused(model)
    if again:
        recompute_norms_and_units(model)
    batch = families.documents_batch().to(device)
    expected, whole = states_gradients_and_held(model, batch)
    offload = ActivationOffload(model.get_decoder(), smallest=1 << 10, window=window)
    got, rest = states_gradients_and_held(model, batch)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert offload.moved > 0
    if device.type == "cuda" and not window:
        assert rest < 0.5 * whole


def states_gradients_and_held(model, batch):
    """With the bytes that a forward pass leaves on the card, in a second pass, when libraries
    have what they need.
    """
    decoder = model.get_decoder()
    held = []
    hooks = [
        decoder.register_forward_pre_hook(lambda *_: held.append(-torch.cuda.memory_allocated())),
        decoder.norm.register_forward_hook(lambda *_: held.append(torch.cuda.memory_allocated())),
    ]
    for _ in range(2):
        held.clear()
        torch.manual_seed(4)
        found = families.states_and_gradients(model, batch)
    for hook in hooks:
        hook.remove()
    return found, sum(held)


def test_no_gradient_below_the_first_adapter():
    """The first layer's input needs none, so no product is made for it."""
    model = apply_lora(families.build("llama"), LoRAConfig(rank=2, dropout=0.0))
    fused(model)
    seen = []
    model.get_decoder().layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].requires_grad)
    )
    families.states_and_gradients(model, families.documents_batch())
    assert seen == [False]


def test_parameters_keep_names_shapes_and_identity():
    model = families.build("qwen2")
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    fuse_weights(fused(model))
    for name, p in model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1]), name
    attention = model.get_decoder().layers[0].self_attn
    assert (
        attention.k_proj.weight.data_ptr()
        == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    )


def move(model):
    return model.float().double()


def load(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def adapt(model):
    return apply_lora(
        model, LoRAConfig(rank=2, dropout=0.0, target_modules=["q_proj", "up_proj"])
    ).double()


def deep_copy(model):
    return copy.deepcopy(model)


def save_and_load(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("operation", [move, load, adapt, deep_copy])
def test_after_operations_that_move_weights(operation, caplog):
    """They are fused anew, and the result is that of the class."""
    model = fused(families.build("llama").double())
    batch = families.documents_batch()
    families.states_and_gradients(model, batch)
    with caplog.at_level(logging.WARNING):
        model = operation(model)
        before = decoder_layer.runs[FUSED_LAYER]
        got = families.states_and_gradients(model, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + 2
    if operation is not deep_copy:
        assert "fused anew" in caplog.text
    unpatch_model(model)
    families.assert_same(families.states_and_gradients(model, batch), got)


@pytest.mark.parametrize("of", ["ours", "peft"])
@torch.no_grad()
def test_adapters_are_off_and_on_without_moving_anything(of):
    """Off, the layers run fused and compute what their base computes, from the storage that has
    the adapters' padding.
    """
    model = families.build("qwen2")
    batch = families.documents_batch()
    base = states_of(model, batch)
    names = ["q_proj", "v_proj", "down_proj"]
    if of == "peft":
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=3, target_modules=names, lora_dropout=0.0)
        )
        off = adapted.disable_adapter
    else:
        adapted = apply_lora(model, LoRAConfig(rank=3, dropout=0.0, target_modules=names))
        off = partial(without_adapters, model)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    fused(adapted)
    expected = states_of(model, batch)
    held = storages(model)
    places = [p.data_ptr() for p in model.parameters()]
    before = decoder_layer.runs[FUSED_LAYER]
    with off():
        got = states_of(model, batch)
    assert torch.equal(states_of(model, batch), expected)
    assert decoder_layer.runs[FUSED_LAYER] == before + 4 and not torch.allclose(
        got, expected, atol=1e-2
    )
    torch.testing.assert_close(got, base, rtol=1e-4, atol=1e-5)
    assert places == [p.data_ptr() for p in model.parameters()]
    assert held and all(a is b for a, b in zip(held, storages(model), strict=True))


def storages(model):
    return [
        merged
        for module in model.modules()
        for merged in vars(module).get(fused_weights.MERGED, {}).values()
    ]


def states_of(model, batch):
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        return presented.hidden_states(batch)


def test_adapted_weights_are_their_own_again_when_unpatched(tmp_path):
    """Those with margins have strided rows; afterwards the model saves, and nothing is held that
    it does not use.
    """
    model = apply_lora(families.build("qwen2"), LoRAConfig(rank=3, dropout=0.0))
    fuse_weights(fused(model))
    base = model.get_decoder().layers[0].self_attn.q_proj.base_layer
    value = base.weight.detach().clone()
    assert not base.weight.is_contiguous()
    unpatch_model(model)
    assert all(p.is_contiguous() for p in model.parameters()) and torch.equal(base.weight, value)
    assert not any(fused_weights.MERGED in vars(module) for module in model.modules())
    model.save_pretrained(tmp_path)


@pytest.mark.slow
def test_norms_of_another_type_keep_the_class_way(caplog):
    """As Gemma's do where they are trained in fp32 over a base in bf16."""
    model = families.build("gemma").bfloat16()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data = p.data.float()
    with caplog.at_level(logging.WARNING):
        families.states_and_gradients(fused(model), families.documents_batch())
    assert "a norm's weight is not" in caplog.text


def test_peft_with_dropout_runs_fused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_dropout=0.1, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(families.build("llama"), config).train()
    fused(model.get_base_model())
    before = decoder_layer.runs[FUSED_LAYER]
    families.states_and_gradients(model.get_base_model(), families.documents_batch())
    assert decoder_layer.runs[FUSED_LAYER] == before + 2


def test_saved_and_loaded_as_the_class(tmp_path):
    model = fused(families.build("llama").double())
    batch = families.documents_batch()
    got = families.states_and_gradients(model, batch)
    families.assert_same(families.states_and_gradients(save_and_load(model, tmp_path), batch), got)


PARTS = [
    "self_attn",
    "mlp",
    "mlp.act_fn",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", ["hook", "forward"])
def test_what_somebody_put_into_a_layer_is_called(part, how):
    """After the layers are fused, or before."""
    batch = families.documents_batch()
    found = []
    model = families.build("qwen3").double()

    def doubled(out):
        return tree_map(lambda x: None if x is None else 2 * x, out)

    for order in ("plain", "before", "after"):
        changed = copy.deepcopy(model)
        if order == "after":
            fused(changed)
        module = changed.get_decoder().layers[0].get_submodule(part)
        if how == "hook":
            module.register_forward_hook(lambda _module, _given, out: doubled(out))
        else:
            own = module.forward
            module.forward = lambda *given, own=own, **named: doubled(own(*given, **named))
        if order == "before":
            patch_parts(changed, whole_layers=True)
        ran = decoder_layer.runs[FUSED_LAYER]
        found.append(families.states_and_gradients(changed, batch))
        assert decoder_layer.runs[FUSED_LAYER] == ran + (order != "plain"), (
            "the other layer runs fused"
        )
    families.assert_same(found[0], found[1])
    families.assert_same(found[0], found[2])


ACTIVATED = {
    "module": ("qwen3", lambda mlp: setattr(mlp, "act_fn", torch.nn.ReLU())),
    "function of a module": ("gemma3", lambda mlp: setattr(mlp.act_fn, "act", torch.tanh)),
    "lambda in its place": ("gemma3", lambda mlp: setattr(mlp.act_fn, "act", lambda x: x * 0.5)),
}


@pytest.mark.parametrize(("family", "change"), ACTIVATED.values(), ids=ACTIVATED)
@pytest.mark.parametrize("patch", [patch_parts, fused])
def test_another_activation_is_the_one_that_is_called(patch, family, change):
    batch = families.documents_batch()
    found = []
    plain = families.build(family).double()
    patched = copy.deepcopy(plain)
    patch(patched)
    for model in (plain, patched):
        change(model.get_decoder().layers[0].mlp)
        found.append(families.states_and_gradients(model, batch))
    families.assert_same(*found)


def test_transformers_own_hooks_that_look_on_leave_layers_fused():
    model = fused(families.build("llama").double())
    batch = families.documents_batch()
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents():
        out = model.get_decoder()(**packed_arguments(batch), output_hidden_states=True)
    assert len(out.hidden_states) == 3
    before = decoder_layer.runs[FUSED_LAYER]
    families.states_and_gradients(model, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda m: (
                m.get_decoder().layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
            ),
            "hooks",
        ),
        (
            lambda m: setattr(m.get_decoder().layers[0].self_attn, "attention_dropout", 0.1),
            "dropout",
        ),
        (lambda m: m.get_decoder().layers[0].mlp.gate_proj.float(), "differ in type"),
    ],
    ids=["hook", "dropout", "type"],
)
def test_what_it_does_not_do_runs_part_by_part_and_is_said(change, reason, caplog):
    model = fused(families.build("llama").double()).train()
    change(model)
    before = decoder_layer.runs[FUSED_LAYER]
    with caplog.at_level(logging.WARNING):
        try:
            families.states_and_gradients(model, families.documents_batch())
        except (ValueError, RuntimeError):  # the class itself cannot either
            assert reason != "hooks"
    assert decoder_layer.runs[FUSED_LAYER] <= before + 1
    assert reason in caplog.text and "part by part" in caplog.text


@pytest.mark.parametrize("earlier", [patch_model, patch_parts])
def test_layers_of_a_model_that_was_patched_before_are_fused_once(earlier):
    model = families.build("llama")
    report = earlier(model)
    before = dict(report.counts())
    for _ in range(2):
        assert fused(model)._chronicals_report is report
    assert report.counts() == before | {FUSED_LAYER: 2}
    assert len(set(report.replaced)) == len(report.replaced) and len(set(report.left)) == len(
        report.left
    )


def test_generation_takes_the_class_way():
    model = families.build("llama")
    ids = torch.randint(1, families.VOCABULARY, (1, 5))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(fused(model).generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_a_cache_is_filled_by_the_class(caplog):
    model = fused(families.build("llama"))
    batch = families.documents_batch()
    before = decoder_layer.runs[FUSED_LAYER]
    with (
        PresentedModel(model, packed=True, head_is_read=False).attending_documents(),
        caplog.at_level(logging.WARNING),
    ):
        out = model.get_decoder()(**packed_arguments(batch) | {"use_cache": True})
    assert out.past_key_values.get_seq_length() == len(batch)
    assert decoder_layer.runs[FUSED_LAYER] == before and "part by part: it was given" in caplog.text


def test_layers_made_again_leave_a_cache_out_as_the_class_does():
    """It would be filled a second time when they are."""
    model = families.build("llama").double()
    batch = families.documents_batch()
    expected = families.states_and_gradients(model, batch)
    fused(model).train()
    enable_gradient_checkpointing(model, whole_layers=True)
    decoder = model.get_decoder()
    cache = DynamicCache(config=model.config)
    name = next(
        name for name in CACHES if name in inspect.signature(type(decoder).forward).parameters
    )
    decoder.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {name: cache}), with_kwargs=True
    )
    with PresentedModel(
        model, packed=True, head_is_read=False
    ).attending_documents():  # when they are made again, too
        got = families.states_and_gradients(model, batch)
    families.assert_same(expected, got)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", ["cohere", "gpt2", "phi"])
def test_other_layers_keep_their_parts(family):
    report = patch_parts(families.build(family), whole_layers=True)
    assert FUSED_LAYER not in report.counts() and report.mentions("decoder layer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (
            "q * factors[:, None, None].to(q.dtype)",
            "q * 1.01 * factors[:, None, None].to(q.dtype)",
            "attention half",
        ),
        (
            'beta and tokens.longest > rope["original_max_position_embeddings"]',
            'False and tokens.longest > rope["original_max_position_embeddings"]',
            "attention half",
        ),
        ("attention.scaling", "1.01 * attention.scaling", "attention half"),
        (
            "x, self._norm_after(branch)",
            "2 * x, self._norm_after(branch)",
            "MLP half",
        ),
        (
            "glu_of_both(both, activation, padding, self.first.padding, amax, gradient_amax)",
            (
                'glu_of_both(both, activation.replace("silu", "gelu"), padding, '
                "self.first.padding, amax, gradient_amax)"
            ),
            "MLP half",
        ),
    ],
)
def test_a_wrong_half_is_not_taken(old, new, kept, planned_with):
    """The proof on the twin refuses it, and takes the other."""
    wrong = mutant(halves, old, new)
    names = ("AttentionHalf", "MLPHalf", "FusedHalf")
    planned_with(decoder_layer, **{name: getattr(wrong, name) for name in names})
    found = plan.plan_for(families.build("ministral3"))
    by = decoder_layer.FUSED_MLP if kept == "attention half" else decoder_layer.FUSED_ATTENTION
    assert {form.by for form in found.layers.values()} == {by} and found.reasons == {
        kept: plan.DISAGREES
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x.unsqueeze(0)", "2 * x.unsqueeze(0)"),
        ("x, branch = mlp(x, branch, request)", "_, branch = mlp(x, branch, request)"),
    ],
)
def test_halves_that_are_wrong_together_are_not_taken(old, new, planned_with):
    planned_with(plan, decoder_layer=mutant(decoder_layer, old, new))
    assert not any(
        form.by == FUSED_LAYER
        for form in plan.plan_for(families.build("ministral3")).layers.values()
    )
