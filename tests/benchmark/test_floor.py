"""FLOPs, bytes and the reference step against numbers worked out by hand and against the
ceilings measured on an H200.
"""

from dataclasses import asdict, replace

import pytest
import transformers

from chronicals.benchmark.floor import ReferenceStep, mfu, reference_step
from chronicals.benchmark.shapes import SHAPES
from chronicals.step_work import (
    DecoderShape,
    Job,
    Product,
    attention_flops,
    dequantised_bytes,
    elementwise_bytes,
    loss_bytes,
    needed_flops,
    optimizer_bytes,
    products,
)

COPY = 4.27e12
SMALL = "qwen2.5-0.5b"
LARGE = "llama-3.1-8b"


def shape(name: str) -> DecoderShape:
    return DecoderShape.of(getattr(transformers, SHAPES[name].config_class)(**SHAPES[name].sizes))


def test_flops_of_a_shape_small_enough_for_pencil_and_paper():
    tiny = DecoderShape(
        layers=1, width=4, heads=2, kv_heads=1, head_dim=2, inner=8, vocabulary=10, experts=0
    )
    body = 4 * (4 + 2 * 2) + 4 * 4 + 3 * 4 * 8
    head = 4 * 10
    assert (tiny.body, tiny.head) == (body, head) == (144, 40)
    full = Job(tiny, tokens=6, mean_length=5.0, labelled=0.5)
    assert attention_flops(full) == 2 * 1 * 4 * 6
    assert needed_flops(full) == 6 * 144 + 6 * 40 * 0.5 + 3 * 48
    lora = Job(tiny, tokens=6, mean_length=5.0, rank=3)
    assert lora.adapter_parameters == 3 * ((4 + 4) + 2 * (4 + 2) + (4 + 4) + 3 * (4 + 8))
    assert needed_flops(lora) == 4 * 144 - 2 * 4 * 8 + 6 * lora.adapter_parameters + 4 * 40 + 3 * 48
    assert elementwise_bytes(tiny) == 2 * (16 * 4 + 4 * (4 + 2) + 8 * 8 + 7 * 4)
    assert loss_bytes(full) == 4 * 10 * 0.5
    assert mfu(full, 989e12 / needed_flops(full), "NVIDIA H200") == pytest.approx(1.0)
    assert mfu(full, 756e12 / needed_flops(full), "NVIDIA H100 PCIe") == pytest.approx(1.0)
    assert mfu(full, 1.0, "NVIDIA GeForce RTX 4090") is None and mfu(full, 1.0, "") is None
    assert mfu(replace(full, shape=replace(tiny, experts=8)), 1.0, "NVIDIA H200") is None


@pytest.mark.parametrize(
    ("kind", "routed"), [("Mixtral", True), ("Qwen3Moe", True), ("Olmoe", True), ("Llama", False)]
)
def test_experts_are_noticed(kind, routed):
    assert DecoderShape.of(getattr(transformers, f"{kind}Config")()).routed == routed


@pytest.mark.parametrize(
    ("kind", "changes", "countable"),
    [
        ("Mixtral", {}, True),
        ("Olmoe", {}, True),
        ("Qwen3Moe", {}, True),
        ("Qwen3Moe", {"mlp_only_layers": [0]}, False),
        ("Qwen2Moe", {}, False),
        ("DeepseekV3", {}, False),
    ],
)
def test_what_is_beside_experts_is_not_counted(kind, changes, countable):
    shape = DecoderShape.of(getattr(transformers, f"{kind}Config")(**changes))
    assert (not Job(shape, 1, 1.0).why_uncounted) == countable


@pytest.mark.parametrize(
    "name, layers, met, parameters",
    [("qwen3-30b-a3b", 48, 2.73e9, 30.5e9), ("olmoe-1b-7b", 16, 1.076e9, 6.92e9)],
)
def test_sizes_of_mixtures(name, layers, met, parameters):
    """As their makers give them, 3.3 and 1.3 billion of 30.5 and 6.9, less head and embedding in
    what a token meets.
    """
    whole = DecoderShape.of(
        getattr(transformers, SHAPES[name].config_class)(
            **SHAPES[name].sizes | {"num_hidden_layers": layers}
        )
    )
    assert whole.body == pytest.approx(met, rel=0.01) and whole.parameters == pytest.approx(
        parameters, rel=0.01
    )


