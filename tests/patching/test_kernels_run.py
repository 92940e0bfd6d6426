"""'Replaced' means that the kernel ran: whole models with Triton's kernels, interpreted on the
CPU or compiled on the card.
"""

import contextlib
import copy

import pytest
import torch

import families
from chronicals import patch_model
from chronicals.kernels import glu, layernorm, qk_rope, rmsnorm
from chronicals.kernels.launch import interpreting
from patching.architectures import built, difference, run

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
    "gpt2",
    "phi",
    "cohere",
    "granite",
    "gpt_oss",
    "bloom",
    "jamba",
]
ON_THE_CARD = [
    "Arcee",
    "Cwm",
    "Exaone4",
    "Glm",
    "Glm4",
    "GPTNeoX",
    "Helium",
    "SeedOss",
    "Lfm2",
    "MiniCPM3",
    "Ministral",
    "Mixtral",
    "Olmo2",
    "Olmo3",
    "Phi3",
    "Qwen2Moe",
    "Qwen3Moe",
    "SmolLM3",
    "StableLm",
    "Starcoder2",
    "VaultGemma",
    "DeepseekV3",
]
LAUNCHERS = {
    "fused_rmsnorm": (rmsnorm, "_forward"),
    "fused_layernorm": (layernorm, "_forward"),
    "fused_swiglu": (glu, "_forward"),
    "fused_geglu": (glu, "_forward"),
    "fused_qk_rope": (qk_rope, "_rotate_both"),
}
"""Where each of them starts its kernel."""


@contextlib.contextmanager
def kernels(device):
    with interpreting() if device.type == "cpu" else contextlib.nullcontext():
        yield


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were started."""
    found = set()
    for name, (module, launcher) in LAUNCHERS.items():
        monkeypatch.setattr(module, launcher, noting(found, name, getattr(module, launcher)))
    return found


def noting(found, name, launcher):
    def noted(*args):
        found.add(name)
        return launcher(*args)

    return noted


def seeded_run(model):
    """``run`` itself seeds no card, and Seed-OSS has dropout."""
    torch.manual_seed(6)
    return run(model)


def assert_the_kernels_agree(plain, patched, report, device, launched, tolerance):
    expected = seeded_run(plain)
    with kernels(device):
        got = seeded_run(patched)
    assert difference(expected, got) <= tolerance
    wanted = {by.split(",")[0].split(" ")[0] for by in report.counts()} & LAUNCHERS.keys()
    assert wanted <= launched, f"never started: {wanted - launched}"


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("family", FAMILIES)
def test_with_kernels(family, device, launched):
    plain = families.build(family)
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert_the_kernels_agree(
        plain.to(device), patched.to(device), report, device, launched, tolerance=2e-3
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_THE_CARD)
def test_with_compiled_kernels(name, device, launched):
    plain, _, _ = built(name)
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert_the_kernels_agree(
        plain.to(device), patched.to(device), report, device, launched, tolerance=2e-3
    )
