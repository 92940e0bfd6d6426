"""Seconds of a step by part, against sums worked out by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import runs
import tiny
from chronicals.cards.rates import AttentionRate, Rates
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import quantise_layers
from chronicals.objectives import FrozenModel
from chronicals.planning import Documents, Machines, plan
from chronicals.policies.frozen_models import Held
from chronicals.policies.model_sizes import weights_met
from chronicals.policies.step_time import GROUPED

ALL = {**runs.FULL, "batch_size": 2, "max_seq_length": 1024}
ROUND = Rates(
    card="round",
    source="measured",
    origin="a test",
    versions={},
    memory=10**13,
    copy=1e12,
    elementwise=1e12,
    dequantise=1e12,
    products={"bf16": ((1e-9, 1e14), (1e9, 1e14)), "fp8": ((1e-9, 2e14), (1e9, 2e14))},
    attention=(AttentionRate(128, 1, 1e14, 1e14), AttentionRate(128, 2048, 1e14, 1e14)),
    host=1e10,
    launch=1e-12,
    gap=1e-12,
    backend="",
)


@pytest.fixture
def timed(tmp_path):
    return partial(time_of, tmp_path)


def time_of(
    folder, rates=ROUND, documents=None, packed=False, rank=0, gpus=1, frozen=None, **fields
):
    model = tiny.planned()
    if packed:
        quantise_layers(model)
    values = {**ALL, **fields}
    if rank:
        model = apply_lora(model, LoRAConfig(rank=rank, target_modules="all-linear"))
        values |= {"use_lora": True, "lora_rank": rank}
    config = runs.config(folder, **values)
    machines = Machines(memory=rates.memory, rates=rates)
    return plan(model, config, gpus, machines, frozen, documents or Documents()).time


def weights():
    model = tiny.planned()
    met, trained = weights_met(model)
    assert met == trained
    return met, 2048 * 32000


def test_parts_of_a_step_are_those_of_the_formulas(timed):
    """6 FLOPs a weight and token; attention with two products forward and five backward; bytes at
    the rate of copies; AdamW with an exact master, and the gradients' norm."""
    met, head = weights()
    step = timed()
    tokens = 2048
    assert step.products == pytest.approx(6 * met * tokens / 1e14, rel=1e-6)
    attention = 2 * 4 * 16 * 128 * 1025 * tokens
    assert step.attention == pytest.approx(3.5 * attention / 1e14)
    queries, keys = 2048, 512
    bytes_ = 4 * 2 * (16 * 2048 + 4 * (queries + keys) + 8 * 8192 + 7 * queries)
    assert step.elementwise == pytest.approx(bytes_ * tokens / 1e12)
    # one chunk of logits: written and read, and the head's gradient summed in fp32
    assert step.loss == pytest.approx((4 * 32000 * tokens + 8 * head) / 1e12)
    trained = met + head + (2 * 4 + 1) * 2048  # the embedding, too, and norms
    assert step.optimizer == pytest.approx((26 + 2) * trained / 1e12, rel=1e-3)
    assert step.copies == 0
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert list(step.parts) == [
        "products",
        "attention",
        "elementwise",
        "loss",
        "optimizer",
        "copies",
        "launches",
    ]


def test_a_plan_takes_as_long_as_the_parts_together(tmp_path):
    model = tiny.planned()
    config = runs.config(tmp_path, **ALL)
    made = plan(model, config, 1, Machines(memory=10**13, rates=ROUND))
    assert made.seconds == made.time.seconds == sum(made.time.parts.values())
    assert all(seconds > 0 for name, seconds in made.time.parts.items() if name != "copies")
    shortest, longest = made.interval
    assert (shortest, longest) == (pytest.approx(0.9 * made.seconds), 1.1 * made.seconds)
    sheet = replace(ROUND, source="data sheet")
    wider = plan(model, config, 1, Machines(memory=10**13, rates=sheet)).interval
    assert wider == (pytest.approx(0.85 * made.seconds), pytest.approx(1.15 * made.seconds))


def test_layers_that_are_recomputed_cost_what_their_backward_pass_reads(timed):
    """All products forward but the last, attention, and elementwise operations."""
    once = timed()
    again = timed(memory=["recompute_layers"])
    layer = 2048 * (2048 + 2 * 512) + 2048**2 + 2 * 2048 * 8192  # without down
    assert again.products - once.products == pytest.approx(2 * 4 * layer * 2048 / 1e14)
    assert again.attention == pytest.approx(4.5 / 3.5 * once.attention)
    assert once.elementwise < again.elementwise < 1.6 * once.elementwise
    cheap = timed(memory=["recompute_elementwise"])
    assert cheap.products == once.products and cheap.attention == once.attention
    added = 4 * 2 * (4 * 2048 + 3 * 8192) * 2048 / 1e12
    assert cheap.elementwise - once.elementwise == pytest.approx(added)


