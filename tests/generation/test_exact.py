"""Generation and the packed forward pass give the same bits."""

import copy
from contextlib import nullcontext

import pytest
import torch

import families
import tiny
from chronicals.generation.engine import Engine
from chronicals.generation.exact import exact_passes, packed_log_probabilities
from chronicals.generation.exact_operations import NotExact
from chronicals.generation.requests import Request
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import EngineSettings
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.patching import fuse_weights, patch_model, patch_parts, wide_residuals
from interpreted import kernels_run, rows_multiplied_alike

LENGTHS = (3, 40, 17, 16, 32, 1, 25, 60, 9, 7, 11, 33, 48, 2, 5, 19, 50)
NEW = 20
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4
"""Of keys and values of ``tiny.llama``: tokens, layers, both, heads, width, fp32."""


@pytest.fixture(scope="module")
def model():
    return tiny.llama(eos_token_id=None).eval()


def requests(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(2)
    return [
        Request(
            torch.randint(1, 300, (length,), generator=generator).tolist(),
            NEW,
            Sampling(float(n % 3), seed=n),
            number=n,
        )
        for n, length in enumerate(lengths)
    ]


def packed(model, asked, answers):
    """Of the answers' tokens, by the packed forward pass."""
    texts = [torch.tensor([*r.prompt, *a.tokens]) for r, (a,) in zip(asked, answers)]
    batch = families.hand_made_batch(texts).to(model.device)
    with torch.no_grad():
        chosen = packed_log_probabilities(model, batch).cpu()
    found = zip(chosen.split([len(text) for text in texts]), asked)
    return torch.cat([rows[len(r.prompt) - 1 : -1] for rows, r in found])


def of_generation(answers):
    return torch.cat([torch.tensor(answer.full_log_probabilities) for (answer,) in answers])


@pytest.mark.slow
def test_generation_and_the_packed_pass_give_the_same_bits(model):
    """17 unequal prompts, of which some are evicted and computed again."""
    settings = EngineSettings(9 * PAGE_BYTES, slots=6, chunk_tokens=50, generation_exact=True)
    engine = Engine(model, settings)
    answers = engine.generate(requests())
    assert engine.evictions
    assert torch.equal(of_generation(answers), packed(model, requests(), answers))
    usual = Engine(model).generate(requests())
    assert torch.allclose(of_generation(usual), of_generation(answers), atol=1e-4)


@pytest.mark.slow
def test_qwen_gives_the_same_bits():
    """Norms of queries and keys, biases."""
    qwen = families.build("qwen3").eval()
    qwen.generation_config.eos_token_id = None
    asked = [Request([5, 6, 7], 6), Request(list(range(9, 40)), 5, Sampling(1.0), number=1)]
    answers = Engine(qwen, EngineSettings(generation_exact=True)).generate(asked)
    assert torch.equal(of_generation(answers), packed(qwen, asked, answers))


@pytest.mark.slow
def test_adapters_give_the_same_bits(model):
    adapted = apply_lora(copy.deepcopy(model), LoRAConfig(rank=4, dropout=0.0)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    asked = requests((3, 17))
    answers = Engine(adapted, EngineSettings(generation_exact=True)).generate(asked)
    assert torch.equal(of_generation(answers), packed(adapted, asked, answers))
    assert not torch.equal(of_generation(answers), packed(model, asked, answers))


@pytest.mark.parametrize("kernels", [nullcontext, kernels_run], ids=["plain", "kernels"])
def test_gradients_go_through_the_packed_pass(model, kernels):
    batch = families.documents_batch()
    trained = copy.deepcopy(model)
    with kernels():
        packed_log_probabilities(trained, batch).sum().backward()
    ours = [parameter.grad for parameter in trained.parameters()]
    trained.zero_grad()
    total = 0
    for document in families.documents(batch):
        full = trained(batch.input_ids[document][None]).logits[0].log_softmax(-1)
        targets = batch.targets[document]
        chosen = full.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        total = total + chosen[targets >= 0].sum()
    total.backward()
    for gradient, parameter in zip(ours, trained.parameters(), strict=True):
        assert families.distance(gradient, parameter.grad) < 1e-4


def test_what_is_not_proved_is_refused_with_its_reason(model):
    asked = [Request([5, 6, 7], 3)]
    settings = EngineSettings(generation_exact=True)
    half = copy.deepcopy(model).bfloat16()
    with pytest.raises(
        NotExact, match="^generation_exact=True: .* is bfloat16, and on the CPU only fp32"
    ):
        Engine(half, settings).generate(asked)
    latent = families.routed("DeepseekV3").eval()
    with pytest.raises(NotExact, match="latent attention"):
        Engine(latent, settings).generate(asked)
    square = torch.eye(3)
    with exact_passes(model), pytest.raises(NotExact, match="det is not known"):
        torch.linalg.det(square)
    one, other = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    with exact_passes(model), pytest.raises(NotExact, match="sum is not known"):
        one.sum(0)
    with exact_passes(model), pytest.raises(NotExact, match="bmm is not known"):
        one @ other


def test_a_rows_bits_do_not_depend_on_rows_beside_it():
    rows = torch.randn(1000, 96)
    weight = torch.randn(96, 133).T.contiguous().T
    places = (0, 1, 7, 500, 999)
    silu = torch.nn.functional.silu
    with exact_passes(torch.nn.Linear(1, 1)):
        products, functions = rows @ weight, silu(rows)
        alone = [(rows[n : n + 1] @ weight, silu(rows[n, :93])) for n in places]
    for place, (product, function) in zip(places, alone):
        assert torch.equal(product[0], products[place])
        assert torch.equal(function, functions[place, :93])


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("patched", ["as it is", "parts", "whole layers"])
def test_in_bf16_kernels_give_the_same_bits(family, patched, device, set_constants):
    """Biases, norms of queries and keys, windows, chunks of prompts; the residual is rounded."""
    set_constants(wide_residuals, ROUNDED_LAYERS=1)
    half = (
        families.build(family, sliding_window=8) if family == "mistral" else families.build(family)
    )
    half = half.to(device, torch.bfloat16).eval()
    half.generation_config.eos_token_id = None
    asked = [
        Request([5, 6, 7], 3),
        Request(list(range(9, 22)), 2, Sampling(1.0), number=1),
        Request(list(range(3, 8)), 2, Sampling(1.5), number=2),
    ]
    with kernels_run(), rows_multiplied_alike():
        if patched == "parts":
            patch_model(half)
        elif patched == "whole layers":
            patch_parts(half, whole_layers=True)
            fuse_weights(half)
        settings = EngineSettings(generation_exact=True, page_size=4, chunk_tokens=7, slots=2)
        answers = Engine(half, settings).generate(asked)
        assert torch.equal(of_generation(answers), packed(half, asked, answers))
