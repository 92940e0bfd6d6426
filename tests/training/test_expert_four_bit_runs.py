"""Runs over mixtures whose experts are in 4 bits, from reading to merging: they train what LoRA
trains over the weights that the codes stand for."""

import json
import logging

import pytest
import torch
from torch import nn

import families
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.export.merge import merge
from chronicals.generation import load_trained
from chronicals.lora import LoRAConfig, adapters, apply_lora
from chronicals.lora.parameter_layer import LoRAParameter
from chronicals.models import (
    load_model,
    missing_for_bitsandbytes,
    present,
    quantise_experts,
    quantise_layers,
    reading_quantiser,
)
from chronicals.policies import Facts, decide
from chronicals.quantization import Experts4bit, Linear4bit
from chronicals.saving import SavedModel
from chronicals.training.loading import load_to_train
from chronicals.verification import reference, verify
from comparison import equal, equal_but_for_means

FITTING = {"vocab_size": 300, "max_position_embeddings": 512}
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FEW = {
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
}
OTHERS = {
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 4, **LATENT, **FEW},
    ),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8, **FEW}),
}
"""Of families that store a matrix an expert: with shared experts, and with a first layer that
has none.
"""


def mixture(name, **changes):
    import transformers

    if name == "native":
        import mixtures

        return mixtures.mixture(random=True, **changes).train()
    if name in families.MIXTURES:
        return families.mixture(name, **changes)
    family, sizes = OTHERS[name]
    config = getattr(transformers, f"{family}Config")(**{**families.SIZES, **sizes, **changes})
    return families.randomise(getattr(transformers, f"{family}ForCausalLM")(config).float().eval())


def base(folder, name="qwen3_moe", dtype=torch.float32, **changes):
    """A saved model in several shards, which divide experts."""
    mixture(name, **{**FITTING, **changes}).to(dtype).save_pretrained(
        folder / "base", max_shard_size="60KB"
    )
    tiny.tokenizer().save_pretrained(folder / "base")
    return folder / "base"


def packed_experts(model):
    return {
        path: module for path, module in model.named_modules() if isinstance(module, Experts4bit)
    }