def test_frozen_weights_have_no_product_for_their_gradient(timed):
    """Adapters do; and nobody needs the gradient of the first layer's input."""
    full = timed()
    lora = timed(rank=8)
    met, head = weights()
    body = met - head
    first = 2048 * (2048 + 2 * 512)
    low = (4 * body - 2 * first + 4 * head) * 2048 / 1e14
    assert low < lora.products < 1.03 * low < full.products
    assert lora.optimizer < 0.02 * full.optimizer


def test_fewer_rows_of_logits_are_slower_products_and_more_sums(timed):
    """Where few rows are slow the head is: its logits, and the gradient of its inputs."""
    bent = replace(ROUND, products={"bf16": ((1.0, 1e11), (1000.0, 1e14))})
    usual = timed(bent, logits_chunk_size=2048)
    fewer = timed(bent, logits_chunk_size=512)
    _, head = weights()
    intensity = [1 / (1 / rows + 1 / 2048 + 1 / 32000) for rows in (2048, 512)]
    seconds = [2 * 2 * head * 2048 / (1e11 * each) for each in intensity]
    assert fewer.products - usual.products == pytest.approx(seconds[1] - seconds[0], rel=1e-6)
    assert fewer.loss - usual.loss == pytest.approx(3 * 8 * head / 1e12)


def test_products_of_experts_are_grouped(tmp_path):
    """Which takes longer than a dense one of as many rows, and a recomputed layer has them all."""
    sizes = {
        **tiny.PLANNED,
        "moe_intermediate_size": 1024,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, head_dim=128))
    machines = Machines(memory=10**13, rates=ROUND)
    once, again = (
        plan(model, runs.config(tmp_path, **ALL, memory=memory), 1, machines).time.products
        for memory in ([], ["recompute_layers"])
    )
    experts = 4 * 2 * 3 * 2048 * 1024
    dense = 4 * (2048 * (2048 + 2 * 512) + 2048**2 + 2048 * 8)
    of_all = 6 * (experts / GROUPED + dense + 2048 * 32000) * 2048 / 1e14
    assert once == pytest.approx(of_all, rel=1e-6)
    assert again - once == pytest.approx(2 * (experts / GROUPED + dense) * 2048 / 1e14, rel=1e-6)


def test_micro_batches_repeat_all_but_the_update(timed):
    """And each adds its gradients to fp32 sums, which are read and written."""
    one = timed()
    four = timed(gradient_accumulation_steps=4)
    for name in ("products", "attention", "loss", "launches"):
        assert four.parts[name] == pytest.approx(4 * one.parts[name]), name
    met, head = weights()
    trained = met + head + (2 * 4 + 1) * 2048
    assert four.elementwise - 4 * one.elementwise == pytest.approx(4 * 8 * trained / 1e12)
    assert four.optimizer == one.optimizer


def test_weights_in_4_bits_are_dequantised_for_both_passes(timed):
    dense = timed(rank=8)
    packed = timed(rank=8, packed=True, quantization="nf4")
    met, head = weights()
    values = 2 * (met - head) - 2048 * (2048 + 2 * 512)
    least = values * 2.5 / 1e12  # half a byte read and two written
    added = packed.elementwise - dense.elementwise
    assert least < added < 1.05 * least


def test_offloaded_activations_cost_what_computation_does_not_hide(timed):
    fast = replace(ROUND, host=1e15)
    assert timed(fast, memory=["offload_activations"]).copies == 0
    slow = timed(replace(ROUND, host=1e8), memory=["offload_activations"])
    slower = timed(replace(ROUND, host=5e7), memory=["offload_activations"])
    assert slower.copies > 2 * slow.copies > 0
    layers = timed(replace(ROUND, host=1e8), memory=["offload_activations", "recompute_layers"])
    assert layers.copies < slow.copies / 4  # inputs of layers alone


def test_states_in_host_memory_come_and_go(timed):
    here = timed()
    away = timed(memory=["offload_optimizer_states"])
    assert here.copies == 0 and away.copies > 8 * 2048 * 8192 * 3 * 4 / 1e10 - here.optimizer


def test_a_slow_host_is_waited_for_unless_the_card_replays(timed):
    slow = replace(ROUND, launch=1e-2, gap=1e-6)
    replayed = timed(slow)
    launched = timed(slow, use_cuda_graphs=False)
    assert replayed.launches < 1e-3 < 1 < launched.launches
    assert launched.seconds == pytest.approx(
        launched.launches + replayed.seconds - replayed.launches
    )
    fast = replace(ROUND, launch=1e-9, gap=1e-6)
    assert timed(fast, use_cuda_graphs=False).launches == replayed.launches


