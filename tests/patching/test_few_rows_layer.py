"""Layers over the few rows of a decode step, by kernels that do what stands beside a product."""

import pytest
import torch

import families
from chronicals.generation import Engine, EngineSettings, Request
from chronicals.kernels import decode_attention
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.patching import RowSquares, few_rows_layer, patch_parts
from interpreted import counted_launches, kernels_run, only_interpreted

WIDE = {"hidden_size": 128}
"""Heads of 32 channels, which attention of decode steps turns itself."""

SHARES = {
    "llama": WIDE,
    "qwen2": {},
    "qwen3": WIDE | {"head_dim": 32},
    "gemma": WIDE | {"head_dim": 32},
    "mistral": WIDE | {"head_dim": 32, "sliding_window": 4},
    "phi3": {},
}
"""Families whose layers take it, and what of their configuration is another one here."""

LENGTHS = (3, 12, 7)
NEW = 3


def fused(family="llama", layers=2, dtype=torch.float32, **changes):
    model = families.build(family, num_hidden_layers=layers, **changes).to(dtype).eval()
    model.generation_config.eos_token_id = None
    patch_parts(model, whole_layers=True)
    return model


def answers(model):
    """Greedy tokens of unequal prompts, their log-probabilities, and launches of all kernels."""
    torch.manual_seed(0)
    prompts = [torch.randint(1, families.VOCABULARY, (n,)).tolist() for n in LENGTHS]
    with kernels_run(), counted_launches() as launches:
        found = Engine(model, EngineSettings(slots=8)).generate(
            [Request(prompt, NEW, number=n) for n, prompt in enumerate(prompts)]
        )
    answered = [one for (one,) in found]
    values = torch.tensor([one.full_log_probabilities for one in answered])
    return [one.tokens for one in answered], values, launches


@only_interpreted
@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("family", SHARES)
def test_it_is_the_layer(family, set_constants):
    model = fused(family, **SHARES[family])
    tokens, values, launches = answers(model)
    layers = launches["_few_rows_product_kernel"] // 4
    assert layers and layers % len(model.model.layers) == 0
    set_constants(few_rows_layer, MOST_WEIGHT_BYTES=0)
    set_constants(decode_attention, NARROWEST=1024)
    expected, wanted, others = answers(model)
    assert not others["_few_rows_product_kernel"] and not others["_decode_attention_kernel"]
    assert tokens == expected
    torch.testing.assert_close(values, wanted, atol=2e-5, rtol=0)
    if family in ("qwen2", "phi3"):
        assert not launches["_decode_attention_kernel"]
    else:
        assert launches["_decode_attention_kernel"] == layers
        assert not launches["_paged_attention_kernel"]
    fewer = others - launches
    assert fewer["_glu_forward_kernel"] == layers
    assert fewer["_rmsnorm_forward_kernel"] == 2 * layers


@only_interpreted
@pytest.mark.slow
def test_it_rounds_where_the_layer_rounds(set_constants):
    """In 16 bits most tokens' log-probabilities have the same bits, others one rounding's difference."""
    model = fused("qwen2", dtype=torch.bfloat16)
    _, values, launches = answers(model)
    assert launches["_few_rows_product_kernel"]
    set_constants(few_rows_layer, MOST_WEIGHT_BYTES=0)
    _, wanted, _ = answers(model)
    torch.testing.assert_close(values[:, :2], wanted[:, :2], atol=0.03, rtol=0)


@only_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("change", ["adapters", "norms behind", "large weights"])
def test_layers_that_run_as_over_many_rows(change, set_constants):
    model = fused("olmo2" if change == "norms behind" else "llama")
    if change == "adapters":
        apply_lora(model, LoRAConfig(rank=2))
    if change == "large weights":
        weights = [p for p in model.model.layers[0].parameters() if p.ndim == 2]
        size = sum(weight.nbytes for weight in weights)
        set_constants(few_rows_layer, MOST_WEIGHT_BYTES=size - 1)
    *_, launches = answers(model)
    assert launches["_glu_forward_kernel"] and not launches["_few_rows_product_kernel"]


def test_sums_of_squares_are_those_of_one_tensor():
    squares = RowSquares()
    rows, sums = torch.randn(1, 3, 8), torch.randn(2, 3)
    assert squares.of(rows) is None
    squares.keep(rows, sums)
    assert squares.of(rows) is sums
    assert squares.of(rows.clone()) is None and squares.of(rows.view(1, 3, 8)) is None
    rows.mul_(2)
    assert squares.of(rows) is None
