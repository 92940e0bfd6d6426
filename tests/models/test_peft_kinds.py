"""Adapters of PEFT's other kinds in runs: trained through PEFT's own modules, packed, saved as
PEFT saves them.
"""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file

import families
import runs
import tiny
from chronicals.models import load_model, present, within_adapters
from chronicals.models.peft_kinds import BY_TOKEN, REFUSED, kinds
from chronicals.patching import patch_model, unpatch_model
from comparison import equal

peft = pytest.importorskip("peft")

BOTH = ["q_proj", "down_proj"]
TOKENS = [1, 5, 9, 40]
KINDS = {
    "VERA": lambda: peft.VeraConfig(r=8, target_modules=["o_proj", "down_proj"], d_initial=0.5),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=BOTH),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=BOTH),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LOHA": lambda: peft.LoHaConfig(r=4, target_modules=BOTH),
    "LOKR": lambda: peft.LoKrConfig(r=4, target_modules=BOTH),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=BOTH),
    "FOURIERFT": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=BOTH),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "RANDLORA": lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"]),
    "SHIRA": lambda: peft.ShiraConfig(r=4, target_modules=BOTH),
    "ROAD": lambda: peft.RoadConfig(target_modules=BOTH),
    "MISS": lambda: peft.MissConfig(r=4, target_modules=BOTH),
    "VBLORA": lambda: peft.VBLoRAConfig(num_vectors=8, vector_length=4, target_modules=BOTH),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(token_indices=TOKENS),
}
FOUR = ["VERA", "OFT", "IA3", "LOHA"]
FIELDS = {
    "learning_rate": 2e-2,
    "warmup_steps": 1,
    "trackers": [],
    "lr_scheduler": "constant",
    "max_steps": 12,
}


def wrapped(kind, model=None):
    config = KINDS[kind]()
    config.task_type = "CAUSAL_LM"
    return peft.get_peft_model(model or tiny.llama(), config)