def dequantised(model):
    """The plain model that a model in 4 bits stands for."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, (Linear4bit, Experts4bit)):
            model.set_submodule(path, layer.plain())
    return model


# --- reading
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*families.MIXTURES, *OTHERS, "native"])
def test_what_is_quantised_while_it_is_read_is_what_is_quantised_afterwards(
    tmp_path, name, dtype, caplog
):
    caplog.set_level(logging.INFO)
    place = base(tmp_path, name, dtype)
    read = load_model(place, dtype, quantization="nf4")
    after = load_model(place, dtype)
    plain = load_model(place, dtype)
    layers = len(packed_experts(read))
    assert (
        f"and the experts of {layers} layers in NF4" in caplog.text
        and "stay in 16 bit" not in caplog.text
    )
    dense = sum(p.numel() for p in read.parameters() if p.is_floating_point())
    assert (
        f" {100 * (1 - dense / sum(p.numel() for p in plain.parameters())):.1f} % of the weights"
        in caplog.text
    )
    assert (
        quantise_experts(after)
        == layers
        == sum(key.endswith(".experts.down_proj") for key, _ in plain.named_parameters())
    )
    quantise_layers(after)
    if (
        torch.cuda.is_available()
    ):  # the mean of the scales is summed in another order there, where both are quantised then
        read = read.cuda()
        after = after.cuda()
    ours = read.state_dict()
    theirs = after.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(equal_but_for_means(x, theirs[key]) for key, x in ours.items())
    stacks = [
        p
        for key, p in read.named_parameters()
        if key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    assert len(stacks) == 2 * layers and all(p.dtype == torch.uint8 for p in stacks)
    routers = [
        key
        for key, p in plain.named_parameters()
        if key.rpartition(".")[0].endswith((".gate", ".router", "_gate"))
    ]
    assert len(routers) >= layers and all(
        equal(ours[key].cpu(), plain.state_dict()[key]) for key in routers
    )
    shared = [
        m for path, m in read.named_modules() if "shared_expert" in path and path.endswith("_proj")
    ]
    assert all(type(module) is Linear4bit for module in shared)
    assert bool(shared) == (name in ("native", "qwen2_moe", "deepseek_v3", "glm4_moe"))
    assert read.config.to_dict() == plain.config.to_dict() and not getattr(
        read, "is_quantized", False
    )
    assert read(torch.arange(2, 14)[None].to(read.device)).logits.isfinite().all()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_no_stack_waits_for_another_while_they_are_read(tmp_path, name, monkeypatch):
    """Dense values of stacks, read or made of what was read, while one is quantised: its own."""
    place = base(tmp_path, name)
    keep = reading_quantiser.Stacks.take
    waiting = []

    def counting(stacks, model, own, stack):
        there = [
            m
            for m in model.modules()
            if len([p for p in m.parameters(recurse=False) if p.ndim == 3]) > 0
        ]
        waiting.append(
            sum(
                p.device.type != "meta"
                for m in there
                for p in m.parameters(recurse=False)
                if p.ndim == 3
            )
        )
        return keep(stacks, model, own, stack)

    monkeypatch.setattr(reading_quantiser.Stacks, "take", counting)
    load_model(place, torch.float32, quantization="nf4")
    assert waiting == [0] * 4


@pytest.mark.slow
def test_the_bytes_that_live_while_it_is_read(tmp_path):
    """More layers take their codes more, and no stack in 16 or 32 bit more."""
    from memory_of_reading import most_bytes

    peaks = []
    codes = []
    for layers in (2, 6):
        place = base(
            tmp_path / str(layers),
            num_hidden_layers=layers,
            hidden_size=64,
            moe_intermediate_size=64,
            num_experts=16,
        )
        peak, model = most_bytes(
            lambda place=place: load_model(place, torch.float32, quantization="nf4")
        )
        peaks.append(peak)
        codes.append(sum(module.bytes for module in packed_experts(model).values()))
        stack = 4 * 16 * 128 * 64
    assert peaks[1] - peaks[0] < 2.5 * (codes[1] - codes[0]) < 2 * stack


def test_experts_of_another_shape_are_named(tmp_path):
    place = base(tmp_path)
    described = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**described, "moe_intermediate_size": 16}))
    with pytest.raises(ValueError, match=r"experts\..*of another shape than config.json says"):
        load_model(place, torch.float32, quantization="nf4")


def test_experts_of_another_kind_stay_and_are_named(tmp_path, caplog):
    from transformers import JetMoeConfig, JetMoeForCausalLM

    sizes = {**families.SIZES, "kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 4}
    JetMoeForCausalLM(JetMoeConfig(**sizes)).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, quantization="nf4")
    assert "these experts stay in 16 bit" in caplog.text and "JetMoeParallelExperts" in caplog.text
    assert not packed_experts(model)
    assert type(model.model.layers[0].mlp.router.layer) is nn.Linear, (
        "a router, though it is a linear layer of another name"
    )


# --- training
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [None, ON_EXPERTS], ids=["frozen", "adapted"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_run_is_that_of_adapters_over_the_dequantised_weights(tmp_path, name, parameters, caplog):
    """And that over experts that were quantised in memory: bit by bit, on a card up to the order
    of sums.
    """
    place = base(tmp_path, name)
    given = {
        "lora_rank": 4,
        "lora_dropout": 0.0,
        "lora_target_modules": "q_proj,o_proj",
        "max_steps": 4,
    }
    given |= {"lora_target_parameters": parameters, "trackers": [], "save_steps": None}
    caplog.set_level(logging.INFO)
    runs.train(
        tmp_path / "ours",
        model=load_model(place, torch.float32, quantization="nf4"),
        quantization="nf4",
        **given,
    )
    assert (
        "experts have no adapters and stay frozen: model.layers.0.mlp.experts" in caplog.text
    ) == (parameters is None)
    later = load_model(place, torch.float32)
    quantise_experts(later)
    runs.train(tmp_path / "later", model=later, quantization="nf4", **given)
    plain = dequantised(load_model(place, torch.float32, quantization="nf4"))
    runs.train(tmp_path / "plain", model=plain, use_lora=True, **given)
    runs.train(tmp_path / "sixteen", model=load_model(place, torch.float32), use_lora=True, **given)
    ours, later, expected, other = (
        runs.trajectory(tmp_path / kind) for kind in ("ours", "later", "plain", "sixteen")
    )
    if torch.cuda.is_available():
        # The grouped products of a card add up in another order for tensors that lie otherwise in
        # memory.
        for (_, *one), (_, *two) in zip(ours, later, strict=True):
            assert one == pytest.approx(two, rel=1e-5)
    else:
        assert ours == later
    for (step, *one), (_, *two) in zip(ours, expected, strict=True):
        assert one == pytest.approx(two, rel=1e-5 if step == 1 else 2e-4), step
    assert abs(ours[0][1] - other[0][1]) > 20 * abs(ours[0][1] - expected[0][1]), (
        "4 bits make a difference"
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute_layers"])
def test_what_saves_memory_changes_no_step(tmp_path, policy):
    place = base(tmp_path)
    for kind, changes in (("plain", {}), ("saving", {"memory": [policy]})):
        model = load_model(place, torch.float32, quantization="nf4")
        given = {"lora_target_parameters": ON_EXPERTS, "lora_target_modules": "q_proj"}
        runs.train(
            tmp_path / kind,
            model=model,
            quantization="nf4",
            max_steps=3,
            lora_dropout=0.0,
            **given,
            **changes,
        )
    runs.assert_same_steps(tmp_path / "saving", tmp_path / "plain", 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [None, ON_EXPERTS], ids=["frozen", "adapted"])
def test_it_resumes_bit_by_bit(tmp_path, parameters):
    place = base(tmp_path)

    def train(name, steps, **changes):
        model = load_model(place, torch.float32, quantization="nf4")
        given = {
            "save_steps": 2,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "lora_target_parameters": parameters,
        }
        return runs.train(
            tmp_path / name, model=model, quantization="nf4", max_steps=steps, **given, **changes
        )

    train("whole", 4), train("parts", 2), train("parts", 4, resume=True)
    assert runs.trajectory(tmp_path / "parts") == runs.trajectory(tmp_path / "whole")
    whole, parts = (runs.weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(equal(x, parts[name]) for name, x in whole.items())


# --- afterwards
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters", [None, ON_EXPERTS, ON_EXPERTS[:1]], ids=["frozen", "adapted", "first adapted"]
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "native"])
def test_what_was_trained_is_loaded_and_merged_over_the_same_base(tmp_path, name, parameters):
    """Also where the run was in bf16, of weights that are stored in fp32; experts without an
    adapter are those of the base.
    """
    place = base(tmp_path, name)
    given = {
        "quantization": "nf4",
        "mixed_precision": "bf16",
        "lora_target_modules": "o_proj",
        "lora_dropout": 0.0,
    }
    model = load_model(place, torch.bfloat16, quantization="nf4")
    given |= {"lora_target_parameters": parameters, "max_steps": 3, "learning_rate": 1e-2}
    result = runs.train(tmp_path, model=model, use_lora_plus=False, **given)
    saved = SavedModel.find(result.model_dir)
    loaded = saved.model(torch.float32)
    codes = {key: x for key, x in loaded.named_parameters() if x.dtype == torch.uint8}
    assert any("experts" in key for key in codes)
    assert all(equal(x.cpu(), model.get_parameter(key).cpu()) for key, x in codes.items())
    merge(result.model_dir, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", torch.float32)
    seen = saved.model(torch.bfloat16)
    around = {
        (path.replace(".base_layer", ""), layer.parameter_name): layer
        for path, layer in adapters(seen)
        if isinstance(layer, LoRAParameter)
    }
    assert len(around) == len(parameters or ()) * len(packed_experts(seen))
    for path, experts in packed_experts(seen).items():
        path = path.replace(".base_layer", "")
        for own in experts.stacked:
            expected = experts.stack(own).dense().float()
            if (layer := around.get((path, own))) is not None:
                down, up, scale = layer.factors(torch.float32)
                update = scale * (up @ down)
                expected = expected + (update.mT if name == "gpt_oss" else update)
            got = merged.get_parameter(f"{path}.{own}")
            on_card = (
                torch.cuda.is_available()
            )  # which quantises what is read, and sums the mean of scales in another order
            assert torch.allclose(got, expected, *((1e-2, 1e-3) if on_card else (1e-6, 1e-7))), (
                path,
                own,
            )
            assert layer is not None or on_card or equal(got, expected)
    assert packed_experts(load_trained(result.model_dir).model)
    unloaded = saved.model(torch.float32).merge_and_unload()
    ids = torch.arange(2, 20)[None]
    assert not packed_experts(unloaded)
    expected = saved.model(torch.float32)(ids).logits
    assert torch.allclose(unloaded(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_peft_loads_the_adapter_over_the_dequantised_base(tmp_path):
    peft = pytest.importorskip(
        "peft", minversion="0.20", reason="PEFT 0.19 loads no adapter over experts"
    )
    place = base(tmp_path)
    given = {
        "quantization": "nf4",
        "lora_target_modules": "q_proj",
        "lora_target_parameters": ON_EXPERTS,
        "max_steps": 3,
    }
    model = load_model(place, torch.float32, quantization="nf4")
    result = runs.train(tmp_path, model=model, learning_rate=1e-2, **given)
    plain = dequantised(load_model(place, torch.float32, quantization="nf4"))
    other = peft.PeftModel.from_pretrained(plain, result.model_dir).eval()
    ids = torch.arange(2, 20)[None]
    got = model.cpu().eval()(ids).logits
    assert torch.allclose(other(ids).logits, got, rtol=1e-4, atol=1e-5)


def test_a_model_with_experts_in_4_bits_is_not_written_whole(tmp_path):
    from chronicals.saving import save_model

    model = load_model(base(tmp_path), torch.float32, quantization="nf4")
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.experts: its experts are in 4 bits.*save its adapters"
    ):
        save_model(tmp_path / "whole", model, {}, {})


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [None, ON_EXPERTS], ids=["frozen", "adapted"])
def test_verify_compares_with_the_dequantised_model(tmp_path, monkeypatch, parameters):
    """And with bitsandbytes' layers beside these experts, where PEFT adapts what the run does."""
    place = base(tmp_path, hidden_size=64, head_dim=16)
    right = reference.weights_of_experts
    fields = {"quantization": "nf4", "lora_rank": 4, "lora_target_modules": "q_proj,o_proj"}
    given = runs.config(tmp_path, **fields, lora_target_parameters=parameters), tiny.chat_rows()
    found = verify(load_model(place, torch.float32, quantization="nf4"), tiny.tokenizer(), *given)
    assert found.passed, found.failures
    assert found.bitsandbytes is not None or parameters or missing_for_bitsandbytes(), found.notes
    wrong = lambda *of: {key: x * 1.05 for key, x in right(*of).items()}  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(reference, "weights_of_experts", wrong)
        assert not verify(
            load_model(place, torch.float32, quantization="nf4"), tiny.tokenizer(), *given
        ).passed
    if found.bitsandbytes is not None:
        model = load_model(place, torch.float32, quantization="nf4")
        next(iter(packed_experts(model).values())).down_proj.data.random_(0, 255)
        found = verify(model, tiny.tokenizer(), *given)
        assert any(
            "experts.down_proj: the weight of transformers + bitsandbytes" in failure
            for failure in found.failures
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "gpt_oss"])
def test_the_command_takes_nothing_else(tmp_path, chronicals, caplog, name):
    """Trained, asked, scored, merged; and the next run over the adapter has the same base."""
    base(tmp_path, name)
    model = ["--model", "base", "--load-in-4bit", "--lora-target-modules", "q_proj,k_proj"]
    model += ["--lora-target-parameters", "mlp.experts.down_proj"]
    said = chronicals("train", *model, "--data", "data.jsonl", "--output-dir", "out", *runs.SHORT)
    assert (
        "8 linear layers in nf4 in blocks of 64 and the experts of 2 layers in nf4 in blocks of "
        "64, dequantised" in said
    )
    caplog.clear()
    (
        chronicals("evaluate", "out", "--data", "data.jsonl"),
        chronicals("generate", "out", "--prompt", "what is 3?"),
    )
    chronicals("merge", "out", "--output", "merged")
    said = chronicals(
        "train", "--model", "out", "--data", "data.jsonl", "--output-dir", "on", *runs.SHORT
    )
    assert "the experts of 2 layers in nf4" in said
    first = load_model("merged", torch.float32).get_decoder().layers[0].mlp.experts
    seen = packed_experts(SavedModel.find("out").model(torch.bfloat16))[
        "model.layers.0.mlp.experts.base_layer"
    ]
    assert torch.allclose(
        first.gate_up_proj, seen.stack("gate_up_proj").dense().float(), rtol=1e-2, atol=1e-3
    )


