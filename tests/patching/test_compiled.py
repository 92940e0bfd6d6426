"""``torch.compile`` of a patched model over batches of ever new shapes: no graph breaks, one
recompilation at most.
"""

import pytest
import torch
from torch._dynamo.utils import counters

import families
from chronicals.attention import backends
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.lora.layers import LoRALinear
from chronicals.models import PresentedModel, quantise_layers
from chronicals.patching import patch_model, patch_parts
from chronicals.quantization import Linear4bit, LinearGGUF
from drawn_blocks import by_gguf

STEPS = 50


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def assert_compiled_once_and_again():
    """The second time sizes become symbols."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


def lengths(count):
    return torch.randint(3, 13, (count,)).tolist()


def padded(device):
    ids = torch.randint(1, families.VOCABULARY, (2, max(lengths(3)) + 9), device=device)
    return {"input_ids": ids, "labels": ids}


def masked(device):
    given = padded(device)
    mask = torch.ones_like(given["input_ids"])
    mask[0, -int(torch.randint(1, 5, ())) :] = 0
    return {**given, "attention_mask": mask, "labels": given["labels"].masked_fill(mask == 0, -100)}


def packed(device):
    parts = lengths(4)
    ids = torch.randint(1, families.VOCABULARY, (1, sum(parts)), device=device)
    positions = torch.cat([torch.arange(part) for part in parts])[None].to(device)
    bounds = torch.tensor([0, *parts]).cumsum(0).to(device, torch.int32)
    return {
        "input_ids": ids,
        "labels": ids,
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(parts),
        "max_length_k": max(parts),
        "use_cache": False,
    }


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "batch"), [("llama", padded), ("gemma2", masked), ("qwen3", packed)]
)
def test_a_patched_model(family, batch, device):
    model = families.build(family).to(device)
    patch_model(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(STEPS):
        compiled(**batch(device)).loss.backward()
    assert_compiled_once_and_again()
    rows = batch(device)
    found = []
    for runner in (model, compiled):
        runner.zero_grad()
        runner(**rows).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    families.assert_same(*found)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("four", "dora", "patched"),
    [(True, False, False), (True, True, False), (True, True, True), (False, True, False)],
    ids=["nf4-lora", "nf4-dora", "nf4-dora-patched", "dense-dora"],
)
def test_adapters_over_16_and_over_4_bits(four, dora, patched, device):
    """Forward and backward passes traced, while adapters are trained; gradients are those of the
    model that is not compiled.
    """
    model = families.build("qwen2").to(device)
    if four:
        quantise_layers(model)
    apply_lora(model, LoRAConfig(rank=3, alpha=5, dropout=0.0, use_dora=dora)).double().train()
    if patched:
        patch_model(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    for p in adapters:
        torch.nn.init.normal_(p, float(p.ndim == 1), 0.1)  # magnitudes about one
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(adapters, lr=1e-3)
    for _ in range(6):
        compiled(**padded(device)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_compiled_once_and_again()
    rows = padded(device)
    found = []
    for runner in (model, compiled):
        runner.zero_grad()
        runner(**rows).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    families.assert_same(*found)


def in_blocks(linear):
    return LinearGGUF(by_gguf(linear.weight, "Q4_0"), linear.bias)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [Linear4bit.of, in_blocks], ids=["nf4", "gguf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_layer_is_one_graph(dtype, packed, device):
    """What torch's own account of it says, too; and packed bits that change under the graph are
    seen.
    """
    layer = packed(torch.nn.Linear(64, 24, device=device)).to(dtype)
    adapted = LoRALinear(layer, LoRAConfig(rank=3, dropout=0.0, use_dora=True), 64, 24).to(device)
    torch.nn.init.normal_(adapted.lora_B)
    x = torch.randn(5, 64, device=device, dtype=dtype)
    told = torch._dynamo.explain(adapted)(x)
    assert (told.graph_count, told.graph_break_count) == (1, 0), told.break_reasons
    torch._dynamo.reset()
    compiled = torch.compile(adapted, backend="aot_eager", fullgraph=True)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps ** 0.9, "atol": torch.finfo(dtype).eps * 10}
    assert torch.allclose(compiled(x), adapted(x), **tolerance)
    other = packed(torch.nn.Linear(64, 24, device=device)).to(dtype)
    layer.load_state_dict(other.state_dict())
    assert torch.allclose(compiled(x), adapted(x), **tolerance)


@pytest.mark.parametrize("backend", ["flex", "flash"])
def test_decoder_layers_over_documents(backend, device, let_return):
    """As the trainer compiles them where they do not run fused; here without gradients, which
    FlexAttention has on a card.
    """
    on_card = device.type == "cuda"
    if backend == "flash" and not on_card:
        pytest.skip("needs a CUDA device")
    let_return(backends, order=(backend,))
    model = families.build("llama").to(device, torch.bfloat16 if on_card else torch.float32)
    patch_parts(model)
    for layer in model.get_decoder().layers:
        layer.compile(backend="eager")
    with (
        PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented,
        torch.set_grad_enabled(on_card),
    ):
        for _ in range(STEPS):
            parts = torch.randint(1, 16, (5,)).tolist()
            batch = families.documents_batch((*parts, 80 - sum(parts))).to(device)
            states = presented.hidden_states(batch)
            if on_card:
                states.sum().backward()
    assert_compiled_once_and_again()
