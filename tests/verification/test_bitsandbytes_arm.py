"""A run over a base in 4 bits beside transformers, bitsandbytes and PEFT."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import runs
import tiny
from chronicals.cli.app import app
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import describe_packed, load_model
from chronicals.quantization import nf4
from chronicals.verification import bitsandbytes_arm, verify
from chronicals.verification.comparison import Beside

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float32}
SHAPE = {"attention_bias": True, "intermediate_size": 128}
"""Widths are multiples of a block: of others bitsandbytes' products are wrong on a CPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("models")
    tiny.llama(**SHAPE).save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    return folder


def compared(folder, tmp_path, model=None, base="base", precision="fp32", **changes):
    given = {
        "learning_rate": 2e-4,
        "lora_rank": 4,
        "mixed_precision": precision,
        "quantization": "nf4",
        **changes,
    }
    model = model or load_model(folder / base, DTYPES[precision], quantization="nf4")
    return verify(model, tiny.tokenizer(), runs.config(tmp_path, **given), tiny.chat_rows())


SHAPES = [
    {},
    {"use_dora": True, "use_rslora": True},
    {
        "lora_rank_pattern": {"q_proj": 3},
        "lora_alpha_pattern": {r".*down_proj": 7},
        "lora_layers": "1",
    },
    {"lora_target_modules": ["q_proj", "v_proj"], "lora_modules_to_save": ["embed_tokens"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SHAPES, ids=["lora", "dora", "unequal", "embedding"])
@pytest.mark.parametrize("precision", DTYPES)
def test_the_same_losses_and_gradients(folder, tmp_path, seed, precision, changes):
    found = compared(folder, tmp_path, precision=precision, seed=seed, **changes)
    assert found.passed, found.failures
    beside = found.bitsandbytes
    eps = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-9}[precision]
    assert isinstance(beside, Beside) and len(beside.losses) == 5
    assert {row.module for row in beside.gradients} == {row.module for row in found.gradients}
    for ours, theirs in zip(found.losses, beside.losses, strict=True):
        assert theirs.fp32 == ours.fp32 and theirs.ours == pytest.approx(ours.ours, rel=eps)
    for row in beside.gradients:
        assert 0 < row.deviation < 3 * eps and row.cosine > 1 - 10 * eps**2 - 1e-6, row


@pytest.mark.slow
def test_a_base_that_is_stored_in_4_bits(folder, tmp_path, seed):
    model = load_model(folder / "base", torch.bfloat16, quantization="nf4")
    describe_packed(model)
    model.save_pretrained(folder / "packed")
    found = compared(folder, tmp_path, base="packed", precision="bf16", seed=seed)
    assert found.passed and found.bitsandbytes, found.failures


@pytest.mark.slow
def test_adapters_that_are_there_already(folder, tmp_path, seed):
    model = load_model(folder / "base", torch.float32, quantization="nf4")
    apply_lora(model, LoRAConfig(3, 8, 0.0, ["q_proj", "down_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    given = runs.config(tmp_path, learning_rate=2e-4, quantization="nf4", seed=seed)
    found = verify(model, tiny.tokenizer(), given, tiny.chat_rows())
    assert found.passed and len(found.bitsandbytes.gradients) == 8, found.failures


@pytest.mark.slow
def test_a_base_quantised_in_another_type_than_that_of_the_run(folder, tmp_path, seed):
    """As that of an adapter which was trained in bf16 and goes on in fp32."""
    model = load_model(folder / "base", torch.bfloat16, quantization="nf4").to(torch.float32)
    found = compared(folder, tmp_path, model, seed=seed)
    assert found.passed and found.bitsandbytes, (found.failures, found.notes)


@pytest.mark.slow
def test_codes_that_are_rounded_otherwise_are_taken_and_told(folder, tmp_path, plant, seed):
    """Without that gradients would differ by more than fp32 rounds."""

    def wrong(right, *given):
        codes, absmax = right(*given)
        absmax.view(-1)[0] *= 1.01
        return codes, absmax

    plant(nf4, "quantize_nf4", wrong)
    found = compared(folder, tmp_path, seed=seed)
    assert found.passed and found.bitsandbytes, found.failures
    assert any(
        "layers have codes or scales that ours round otherwise; it takes ours" in note
        for note in found.notes
    )


# --- planted faults
# -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_that_bitsandbytes_does_not_make_fail(folder, tmp_path, plant, seed):
    """Which no arm of ours shows, for all multiply by them."""

    def wrong(right, *given):
        codes, absmax = right(*given)
        return codes, absmax * 1.02

    plant(nf4, "quantize_nf4", wrong)
    found = compared(folder, tmp_path, seed=seed)
    assert not any("bitsandbytes" not in line for line in found.failures)
    assert re.search(
        r"layers.0.mlp.up_proj: the weight of .*bitsandbytes.* is another, by 2.0%",
        "\n".join(found.failures),
    )


@pytest.mark.slow
def test_an_adapter_that_is_scaled_otherwise_fails(folder, tmp_path, plant, seed):
    def wrong(right, *given):
        rank, scale = right(*given)
        return rank, 1.1 * scale

    plant(bitsandbytes_arm, "rank_and_scale", wrong)
    found = compared(folder, tmp_path, seed=seed)
    assert any("PEFT: its gradients of" in line for line in found.failures), found.failures


# --- where it cannot run
# ------------------------------------------------------------------------------------------------


def note_of(found):
    assert found.passed and found.bitsandbytes is None, found.failures
    (note,) = (
        note for note in found.notes if "transformers + bitsandbytes + PEFT is not run" in note
    )
    return note


@pytest.mark.slow
@pytest.mark.parametrize("package", ["bitsandbytes", "peft"])
def test_what_is_not_installed_is_named(folder, tmp_path, let_return, package):
    if package == "peft":
        let_return(bitsandbytes_arm, find_spec=None)
    else:
        let_return(bitsandbytes_arm, missing_for_bitsandbytes=[package])
    assert f"{package}: not installed" in note_of(compared(folder, tmp_path))


@pytest.mark.slow
def test_a_model_that_was_never_stored_is_named(folder, tmp_path):
    """Quantised here, before any arm is made."""
    found = compared(folder, tmp_path, tiny.llama(**SHAPE))
    assert "in memory has no checkpoint" in note_of(found)


@pytest.mark.slow
def test_a_model_that_was_changed_since_is_named(folder, tmp_path):
    model = load_model(folder / "base", torch.float32, quantization="nf4")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    assert "model.norm.weight of the model is not that of its checkpoint" in note_of(
        compared(folder, tmp_path, model)
    )


@pytest.mark.slow
def test_a_product_that_bitsandbytes_gets_wrong_is_named(tmp_path, plant):
    """Where inputs are no multiple of a block, on CPUs."""
    pytest.importorskip("bitsandbytes")
    tiny.llama(intermediate_size=96).save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", torch.float32, quantization="nf4")
    shifted = {id(layer) for layer in model.modules()}
    plant(
        bitsandbytes_arm,
        "dense_weight",
        lambda right, path, layer: right(path, layer) * (1 if id(layer) in shifted else 1.1),
    )
    assert "does not multiply by the weight that its codes stand for (off by" in note_of(
        compared(tmp_path, tmp_path, model)
    )


@pytest.mark.slow
def test_a_base_in_16_bits_has_no_such_arm(folder, tmp_path):
    found = compared(
        folder,
        tmp_path,
        load_model(folder / "base", torch.float32),
        quantization=None,
        use_lora=True,
    )
    assert (
        found.passed
        and found.bitsandbytes is None
        and not any("bitsandbytes" in note for note in found.notes)
    )


# --- the command
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_it_beside_ours(folder, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    )
    flags = {
        "--model": folder / "base",
        "--data": tmp_path / "data.jsonl",
        "--cache-dir": tmp_path / "tokens",
        "--lora-rank": 4,
        "--max-seq-length": 128,
        "--batch-size": 1,
        "--output": tmp_path / "figures.json",
        "--max-steps": 50,
    }
    given = [
        "verify",
        *(str(part) for flag in flags.items() for part in flag),
        "--no-use-torch-compile",
        "--load-in-4bit",
    ]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, given)
    assert done.exit_code == 0, done.output
    assert (
        "bnb's" in done.stdout
        and "transformers + bitsandbytes + PEFT: median deviation" in done.stdout
    )
    figures = json.loads((tmp_path / "figures.json").read_text())["bitsandbytes"]
    assert len(figures["losses"]) == 5 and figures["gradients"][0]["deviation"] > 0