# --- what is asked
# -----------------------------------------------------------------------------------------------------


def test_a_model_with_experts_in_4_bits_is_not_trained_whole(tmp_path):
    model = load_model(base(tmp_path), torch.float32)
    quantise_experts(model)
    with pytest.raises(
        ConfigurationError, match="quantised and cannot be trained; set use_lora=True"
    ):
        runs.train(tmp_path, model=model)


def test_experts_with_adapters_are_not_quantised_beneath_them(tmp_path):
    model = load_model(base(tmp_path), torch.float32)
    apply_lora(model, LoRAConfig(2, 4, 0.0, ["q_proj"], target_parameters=ON_EXPERTS))
    with pytest.raises(
        ConfigurationError, match="has adapters; quantise experts before they are attached"
    ):
        runs.train(tmp_path, model=model, quantization="nf4")


def test_divided_weights_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    from chronicals.distributed import Mesh
    from chronicals.training import loading

    saved = SavedModel.find(base(tmp_path))
    monkeypatch.setattr(loading, "load_replacing", None)
    monkeypatch.setattr(Mesh, "gather_values", lambda self, value: [value] * self.count)
    said = r"sharding='weights': .*experts in 4 bits.*quantization.*sharding='optimizer'"
    with pytest.raises(ConfigurationError, match=said):
        load_to_train(
            saved, runs.config(tmp_path, quantization="nf4", sharding="weights"), Mesh(count=2)
        )


