"""Every ``use_*`` switch changes what runs: seen where it runs, not in what the log says of it."""

import dataclasses

import pytest
import torch

import runs
import tiny
from chronicals.attention import FLASH, documents
from chronicals.config import ChronicalsConfig
from chronicals.lora import LoRALinear
from chronicals.models import PresentedModel, presentation
from chronicals.patching import decoder_layer, patch_parts
from chronicals.training import session
from chronicals.training.run import loop
from chronicals.training.step import graphs

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}


def counted(monkeypatch, owner, name):
    """What ``owner.name`` is called with from here on; it runs as before."""
    calls = []
    own = getattr(owner, name)

    def call(*args, **options):
        calls.append((args, options))
        return own(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


def results(monkeypatch, owner, name):
    """What ``owner.name`` returns from here on."""
    returned = []
    own = getattr(owner, name)

    def call(*args, **options):
        returned.append(own(*args, **options))
        return returned[-1]

    monkeypatch.setattr(owner, name, call)
    return returned


def flash_attention(folder, monkeypatch, on):
    """Which of the calls of attention may take a backend of FlashAttention; a switch of its own
    can only be set off here.
    """
    counts = [
        counted(monkeypatch, owner, "document_attention") for owner in (presentation, decoder_layer)
    ]
    runs.train(folder, max_steps=1, **({} if on else {"use_flash_attention": False}))
    calls = [call for counted_there in counts for call in counted_there]
    return {options["flash"] for _, options in calls}


def fused_kernels(folder, monkeypatch, on):
    """Whether whole logits are made."""
    calls = counted(monkeypatch, PresentedModel, "_run")
    runs.train(folder, max_steps=1, use_fused_kernels=on)
    return any("logits" in args for args, _ in calls)


def sequence_packing(folder, monkeypatch, on):
    """Whether a pack holds several documents."""
    steps = counted(monkeypatch, session, "train_step")
    runs.train(folder, max_steps=1, use_sequence_packing=on)
    counts = steps[0][0][0].counts
    return counts["documents"] > counts["packs"]


def gradient_checkpointing(folder, monkeypatch, on):
    """How often a layer's MLP runs in one step of one forward pass."""
    model = tiny.llama()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    changes = {"gradient_accumulation_steps": 1, "use_gradient_checkpointing": on}
    runs.train(folder, model=model, max_steps=1, **changes)
    return len(calls)


def lora(folder, monkeypatch, on):
    """How many adapters there are."""
    model = tiny.llama()
    runs.train(folder, model=model, max_steps=1, **(LORA if on else {"use_lora": False}))
    return sum(isinstance(module, LoRALinear) for module in model.modules())


def rslora(folder, monkeypatch, on):
    """The scales of the adapters, alpha by the rank or by its root."""
    model = tiny.llama()
    runs.train(folder, model=model, max_steps=1, lora_alpha=8, use_rslora=on, **LORA)
    return {module.scale for module in model.modules() if isinstance(module, LoRALinear)}


def dora(folder, monkeypatch, on):
    """How many magnitudes have moved from the norms that they began with."""
    model = tiny.llama()
    runs.train(folder, model=model, max_steps=1, use_dora=on, **LORA)
    own = [
        layer
        for layer in model.modules()
        if isinstance(layer, LoRALinear) and layer.lora_magnitude_vector is not None
    ]
    norms = [layer.base_layer.weight.float().norm(dim=1) for layer in own]
    return sum(
        bool((layer.lora_magnitude_vector - n).norm() > 1e-5 * n.norm())
        for layer, n in zip(own, norms)
    )


def lora_plus(folder, monkeypatch, on):
    """How many rates there are."""
    optimizers = counted(monkeypatch, loop, "set_learning_rate")
    runs.train(folder, max_steps=1, use_lora_plus=on, **LORA)
    return len({group["peak"] for group in optimizers[0][0][0].param_groups})


def torch_compile(folder, monkeypatch, on):
    """How many layers are compiled."""
    calls = counted(monkeypatch, torch.nn.Module, "compile")
    runs.train(
        folder, max_steps=1, mixed_precision="bf16", use_torch_compile=on, use_cuda_graphs=False
    )
    return len(calls)


def cuda_graphs(folder, monkeypatch, on):
    """Whether steps are those that are replayed."""
    calls = counted(monkeypatch, graphs.GraphedStep, "micro")
    runs.train(folder, max_steps=4, mixed_precision="bf16", use_cuda_graphs=on)
    return bool(calls)


SEEN = [
    (flash_attention, {True}, {False}),
    (fused_kernels, False, True),
    (sequence_packing, True, False),
    (gradient_checkpointing, 2, 1),
    (lora, 14, 0),
    (rslora, {4.0}, {2.0}),
    (dora, 14, 0),
    (lora_plus, 2, 1),
    pytest.param(torch_compile, 2, 0, marks=pytest.mark.gpu),
    pytest.param(cuda_graphs, True, False, marks=pytest.mark.gpu),
]
ELSEWHERE = {
    "use_8bit_optimizer": "tests/training/test_8bit_runs.py",
    "use_fp8": "tests/training/test_fp8_runs.py",
}


@pytest.mark.slow
@pytest.mark.parametrize(("look", "on", "off"), SEEN)
def test_it_changes_what_runs(tmp_path, monkeypatch, look, on, off):
    assert look(tmp_path / "on", monkeypatch, True) == on
    monkeypatch.undo()
    assert look(tmp_path / "off", monkeypatch, False) == off


def test_every_switch_is_looked_at():
    looked_at = {
        f"use_{(row.values if hasattr(row, 'values') else row)[0].__name__}" for row in SEEN
    }
    switches = {
        field.name
        for field in dataclasses.fields(ChronicalsConfig)
        if field.name.startswith("use_")
    }
    assert switches == looked_at | ELSEWHERE.keys()


@pytest.mark.slow
def test_fused_layers_attend_without_flash_attention(tmp_path, monkeypatch):
    model = tiny.llama()
    patch_parts(model, whole_layers=True)
    calls = counted(monkeypatch, decoder_layer, "document_attention")
    runs.train(tmp_path, model=model, max_steps=1, use_flash_attention=False)
    assert {options["flash"] for _, options in calls} == {False}


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_no_backend_of_flash_attention_runs(tmp_path, monkeypatch, fused):
    changes = {"mixed_precision": "bf16", "max_steps": 2, "use_fused_kernels": fused}
    for flash, folder in ((True, "with"), (False, "without")):
        chosen = results(monkeypatch, documents, "choose_backend")
        runs.train(tmp_path / folder, use_flash_attention=flash, **changes)
        monkeypatch.undo()
        assert {name in FLASH for name in chosen} == {flash}
