"""Runs that draw their answers over every kind of weights."""

import pytest
import torch

import gguf_files
import rollouts
import runs
import tiny
from chronicals.models import load_model
from chronicals.models.gguf_loading import load_gguf
from chronicals.patching import layer_policies, patch_parts
from chronicals.policies import facts
from chronicals.quantization import Linear4bit, LinearGGUF
from chronicals.training.run.callbacks import read_metrics

ADAPTERS = {"use_lora": True, "lora_rank": 4}
SEVERAL = {"section": {"updates": 2}, "max_steps": 4}


def by_text(completions, **columns):
    """Rewards that tell answers apart."""
    return [float(sum(map(ord, text)) % 97) for text in completions]


def metrics(folder):
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


def in_nf4(folder):
    """A model in NF4, and the plain model that it stands for."""
    tiny.llama().save_pretrained(folder / "base")
    packed, plain = (
        load_model(folder / "base", torch.float32, quantization="nf4") for _ in range(2)
    )
    for path, layer in list(plain.named_modules()):
        if isinstance(layer, Linear4bit):
            plain.set_submodule(path, layer.plain())
    assert sum(isinstance(layer, Linear4bit) for layer in packed.modules()) == 14
    return packed, plain


def in_gguf(folder):
    """A model in blocks of a GGUF file, and the plain model that it stands for."""
    pytest.importorskip("gguf")
    path = gguf_files.write(folder, tiny.llama(), "q8_0")
    packed = load_model(path, torch.float32)
    assert sum(isinstance(layer, LinearGGUF) for layer in packed.modules()) == 14
    return packed, load_gguf(path, torch.float32, packed=False)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("base", [in_nf4, in_gguf])
def test_over_a_packed_base_answers_and_steps_are_those_over_its_values(base, dora, tmp_path):
    seen = []
    for name, model in zip(("packed", "plain"), base(tmp_path)):
        rewards = rollouts.Rewards((by_text,))
        given = {**SEVERAL, **ADAPTERS, "use_dora": dora}
        rollouts.train(tmp_path / name, model=model, rewards=rewards, **given)
        lines = metrics(tmp_path / name)
        assert all(line["gap/largest"] < 1e-4 for line in lines if "gap" in line)
        seen.append([rows.completion_ids for rows in rewards.calls])
    assert seen[0] == seen[1]
    packed, plain = (runs.trajectory(tmp_path / name) for name in ("packed", "plain"))
    for (step, *one), (_, *two) in zip(packed, plain, strict=True):
        assert one == pytest.approx(two, rel=2e-3, abs=1e-6), step


@pytest.fixture
def fused_anywhere(let_return, set_constants):
    """A model with fused layers, which a run has on a card only, and FP8 for small products."""
    let_return(facts, why_not_fused=None)
    set_constants(layer_policies, MIN_FP8_WIDTH=16)
    model = tiny.llama()
    patch_parts(model, whole_layers=True)
    return model


IN_16_BITS = {
    "all weights": {"learning_rate": 1e-3},
    "LoRA": ADAPTERS,
    "DoRA": {**ADAPTERS, "use_dora": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
@pytest.mark.parametrize("way", IN_16_BITS)
def test_in_16_and_8_bits_draws_and_passes_agree(way, fp8, tmp_path, fused_anywhere):
    """Products in FP8 round the activations of a pack and of a few answers differently."""
    given = {**SEVERAL, **IN_16_BITS[way], "mixed_precision": "bf16", "use_fp8": fp8}
    rewards = rollouts.Rewards((by_text,))
    rollouts.train(tmp_path, model=fused_anywhere, rewards=rewards, **given)
    lines = metrics(tmp_path)
    new = [line for line in lines if "gap" in line]
    assert len(lines) == 4 and len(new) == 2
    assert all(0 < line["gap/largest"] < (0.3 if fp8 else 0.05) for line in new)
    assert all(line["gap"] < 0.1 * line["entropy"] for line in new)
    assert all(line["grad_norm"] > 0 for line in lines)