@pytest.mark.parametrize("rank", [0, 16])
def test_products_of_a_mixture_are_the_needed_flops(rank):
    """Experts have no adapters; those of attention lie in its products."""
    job = Job(shape("qwen3-30b-a3b"), 16384, 2048, rank)
    assert not job.why_uncounted and job.adapter_parameters == 8 * rank * (
        2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048
    )
    listed = sum(product.count * product.flops for product in products(job))
    needed = (needed_flops(job) - 3 * attention_flops(job)) * job.tokens
    assert needed * (1 - 1e-9) <= listed <= 1.05 * needed
    assert elementwise_bytes(job.shape) == 8 * 2 * (
        16 * 2048 + 4 * (4096 + 512) + 8 * (9 * 768 + 2 * 2048) + 7 * 4096
    )


@pytest.mark.parametrize(
    "name, body, parameters", [(SMALL, 357.8e6, 494e6), (LARGE, 6.979e9, 8.03e9)]
)
def test_sizes_of_the_built_in_shapes(name, body, parameters):
    assert shape(name).body == pytest.approx(body, rel=1e-3)
    assert shape(name).parameters == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize(
    "name, rank, gigaflops",
    [(SMALL, 0, 3.23), (SMALL, 16, 2.29), (LARGE, 0, 46.6), (LARGE, 16, 31.8)],
)
def test_needed_flops_at_documents_of_2048(name, rank, gigaflops):
    assert needed_flops(Job(shape(name), 16384, 2048, rank)) / 1e9 == pytest.approx(
        gigaflops, rel=0.01
    )


@pytest.mark.parametrize(("rank", "zeros"), [(0, 1.0), (32, 1.05)])
def test_the_products_are_the_needed_flops(rank, zeros):
    """Beside adapters of several projections in one product lie zeros."""
    job = Job(shape(SMALL), 16384, 2048, rank)
    listed = sum(product.count * product.flops for product in products(job))
    needed = (needed_flops(job) - 3 * attention_flops(job)) * job.tokens
    assert needed * (1 - 1e-9) <= listed <= zeros * needed * (1 + 1e-9)


def ceiling(product: Product) -> float:
    """Seconds of a product at the ceilings measured on an H200: by width, and narrow ones by the
    copy bandwidth.
    """
    narrow = min(product.inputs, product.outputs, product.rows)
    moved = 2 * (
        product.rows * (product.inputs + product.outputs) + product.inputs * product.outputs
    )
    rate = (
        679e12
        if narrow >= 4096
        else 601e12
        if product.name == "head"
        else 650e12
        if product.name in ("gate_up", "down")
        else 560e12
    )
    return max(product.flops / rate, moved / COPY)


@pytest.mark.parametrize(
    "name, rank, tokens, states, heads, rates, expected",
    [
        (SMALL, 0, 16384, "fp32", 14, (374e12, 358e12), 160e3),
        (SMALL, 32, 16384, "fp32", 14, (374e12, 358e12), 185e3),
        (LARGE, 0, 8192, "bf16", 32, (505e12, 414e12), 12.6e3),
        (LARGE, 32, 8192, "fp32", 32, (505e12, 414e12), 18e3),
    ],
)
def test_reference_steps_at_the_ceilings_of_an_h200(
    name, rank, tokens, states, heads, rates, expected
):
    measured = shape(name)
    job = Job(
        measured,
        tokens,
        2048,
        rank,
        optimizer_bytes=optimizer_bytes("bf16", states, adapters=rank > 0),
    )
    a_layer = attention_flops(job) / measured.layers * tokens
    found = reference_step(job, COPY, ceiling, a_layer / rates[0] + 2.5 * a_layer / rates[1])
    assert found.tokens_per_second == pytest.approx(expected, rel=0.07)
    assert found.seconds == pytest.approx(
        sum(
            getattr(found, part)
            for part in ("products", "attention", "elementwise", "loss", "optimizer")
        )
    )


MEASURED = ReferenceStep(
    products=0.06, attention=0.02, elementwise=0.01, loss=0.002, optimizer=0.003, tokens=1000
)


@pytest.mark.parametrize(
    ("step_seconds", "products"),
    [
        (0.1, 0.055),
        (0.2, 0.055),
        (0.08, 0.044),
    ],  # the kinds take 0.1 s: as they are, as they are, and less by a fifth
)
def test_no_part_of_a_reference_step_takes_longer_than_in_a_step_that_was_seen(
    step_seconds, products
):
    profile = {
        "products": 0.055,
        "attention": 0.03,
        "elementwise": 0.008,
        "copies": 0.004,
        "gaps": 0.003,
    }
    found = MEASURED.best_seen(profile, step_seconds)
    assert found.products == pytest.approx(products)
    assert (found.attention, found.loss) == (0.02, 0.002)
    assert found.elementwise == pytest.approx(products / 55 * 8)
    assert found.seconds <= step_seconds