def shaken(model):
    """As if it had been trained: many kinds begin with nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def logits(model, ids):
    device = model.get_input_embeddings().weight.device
    return model.eval()(input_ids=ids.to(device)).logits.float().cpu()


def test_the_table_is_of_those_that_are_tested():
    assert set(KINDS) | {"LORA"} == BY_TOKEN and not BY_TOKEN & set(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", FOUR)
def test_it_trains_and_is_saved_as_pefts(tmp_path, kind, precision, caplog):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    tiny.llama().save_pretrained(tmp_path / "base")
    model = wrapped(kind, load_model(tmp_path / "base", dtype))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    with caplog.at_level("INFO"):
        runs.train(tmp_path, model=model, mixed_precision=precision, **FIELDS)
    trajectory = runs.trajectory(tmp_path)
    losses = [loss for _, loss, _ in trajectory]
    norms = [norm for *_, norm in trajectory]
    assert sum(losses[-6:]) < sum(losses[:6]) and min(norms) > 0
    assert caplog.text.count(f"PEFT's {kind} runs through PEFT's own modules") == 1
    assert "padded rows" not in caplog.text
    assert all(equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    folder = tmp_path / "run" / "model"
    ids = torch.randint(0, 300, (2, 9))
    again = peft.PeftModel.from_pretrained(load_model(tmp_path / "base", dtype), folder)
    again.to(model.get_input_embeddings().weight.device)
    if torch.cuda.is_available():  # the trained model has fused kernels there
        live = logits(model, ids)
        bound = 2e-2 if precision == "bf16" else 1e-4
        assert (logits(again, ids) - live).norm() <= bound * live.norm()
    else:
        assert equal(logits(again, ids), logits(model, ids))
    assert not equal(logits(again, ids), logits(load_model(tmp_path / "base", dtype), ids))
    stored = load_file(folder / "adapter_model.safetensors")
    assert all(
        tensor.dtype == torch.float32 for tensor in stored.values() if tensor.is_floating_point()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_separate(kind):
    """Looked through: the same states and gradients as of each document alone."""
    model = shaken(wrapped(kind)).double()
    assert within_adapters(model) is model.get_base_model() and kinds(model) == [kind]
    presented = present(model)
    assert presented.packed and presented.model is model.get_base_model()
    batch = families.documents_batch()
    batch = dataclasses.replace(batch, input_ids=batch.input_ids % 300)
    batch.input_ids[: len(TOKENS)] = torch.tensor(TOKENS)
    trained = [p for p in model.parameters() if p.requires_grad]
    with presented.attending_documents():
        states = presented.hidden_states(batch)
    bounds = batch.cu_seqlens.tolist()
    pieces = [batch.input_ids[a:b][None] for a, b in zip(bounds, bounds[1:]) if b > a]
    alone = torch.cat(
        [
            model.get_base_model().get_decoder()(input_ids=x, use_cache=False).last_hidden_state[0]
            for x in pieces
        ]
    )
    upstream = torch.randn_like(alone)
    for got, due in zip(
        *([x, *torch.autograd.grad((x * upstream).sum(), trained)] for x in (states, alone)),
        strict=True,
    ):
        assert due.any() and torch.allclose(
            got, due, rtol=1e-4, atol=1e-4 * float(due.detach().abs().max())
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_stays_right(kind):
    """Kernels in the plain parts, none in the place of an adapter; undone afterwards."""
    from interpreted import kernels_run

    model = shaken(wrapped(kind)).train()
    ids = torch.randint(0, 300, (2, 9))

    def run():
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        return [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]

    expected = run()
    with kernels_run():
        patch_model(model)
        got = run()
        unpatch_model(model)
    for one, due in zip(got, expected, strict=True):
        assert torch.allclose(one, due, rtol=1e-3, atol=1e-4 * float(due.detach().abs().max()))
    assert all(equal(one, due) for one, due in zip(run(), expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["VERA", "OFT"])
def test_resumed_it_ends_bit_equal(tmp_path, kind):
    tiny.llama().save_pretrained(tmp_path / "base")

    def train(folder, **more):
        torch.manual_seed(3)
        model = wrapped(kind, load_model(tmp_path / "base", torch.float32))
        runs.train(folder, model=model, save_steps=3, **{**FIELDS, "max_steps": 6}, **more)

    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    train(whole)
    shutil.copytree(
        whole / "run/checkpoints/step-00000003", broken / "run/checkpoints/step-00000003"
    )
    train(broken, resume=True)
    once, twice = (runs.weights(folder) for folder in (whole, broken))
    assert once.keys() == twice.keys() and all(equal(once[name], twice[name]) for name in once)


CANNOT = {
    "AdaLoRA": (
        lambda: peft.AdaLoraConfig(target_modules=BOTH, total_step=10),
        "PEFT's ADALORA adds a term.*take LoRA",
    ),
    "Poly": (
        lambda: peft.PolyConfig(r=4, target_modules=BOTH),
        "PEFT's POLY needs to be told the task.*take LoRA",
    ),
    "prompt tuning": (
        lambda: peft.PromptTuningConfig(num_virtual_tokens=4),
        "learns a prompt, .*fits no pack; take LoRA",
    ),
    "prefix tuning": (
        lambda: peft.PrefixTuningConfig(num_virtual_tokens=4),
        "learns a prompt, .*fits no pack; take LoRA",
    ),
    "P-tuning": (
        lambda: peft.PromptEncoderConfig(num_virtual_tokens=4),
        "learns a prompt, .*fits no pack; take LoRA",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path, case):
    build, message = CANNOT[case]
    config = build()
    config.task_type = "CAUSAL_LM"
    with pytest.raises(ValueError, match=message):
        runs.train(tmp_path, model=peft.get_peft_model(tiny.llama(), config), **FIELDS)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_a_kind_that_attends_goes_through_the_wrapping(tmp_path, caplog):
    """Its layers see other tokens: padded rows, said once, and right."""
    model = peft.get_peft_model(
        tiny.llama(),
        peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
    )
    assert within_adapters(model) is model
    runs.train(tmp_path, model=model, **FIELDS)
    assert (
        "in padded rows" in caplog.text and min(norm for *_, norm in runs.trajectory(tmp_path)) > 0
    )
