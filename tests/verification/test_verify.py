"""A run beside plain transformers: healthy runs pass at the default thresholds, planted faults
fail.
"""

import dataclasses
import re
import sys
import time

import pytest
import torch
import transformers

import families
import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data.packs.step_memory import StepMemory
from chronicals.lora import LoRAConfig, apply_lora, parameter_layer
from chronicals.lora.layers import LoRAEmbedding
from chronicals.models import present
from chronicals.optimizers import SCHEDULES, learning_rate_factor
from chronicals.patching import patch_model
from chronicals.policies import facts
from chronicals.training.run import length
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.step import training_step
from chronicals.verification import verify
from chronicals.verification.reference import scheduled_rates

SESSION = "chronicals.training.session"
LORA = {"use_lora": True, "lora_rank": 8}
UNEQUAL = {
    "lora_layers": "1",
    "lora_rank_pattern": {"down_proj": 3},
    "lora_alpha_pattern": {r".*self_attn\.[qk]_proj": 4},
}
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GPT2_LORA = {**LORA, "lora_target_modules": ["c_attn", "c_proj", "c_fc"]}
UNEVEN = {"use_sequence_packing": False}
"""A document a micro-batch, so that their counts differ."""

EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
    },
    "Qwen3Moe": {"moe_intermediate_size": 48, "num_experts": 4, "head_dim": 16},
}