def test_a_reference_step_is_read_as_it_was_written():
    assert ReferenceStep.from_dict(asdict(MEASURED)) == MEASURED


def test_optimizer_bytes_by_what_is_kept():
    assert optimizer_bytes("bf16", "fp32", adapters=False) == 2 + 4 + 4 + 16
    assert optimizer_bytes("bf16", "bf16", adapters=False) == 2 + 4 + 4 + 8
    assert optimizer_bytes("bf16", "bf16", adapters=False, master=False) == 2 + 4 + 8
    assert optimizer_bytes("bf16", "fp32", adapters=True) == 4 + 8 + 16
    assert optimizer_bytes("fp32", "fp32", adapters=False) == 4 + 8 + 16
    assert optimizer_bytes("bf16", "8bit", adapters=False) == 2 + 4 + 4 + 4 * (1 + 1 / 64)
    assert (
        optimizer_bytes("bf16", "8bit", adapters=False, full=0.5)
        == 2 + 4 + 4 + 2 * (1 + 1 / 64) + 8
    )
    assert optimizer_bytes("fp32", "8bit", adapters=True, full=1.0) == optimizer_bytes(
        "fp32", "fp32", adapters=True
    )


def test_only_the_adapted_projections_are_counted():
    """Of q and v alone, at rank 2: what their two matrices hold, and products for them and no
    other.
    """
    shape = DecoderShape(
        layers=3, width=8, heads=2, kv_heads=1, head_dim=4, inner=20, vocabulary=50, experts=0
    )
    job = Job(shape, tokens=10, mean_length=5.0, rank=2, adapted=("q_proj", "v_proj"))
    assert job.adapter_parameters == 3 * 2 * ((8 + 8) + (8 + 4))
    found = {(p.name, p.kind): (p.inputs, p.outputs, p.count) for p in products(job)}
    assert found["qkv", "forward"] == (8 + 4, 16, 3) and found["qkv", "dX"] == (8, 16 + 4, 2)
    assert found["out", "forward"] == (8, 8, 3)
    thin = {key: sizes for key, sizes in found.items() if key[0].endswith((" A", " B"))}
    a = (8, 4, 3)
    b = (4, 16, 3)
    assert thin == {("qkv A", "forward"): a, ("qkv A", "dW"): a, ("qkv B", "dW"): b}


def test_weights_in_4_bits_are_read_and_written_twice_a_step_whatever_its_tokens():
    """But for the first layer's queries, keys and values, whose input has no gradient."""
    shape = DecoderShape(
        layers=3, width=8, heads=2, kv_heads=1, head_dim=4, inner=20, vocabulary=50, experts=0
    )
    job = Job(shape, tokens=10, mean_length=5.0, rank=2)
    packed = replace(job, dequantised_bytes=2.5)
    layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 20
    assert dequantised_bytes(job) == 0 and dequantised_bytes(packed) == 2.5 * (
        2 * 3 * layer - 8 * (8 + 2 * 4)
    )
    plain, found = (reference_step(one, 1e3, lambda product: 1.0, 1.0) for one in (job, packed))
    assert found.elementwise - plain.elementwise == pytest.approx(dequantised_bytes(packed) / 1e3)
    assert found.products == plain.products and needed_flops(job) == needed_flops(packed)


def test_of_a_mixture_in_4_bits_all_experts_are_dequantised():
    """However few a token meets; routers are in 16 bits."""
    shape = DecoderShape(3, 8, 2, 1, 4, 20, 50, experts=6, chosen=2)
    job = Job(shape, tokens=10, mean_length=5.0, rank=2, dequantised_bytes=2.5)
    layer = 8 * (8 + 2 * 4) + 8 * 8 + 6 * 3 * 8 * 20
    assert dequantised_bytes(job) == 2.5 * (2 * 3 * layer - 8 * (8 + 2 * 4))


def test_adapters_that_are_not_counted_have_no_mfu():
    job = Job(shape(SMALL), 16384, 2048, 32)
    assert (
        mfu(job, 1.0, "NVIDIA H200") and mfu(replace(job, uneven=True), 1.0, "NVIDIA H200") is None
    )


def test_one_layer_under_adapters_has_no_gradient_of_its_input():
    """What does not occur is not among the products."""
    job = Job(DecoderShape(1, 64, 4, 2, 16, 128, 1024, 0, 10**5), 1000, 500.0, rank=8)
    found = products(job)
    assert all(product.count == 1 for product in found)
    assert ("qkv", "dX") not in {(product.name, product.kind) for product in found}