def test_a_slow_host_launches_the_mlp_of_every_tile(timed):
    """8,192 tokens are two tiles: of a layer's MLP one more, and two more forward passes.

    Forward are two products and the unit, backward two gradients of each and the unit.
    """
    slow = replace(ROUND, launch=1e-2, gap=1e-6)
    plain = {"use_cuda_graphs": False, "batch_size": 8}
    whole, tiled = (timed(slow, **plain, memory=memory) for memory in ([], ["tiled_mlp"]))
    others = [each.seconds - each.launches for each in (whole, tiled)]
    more = 4 * ((3 + 5) + 2 * 3)
    assert tiled.seconds - whole.seconds == pytest.approx(more * 1e-2)
    assert others[1] > others[0]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"memory": ["tiled_mlp"]}, "products"),
        ({"use_fp8": True}, "elementwise"),
        ({"rank": 8, "lora_dropout": 0.1}, "elementwise"),
    ],
)
def test_what_a_policy_costs_is_in_its_part(fields, part, timed):
    plain = timed(rank=fields.get("rank", 0), lora_dropout=0.0, batch_size=8)
    assert timed(**{"lora_dropout": 0.0, "batch_size": 8, **fields}).parts[part] > plain.parts[part]


TEACHER = {"distill": {"teacher": "another"}, "objective": "distill"}


def teacher(layers, precision="bf16"):
    """A frozen model of so many layers."""
    model = tiny.planned(num_hidden_layers=layers)
    return {"teacher": Held.planned(FrozenModel("teacher", "another", precision, ""), model)}


def test_a_teacher_takes_a_forward_pass(timed):
    """A third of the products of a student of its sizes, and two of seven of attention."""
    alone = timed(objective="sft")
    taught = timed(**TEACHER, frozen=teacher(4))
    assert taught.products == pytest.approx(4 / 3 * alone.products, rel=1e-6)
    assert taught.attention == pytest.approx(4.5 / 3.5 * alone.attention)
    assert alone.elementwise < taught.elementwise < 1.5 * alone.elementwise
    larger = timed(**TEACHER, frozen=teacher(40))
    met, head = weights()
    nine = 2 * 9 * (met - head) * 2048 / 1e14
    assert larger.products - taught.products == pytest.approx(nine, rel=1e-6)
    packed = timed(**TEACHER, frozen=teacher(4, "nf4"))
    assert packed.elementwise > taught.elementwise and packed.products == taught.products
    four = timed(**TEACHER, frozen=teacher(4), gradient_accumulation_steps=4)
    assert four.products == pytest.approx(4 * taught.products)
    stored = {"teacher": "another", "stored_tokens": 8}
    assert timed(objective="distill", distill=stored).products == alone.products


def test_a_reference_takes_a_forward_pass_without_adapters(timed):
    met, _ = weights()
    odds = timed(rank=8, objective="orpo")
    reference = timed(rank=8, objective="dpo")
    added = reference.products - odds.products
    assert added == pytest.approx(2 * met * 2048 / 1e14, rel=1e-6)
    assert timed(rank=8, objective="dpo", dpo={"reference": "stored"}).products == odds.products
    judged = timed(rank=8, objective="kto")
    assert 2 * added < judged.products - odds.products < 2.05 * added
    eight = timed(rank=8, objective="dpo", use_fp8=True).products
    assert eight < timed(rank=8, objective="orpo", use_fp8=True).products + 0.8 * added


def test_the_host_launches_what_comes_before_a_step(timed):
    """Both passes of KTO; the reference of DPO and a teacher are in what the card replays."""
    slow = replace(ROUND, launch=1e-2, gap=1e-6)
    judged = timed(slow, rank=8, objective="kto")
    assert judged.seconds == pytest.approx(1e-2 * 4 * (4 + 8 + 2 * 22 / 3), rel=0.01)
    assert timed(slow, rank=8, objective="dpo").launches < 1e-3
    assert timed(slow, **TEACHER, frozen=teacher(4)).launches < 1e-3


def test_what_the_loss_of_answers_computes_again_is_counted(timed):
    """Logits for their gradient, and what gathers the keys of prompts that answers share."""
    tokens = timed()
    odds = timed(objective="orpo")
    _, head = weights()
    assert odds.products - tokens.products == pytest.approx(2 * head * 2048 / 1e14)
    assert odds.loss - tokens.loss == pytest.approx(2 * 32000 * 2048 / 1e12)
    gathered = 2 * 4 * 512 * 2048
    assert odds.elementwise - tokens.elementwise == pytest.approx(118 * gathered / 1e12)


def test_products_in_fp8_are_faster(timed):
    assert timed(use_fp8=True).products < 0.9 * timed().products


def test_what_is_known_of_the_data(timed):
    """Shorter documents attend to less; where fewer tokens are targets, the head computes less."""
    whole = timed()
    short = timed(documents=Documents(length=256))
    assert short.attention == pytest.approx(257 / 1025 * whole.attention)
    assert short.products == whole.products
    half = timed(documents=Documents(labelled=0.5))
    _, head = weights()
    assert whole.products - half.products == pytest.approx(6 * head * 1024 / 1e14)
    assert half.loss < whole.loss


def test_a_single_rate_stands_instead_of_the_parts(tmp_path):
    model = tiny.planned()
    config = runs.config(tmp_path, **ALL)
    made = plan(model, config, 1, Machines(memory=10**13, flops=1e14))
    assert made.time is None and made.interval == (made.seconds, made.seconds)
    assert made.to_dict()["time"] is None