def build(family, seed):
    """As a user would load it: initialised, norms of one."""
    if family == "llama":
        return tiny.llama(seed)
    torch.manual_seed(seed)
    if family not in EXPERTS:
        return families.build(family, random=False, vocab_size=300, max_position_embeddings=512)
    sizes = {
        **families.SIZES,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 300,
        "max_position_embeddings": 512,
    }
    config = getattr(transformers, f"{family}Config")(
        **{**sizes, "num_experts_per_tok": 2, **EXPERTS[family]}
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def compare(folder, model, **changes):
    given = {"learning_rate": 2e-4, "batch_size": 1, **changes}
    return verify(model, tiny.tokenizer(), runs.config(folder, **given), tiny.chat_rows())


IN_BACKWARD = {
    "memory": ["recompute_layers", "tiled_mlp", "optimizer_in_backward"],
    "max_grad_norm": float("inf"),
    "gradient_accumulation_steps": 1,
}
HEALTHY = [
    ("llama", {"mixed_precision": "fp32"}),
    ("llama", {"mixed_precision": "fp32", **LORA, "gradient_accumulation_steps": 1}),
    ("llama", {"mixed_precision": "bf16"}),
    ("llama", {"mixed_precision": "bf16", **LORA}),
    ("llama", {"mixed_precision": "bf16", "use_sequence_packing": False, "batch_size": 8}),
    (
        "llama",
        {
            "mixed_precision": "bf16",
            **LORA,
            "use_gradient_checkpointing": True,
            "lora_dropout": 0.3,
        },
    ),
    ("llama", {"mixed_precision": "bf16", **IN_BACKWARD}),
    (
        "llama",
        {
            "mixed_precision": "bf16",
            "use_fused_kernels": False,
            "max_grad_norm": 0.1,
            "weight_decay": 0.1,
        },
    ),
    ("qwen2", {"mixed_precision": "bf16", "gradient_accumulation_steps": 1, "batch_size": 4}),
    ("qwen2", {"mixed_precision": "fp32", **LORA, "use_sequence_packing": False}),
    (
        "qwen2",
        {
            "mixed_precision": "bf16",
            **LORA,
            "use_rslora": True,
            "lora_target_modules": ["q_proj", "v_proj", "lm_head"],
        },
    ),
    ("qwen2", {"mixed_precision": "fp32", **LORA, "use_dora": True}),
    ("qwen3", {"mixed_precision": "bf16"}),
    (
        "qwen3",
        {
            "mixed_precision": "bf16",
            **LORA,
            "use_lora_plus": False,
            "lora_target_modules": r".*(up|down)_proj",
        },
    ),
    ("qwen3", {"mixed_precision": "fp32", **LORA, **UNEQUAL}),
    ("llama", {"mixed_precision": "bf16", **LORA, "lora_init": "pissa"}),
    (
        "llama",
        {"mixed_precision": "bf16", **LORA, "lora_modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    ("gemma2", {"mixed_precision": "bf16"}),
    ("gemma3", {"mixed_precision": "fp32"}),
    ("gemma3", {"mixed_precision": "bf16", **LORA}),
    ("gpt2", {"mixed_precision": "bf16", **GPT2_LORA}),
    ("gpt2", {"mixed_precision": "bf16", **GPT2_LORA, "use_dora": True}),
    ("mamba", {"mixed_precision": "bf16"}),
    ("mamba", {"mixed_precision": "fp32", **LORA}),
    ("mamba", {"mixed_precision": "bf16", **LORA, "use_dora": True}),
    ("Mixtral", {"mixed_precision": "fp32", "gradient_accumulation_steps": 1}),
    ("Qwen2Moe", {"mixed_precision": "bf16", **LORA}),
    ("Qwen3Moe", {"mixed_precision": "fp32", **LORA, "lora_target_parameters": STACKED}),
    (
        "Mixtral",
        {
            "mixed_precision": "bf16",
            **LORA,
            "lora_target_modules": [],
            "lora_target_parameters": STACKED[1:],
        },
    ),
    (
        "gemma3",
        {"mixed_precision": "bf16", **LORA, "lora_target_modules": ["q_proj", "embed_tokens"]},
    ),
    ("llama", {"mixed_precision": "fp32", **LORA, "lora_target_modules": ["embed_tokens"]}),
    ("Qwen3Moe", {"mixed_precision": "bf16", "batch_size": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, changes", HEALTHY, ids=[f"{n}-{family}" for n, (family, _) in enumerate(HEALTHY)]
)
def test_a_healthy_run_passes(tmp_path, seed, family, changes):
    found = compare(tmp_path, build(family, seed), seed=seed, **changes)
    assert found.passed, found.failures
    assert len(found.losses) == 5 and all(row.deviation >= 0 for row in found.gradients)
    assert len(found.optimizer) == len(found.gradients) and all(
        row.ratio < 0.5 for row in found.optimizer
    )
    for row in found.gradients:
        unused = (
            row.norm_ratio == row.deviation == 0.0
        )  # an expert that no token was sent to has no gradient in any arm
        as_plain = (
            row.plain > 0.1 or row.deviation <= 1.1 * row.plain
        )  # a token that rounding sends to another expert
        assert row.cosine > 0.99 or as_plain or unused, row


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4"
)
@pytest.mark.parametrize("width", [64, 192])
def test_a_model_whose_heads_are_wider_in_some_layers_passes(tmp_path, seed, width):
    """Gemma 4's language model, whose configuration answers what differs by layer with an error;
    of the wider one the twin has smaller sizes."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "vocab_size": 300,
        "num_attention_heads": 4,
    }
    heads = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
    }
    config = transformers.Gemma4TextConfig(
        **sizes,
        **heads,
        hidden_size_per_layer_input=0,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.Gemma4ForCausalLM(config)
    assert present(model, shared_prompts=True).packed
    found = verify(model, tiny.tokenizer(), runs.config(tmp_path, seed=seed), tiny.chat_rows())
    assert found.passed, found.failures


@pytest.mark.slow
def test_a_router_loss_that_the_run_leaves_out_is_in_no_arm(tmp_path, plant):
    """Of a class that balances in another way: the run warns of it, and the arms are alike."""
    from transformers.models.mixtral import modeling_mixtral

    plant(modeling_mixtral, "load_balancing_loss_func", lambda right, *given: 1.1 * right(*given))
    model = build("Mixtral", 0)
    model.config.output_router_logits = True
    model.config.initializer_range = 0.03
    model.router_aux_loss_coef = 1.0
    found = compare(tmp_path, model, mixed_precision="fp32", gradient_accumulation_steps=1)
    assert found.passed, found.failures
    assert any(
        "the router loss (output_router_logits=True) is in no arm: MixtralForCausalLM" in note
        for note in found.notes
    )


@pytest.mark.slow
def test_a_patched_model_passes(tmp_path, seed):
    """The plain arms are of the class, not of the instance with its replaced forwards."""
    model = tiny.llama(seed)
    assert patch_model(model).counts()
    assert compare(tmp_path, model, mixed_precision="bf16", seed=seed).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mixed_precision": "bf16"},
        {**LORA, "lora_dropout": 0.0, "lr_scheduler": "wsd"},
        IN_BACKWARD,
    ],
)
def test_ours_is_the_run_itself(tmp_path, seed, changes):
    """Bit for bit what ``ChronicalsTrainer`` trains."""
    given = {
        "learning_rate": 2e-4,
        "batch_size": 1,
        "max_steps": 5,
        "warmup_steps": 3,
        "seed": seed,
        **changes,
    }
    found = verify(
        tiny.llama(seed), tiny.tokenizer(), runs.config(tmp_path, **given), tiny.chat_rows()
    )
    runs.train(tmp_path, model=tiny.llama(seed), **given)
    trained = [loss for _, loss, _ in runs.trajectory(tmp_path)]
    assert [row.ours for row in found.losses] == pytest.approx(
        trained, rel=1e-5 if torch.cuda.is_available() else 0, abs=0
    )


# --- planted faults
# -----------------------------------------------------------------------------------------------------


def a_wrong_head(plant, model):
    """The hidden states' gradient from the head is a tenth too large."""
    module = sys.modules["chronicals.kernels.linear_cross_entropy"]

    def wrong(right, ctx, upstream):
        hidden, *rest = right(ctx, upstream)
        return hidden * 1.1, *rest

    plant(module._LinearCrossEntropy, "backward", wrong)


def a_wrong_swiglu(plant, model):
    """The gradient of ``up`` lacks a tenth, in the kernel and in its reference."""
    patch_model(model)
    glu = sys.modules["chronicals.kernels.glu"]

    def less(right, gate, up):
        return right(gate, 0.9 * up + (0.1 * up).detach())

    def wrong(right, dy, gate, up, activation, merged, *rest):
        *gradients, amax = right(dy, gate, up, activation, merged, *rest)
        d_up = gradients[0].chunk(2, -1)[1] if merged else gradients[1]
        d_up *= 0.9
        return [*gradients, amax]

    plant(glu.REFERENCES, "silu", less)
    plant(glu, "_backward", wrong)


def a_dropped_bound(plant, model):
    """The first two documents of a Batch are one to the attention."""

    def without_its_first(batch, width):
        bounds = torch.cat((batch.cu_seqlens[:1], batch.cu_seqlens[2:], batch.cu_seqlens[-1:]))
        return dataclasses.replace(batch, cu_seqlens=bounds, max_seqlen=width)

    def wrong(right, self, steps):
        for step in right(self, steps):
            yield [without_its_first(batch, self.sizes.width) for batch in step]

    plant(StepMemory, "batches", wrong)


def a_mean_of_means(plant, model):
    """Every micro-batch is divided by its own count."""
    step = sys.modules["chronicals.training.step.training_step"]
    objective = sys.modules["chronicals.objectives.next_token"].NextToken
    own = {}

    def remember(right, self, presented, batch):
        own["weight"] = 2 * batch.trained
        return right(self, presented, batch)

    plant(objective, "__call__", remember)
    plant(step, "divide", lambda right, terms, _: right(terms, own))


def an_adapter_left_out(plant, model):
    targets = sys.modules["chronicals.lora.targets"]
    plant(targets, "targeted_paths", lambda right, *given, **named: right(*given, **named)[1:])


def a_frozen_expert(plant, model):
    """One of the slices of the experts' weights, the one most tokens were sent to, gets no
    gradient.
    """
    frozen = []

    def without(gradient):
        frozen[:] = frozen or [gradient.flatten(1).norm(dim=1).argmax()]
        return gradient.index_fill(0, frozen[0], 0.0)

    for weight in model.get_submodule("model.layers.1.mlp.experts").parameters():
        weight.register_hook(without)


def frozen_experts(plant, model):

    def wrong(right, model, *given):
        model.get_submodule("model.layers.0.mlp.experts").requires_grad_(False)
        right(model, *given)

    plant(sys.modules[SESSION], "attach_adapters", wrong)


def no_faster_b(plant, model):
    """LoRA+ is asked for, and B learns as slowly as A."""

    def wrong(right, *given):
        optimizer = right(*given)
        for group in optimizer.param_groups:
            group["peak"] = 2e-4
        return optimizer

    plant(sys.modules[SESSION], "build_optimizer", wrong)


def a_weight_that_is_not_updated(plant, model):

    def wrong(right, *given):
        optimizer = right(*given)
        optimizer.param_groups[0]["params"].pop(3)
        return optimizer

    plant(sys.modules[SESSION], "build_optimizer", wrong)


def an_expert_left_out(plant, model):

    def wrong(right, layer, factors, routed, *stacks):
        left = {name: found for name, found in factors.items() if name != "down_proj"}
        return right(layer, left, routed)

    plant(parameter_layer, "adapted_experts", wrong)


def an_unscaled_embedding(plant, model):

    def wrong(right, self, ids):
        bare = self.base_layer(ids)
        return bare + (right(self, ids) - bare) / self.base_layer.embed_scale

    plant(LoRAEmbedding, "forward", wrong)


FAULTS = [
    (a_wrong_head, "llama", {}, "gradient deviates"),
    (a_wrong_swiglu, "llama", {}, "up_proj: gradient deviates"),
    (a_wrong_swiglu, "qwen2", LORA, r"up_proj.lora_B: gradient deviates"),
    (a_dropped_bound, "llama", {}, "q_proj: gradient deviates"),
    (a_dropped_bound, "qwen3", LORA, "gradient deviates"),
    (a_mean_of_means, "llama", UNEVEN, "gradient deviates"),
    (a_mean_of_means, "gemma3", {**LORA, **UNEVEN}, "gradient deviates"),
    (an_adapter_left_out, "llama", LORA, "mlp.down_proj.lora_B: not trained"),
    (a_frozen_expert, "Qwen3Moe", {}, r"layers.1.mlp.experts.\d: gradient is zero"),
    (frozen_experts, "Mixtral", {}, r"layers.0.mlp.experts.*: not trained"),
    (no_faster_b, "llama", LORA, "lora_B: update deviates"),
    (
        an_expert_left_out,
        "Mixtral",
        {**LORA, "lora_target_parameters": STACKED},
        r"mlp.experts.lora_B: gradient",
    ),
    (
        an_unscaled_embedding,
        "gemma3",
        {**LORA, "lora_target_modules": ["embed_tokens"]},
        "embedding_A: gradient deviates",
    ),
    (a_weight_that_is_not_updated, "llama", {}, "update is zero"),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "fault, family, changes, message",
    FAULTS,
    ids=[f"{f.__name__}-{name}" for f, name, *_ in FAULTS],
)
def test_a_planted_fault_fails(tmp_path, plant, seed, fault, family, changes, message, precision):
    model = build(family, seed)
    fault(plant, model)
    found = compare(tmp_path, model, mixed_precision=precision, seed=seed, **changes)
    assert not found.passed
    assert re.search(message, "\n".join(found.failures)), found.failures[:5]


def of_groups(**wrong):
    """Every group of the optimizer has ``wrong`` in the place of what was asked for."""

    def built(right, *given):
        optimizer = right(*given)
        for group in optimizer.param_groups:
            group.update({name: value for name, value in wrong.items() if group[name]})
        return optimizer

    return "build_optimizer", built


NO_CLIPPING = "EagerStep", lambda right, *given: right(*given[:-2], None, given[-1])


ALONE = [
    ("weight_decay-0", of_groups(weight_decay=0.0), {"weight_decay": 0.1}),
    ("weight_decay-10", of_groups(weight_decay=0.1), {"weight_decay": 0.01}),
    (
        "weight_decay-10-warming-up",
        of_groups(weight_decay=0.1),
        {"weight_decay": 0.01, "max_steps": 1000},
    ),
    ("weight_decay-lora", of_groups(weight_decay=0.0), {"weight_decay": 0.1, **LORA}),
    ("beta2", of_groups(betas=(0.9, 0.95)), {}),
    ("beta2-in-backward", of_groups(betas=(0.9, 0.95)), IN_BACKWARD),
    ("eps", of_groups(eps=1e-6), {}),
    ("clipping", NO_CLIPPING, {"max_grad_norm": 0.1}),
    ("clipping-lora", NO_CLIPPING, {"max_grad_norm": 0.1, **LORA}),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "fault, changes", [case[1:] for case in ALONE], ids=[name for name, *_ in ALONE]
)
def test_a_fault_of_the_optimizer_alone_fails_in_every_type(
    tmp_path, plant, seed, fault, changes, precision
):
    plant(sys.modules[SESSION], *fault)
    found = compare(tmp_path, tiny.llama(seed), mixed_precision=precision, seed=seed, **changes)
    assert re.search(r"q_proj.*: optimizer deviates", "\n".join(found.failures)), found.failures[:5]
    assert found.optimizer[0].ratio > 3


def a_constant_rate(*_):
    return 1.0


def no_warmup(schedule, step, total, warmup, *rest):
    return learning_rate_factor(schedule, step, total, 0, *rest)


def an_early_end(schedule, step, total, *rest):
    return learning_rate_factor(schedule, step, total * 3 // 4, *rest)


RATES = [
    (a_constant_rate, {}, "step 1: 1 of its peak, by lr_scheduler='cosine' 0.1$"),
    (no_warmup, {"lr_scheduler": "linear"}, "step 1: 1 of its peak, by lr_scheduler='linear' 0.1$"),
    (
        no_warmup,
        {"lr_scheduler": "constant", "warmup_steps": 3},
        "step 1: 1 of its peak, by lr_scheduler='constant' 0.333333$",
    ),
    (an_early_end, {}, "step 12: 0.999416 of its peak, by lr_scheduler='cosine' 0.999695$"),
    (
        an_early_end,
        {"lr_scheduler": "linear"},
        "step 12: 0.984615 of its peak, by lr_scheduler='linear' 0.988889$",
    ),
    (
        an_early_end,
        {"lr_scheduler": "wsd"},
        "step 62: 0.933333 of its peak, by lr_scheduler='wsd' 1$",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong, changes, message", RATES, ids=[f"{f.__name__}-{n}" for n, (f, *_) in enumerate(RATES)]
)
def test_a_wrong_learning_rate_fails_wherever_it_is_in_the_run(
    tmp_path, monkeypatch, seed, wrong, changes, message
):
    monkeypatch.setattr("chronicals.training.step.training_step.learning_rate_factor", wrong)
    found = compare(tmp_path, tiny.llama(seed), max_steps=100, seed=seed, **changes)
    told = [line for line in found.failures if line.startswith("learning rate")]
    assert len(told) == 1 and re.search(message, told[0]), found.failures


@pytest.mark.parametrize(
    "steps, warmup", [(100, None), (7, 3), (5, 5), (1, None), (13, 12), (1000, 100)]
)
@pytest.mark.parametrize("decay", [0.2, 0.95, 0.001])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_plain_rates_are_those_of_the_run(schedule, decay, steps, warmup):
    given = {} if warmup is None else {"warmup_steps": warmup}
    for from_zero in (False, True):
        config = ChronicalsConfig(
            max_steps=steps,
            lr_scheduler=schedule,
            wsd_decay_ratio=decay,
            min_lr_ratio=0.1,
            warmup_from_zero=from_zero,
            **given,
        )
        warm = warmup or steps // 10
        rates = [
            learning_rate_factor(schedule, n, steps, warm, 0.1, decay, from_zero)
            for n in range(steps)
        ]
        assert scheduled_rates(config, steps) == pytest.approx(rates, rel=0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"lr_scheduler": "wsd", "max_steps": 12},
        {"warmup_steps": 3, "num_epochs": 2},
        {"warmup_steps": 3, "warmup_from_zero": True, "num_epochs": 2},
    ],
)
def test_the_trainer_has_the_plain_rates(tmp_path, changes):
    given = runs.config(tmp_path, **changes)
    runs.train(tmp_path, tiny.chat_rows(40), **changes)
    trained = [
        line["learning_rate"]
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "loss" in line
    ]
    rates = [given.learning_rate * rate for rate in scheduled_rates(given, len(trained))]
    assert len(trained) > 5 and trained == pytest.approx(rates, rel=1e-6)


# --- what it says
# -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_frozen_stays_out(tmp_path, seed):
    model = tiny.llama(seed)
    model.get_input_embeddings().requires_grad_(False)
    found = compare(tmp_path, model, seed=seed)
    assert found.passed and "model.embed_tokens" not in {row.module for row in found.gradients}


@pytest.mark.slow
def test_adapters_that_are_there_already(tmp_path, seed):
    model = apply_lora(tiny.llama(seed), LoRAConfig(4, 8, 0.1, ["q_proj", "down_proj"]))
    found = compare(tmp_path, model, mixed_precision="bf16", seed=seed)
    assert found.passed, found.failures
    assert len(found.gradients) == 8 and any("dropout 0.1" in note for note in found.notes)


@pytest.mark.slow
def test_dropout_is_left_out_of_every_arm_by_name(tmp_path, seed):
    sizes = {
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "resid_pdrop": 0.2,
        "attn_pdrop": 0.1,
    }
    model = families.build("gpt2", random=False, **sizes)
    found = compare(tmp_path, model, seed=seed, **{**GPT2_LORA, "lora_dropout": 0.3})
    assert found.passed and max(row.plain for row in found.gradients) < 1e-5
    for share in ("dropout 0.2", "dropout 0.1", "lora_dropout=0.3"):
        assert any(share in note for note in found.notes), found.notes


@pytest.mark.slow
def test_an_epoch_of_fewer_steps_is_said(tmp_path, seed):
    config = ChronicalsConfig(
        num_epochs=1,
        batch_size=4,
        gradient_accumulation_steps=2,
        max_seq_length=128,
        mixed_precision="fp32",
        use_torch_compile=False,
        cache_dir=tmp_path,
        seed=seed,
    )
    found = verify(tiny.llama(seed), tiny.tokenizer(), config, tiny.chat_rows(30))
    assert found.passed and 0 < len(found.losses) < 5 and "num_epochs=1" in found.notes[0]


@pytest.mark.slow
def test_a_run_of_fewer_steps_is_said(tmp_path, seed, caplog):
    """And nothing of what the user did not set."""
    found = compare(tmp_path, tiny.llama(seed), max_steps=2, use_cuda_graphs=False, seed=seed)
    assert (
        found.passed
        and len(found.losses) == 2
        and found.notes == ["the run has max_steps=2, not 5"]
    )
    assert not any("lora_dropout" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_the_settings_that_fit_takes_are_verified(tmp_path, seed, let_return, monkeypatch):
    """Micro-batches of the run's own size, on a card that the plan says has memory for all packs."""
    let_return(facts, card_memory=1 << 40)
    monkeypatch.setattr(length, "STEPS_AN_EPOCH", 1)  # the default batch stays
    usual = runs.config(tmp_path, fit="settings", learning_rate=2e-4)
    kept = usual.explicit - {"batch_size", "gradient_accumulation_steps"}
    config = ChronicalsConfig(**{name: getattr(usual, name) for name in kept})
    widths = []
    micro = training_step.micro_step

    def seen(model, objective, batch, *given):
        widths.append(len(batch))
        return micro(model, objective, batch, *given)

    monkeypatch.setattr(training_step, "micro_step", seen)
    found = verify(tiny.llama(seed), tiny.tokenizer(), config, tiny.chat_rows(), steps=5)
    taken = found.facts["configuration"]["batch_size"]
    assert taken > config.batch_size and set(widths) == {taken * config.max_seq_length}
    assert found.passed


@pytest.mark.slow
def test_the_figures_are_json(tmp_path, seed):
    import json

    found = json.loads(
        json.dumps(compare(tmp_path, tiny.llama(seed), seed=seed).to_dict(), allow_nan=False)
    )
    assert {row["quantity"] for row in found["optimizer"]} == {"optimizer"}
    assert (
        found["passed"]
        and found["facts"]["versions"]["transformers"]
        and found["facts"]["configuration"]["seed"] == seed
    )


@pytest.mark.parametrize("steps", [4, 21])
def test_steps_out_of_range(tmp_path, steps):
    with pytest.raises(ConfigurationError, match=f"steps={steps}: give 5 to 20"):
        verify(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path), tiny.chat_rows(), steps=steps)


@pytest.mark.slow
def test_weights_have_masters_here(tmp_path):
    found = compare(tmp_path, tiny.llama(), mixed_precision="bf16", master_weights=False)
    assert found.passed and any("master_weights=False is true here" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_optimizer_states_are_fp32_here(tmp_path, precision):
    found = compare(tmp_path, tiny.llama(), mixed_precision=precision, optimizer_state_dtype="bf16")
    assert found.passed, found.failures
    assert "optimizer_state_dtype='bf16' is 'fp32' here: the plain arms round none" in found.notes


@pytest.mark.slow
def test_8_bit_states_are_fp32_here(tmp_path):
    found = compare(tmp_path, tiny.llama(), mixed_precision="fp32", use_8bit_optimizer=True)
    assert found.passed, found.failures
    assert (
        "use_8bit_optimizer=True is False here: the plain arms keep states in fp32" in found.notes
    )


@pytest.mark.slow
def test_rotary_frequencies_that_were_cast_are_named(tmp_path, seed):
    found = compare(tmp_path, tiny.llama(seed).bfloat16(), mixed_precision="bf16", seed=seed)
    assert any("inv_freq is off by" in note for note in found.notes)
    assert not any(
        "inv_freq" in note
        for note in compare(tmp_path / "again", tiny.llama(seed), seed=seed).notes
    )


def test_a_class_without_eager_attention_is_named():
    reference = sys.modules["chronicals.verification.reference"]

    class Stubborn(type(tiny.llama())):
        def __init__(self, config):
            if config._attn_implementation == "eager":
                raise ValueError("no eager attention")
            super().__init__(config)

    with pytest.raises(ConfigurationError, match="Stubborn cannot be made with eager attention"):
        reference._fresh(Stubborn(tiny.llama().config), torch.device("cpu"), usual_attention=False)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {**LORA, "lora_rank": 32}], ids=["full", "lora"])
def test_half_a_billion_parameters_take_less_than_two_minutes(tmp_path, seed, changes):
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(seed)
    shape = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
    lengths = torch.empty(400).log_normal_(6.0, 0.8).clamp(32, 2048).long().tolist()
    rows = [
        {"input_ids": torch.randint(1, shape["vocab_size"], (length,)).tolist()}
        for length in lengths
    ]
    config = ChronicalsConfig(
        batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=100,
        cache_dir=tmp_path,
        seed=seed,
        **changes,
    )
    began = time.monotonic()
    found = verify(model, tiny.tokenizer(), config, rows)
    assert found.passed, found.failures[:10]
    assert time.monotonic() - began < 120