def test_the_log_says_it_and_the_estimate_counts_4_bits(tmp_path):
    from chronicals.memory import StepShape, WeightBytes, estimate

    config = runs.config(tmp_path, quantization="nf4")
    model = mixture("qwen3_moe", **FITTING)
    sixteen = estimate(model, StepShape(64, False, 2, 16), WeightBytes(2, 12))
    quantise_layers(model)
    model.requires_grad_(False)
    made = decide(Facts.of(config, present(model, False, False, pack_width=128)))["quantization"]
    assert made.runs and "the experts of 2 layers" in made.reason
    four = estimate(model, StepShape(64, False, 2, 16), WeightBytes(2, 12))
    kinds = {Linear4bit: lambda m: m.in_features * m.out_features, Experts4bit: lambda m: m.values}
    layers = [m for m in model.modules() if type(m) in kinds]
    values = sum(kinds[type(m)](m) for m in layers)
    packed = sum(m.packed.bytes if isinstance(m, Linear4bit) else m.bytes for m in layers)
    others = 2 * sum(p.numel() for p in model.parameters() if p.is_floating_point())
    codes = 1100 * (8 + 4)  # what the codes of scales stand for, of each weight
    assert (
        packed + others + values + 16 * 300 * 2
        <= four.fixed
        <= packed + others + values + 16 * 300 * 2 + codes
    )
    assert four.fixed < sixteen.fixed and isinstance(model.lm_head, nn.Linear)
