"""Plans for cards that are not there: bytes as the formulas say, memory as the trainer expects
it.
"""

import json
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import runs
import tiny
from chronicals.cli.app import app
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh, shard_embedding, shard_frozen
from chronicals.lora import apply_lora
from chronicals.lora.config import LoRAConfig
from chronicals.memory import RESERVE, decoder_layers
from chronicals.models import present, quantise_layers
from chronicals.planning import Machines, plan, traffic
from chronicals.planning.plan import _flops_a_token
from chronicals.planning.traffic import Traffic, gathered_in_passes
from chronicals.policies import Facts, decide, facts, needed_memory
from chronicals.policies.needed_memory import WORKSPACE_BYTES, expected_memory, gathered_bytes
from chronicals.policies.policy import GRAPHED_WORKSPACES, WORKSPACES

GB = 10**9


def trained(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_bytes_are_those_of_the_formulas(ranks, tmp_path):
    """Within 1 %: fp32 gradients reduce-scattered, bf16 weights gathered."""
    model = tiny.planned()
    share = (ranks - 1) / ranks
    sent = traffic(model, runs.config(tmp_path, **runs.FULL), ranks, in_backward=False)
    count = trained(model)
    assert sent.reduce_scatter == pytest.approx(4 * count * share, rel=0.01)
    assert sent.all_gather == pytest.approx(2 * count * share, rel=0.01)
    assert 0 < sent.all_reduce < 4096 and sent.attention == 0
    assert not dist.is_initialized()


@pytest.mark.slow
def test_each_micro_batch_is_sent_where_the_backward_pass_sums(tmp_path):
    config = runs.config(tmp_path, **{**runs.FULL, "gradient_accumulation_steps": 3})
    once, often = (traffic(tiny.planned(), config, 4, in_backward) for in_backward in (False, True))
    assert often.reduce_scatter == 3 * once.reduce_scatter and often.all_gather == once.all_gather


@pytest.mark.slow
def test_adapters_send_their_own_bytes(tmp_path):
    model = apply_lora(tiny.planned(), LoRAConfig(rank=64))
    sent = traffic(model, runs.config(tmp_path, use_lora=True, lora_rank=64), 2, in_backward=False)
    count = trained(model)
    assert 0 < count < 0.1 * sum(p.numel() for p in model.parameters())
    assert sent.reduce_scatter == sent.all_gather == pytest.approx(4 * count / 2, rel=0.01)


def test_without_shares_gradients_are_reduced_everywhere(tmp_path):
    model = tiny.planned()
    sent = traffic(model, runs.config(tmp_path, **runs.FULL, sharding="none"), 8, in_backward=False)
    assert sent.all_reduce == pytest.approx(8 * trained(model) * 7 / 8, rel=0.01)
    assert sent.reduce_scatter == sent.all_gather == 0


@pytest.mark.parametrize(("ranks", "among"), [(8, None), (16, 4)])
def test_bytes_of_divided_weights(ranks, among, tmp_path):
    """Layers gathered in bf16 for both passes, the rest once, gradients sent in bf16; copies add
    up what they hold.
    """
    model = tiny.planned()
    config = runs.config(tmp_path, **runs.FULL, sharding="weights", sharding_ranks=among)
    sent = traffic(model, config, ranks, in_backward=False)
    share = ((among or ranks) - 1) / (among or ranks)
    layers = sum(p.numel() for p in model.get_decoder().layers.parameters())
    assert sent.all_gather == pytest.approx(2 * (trained(model) + layers) * share, rel=0.01)
    assert sent.reduce_scatter == pytest.approx(2 * trained(model) * share, rel=0.01)
    copies = ranks // (among or ranks)
    assert sent.all_reduce == pytest.approx(
        8 * trained(model) / (among or ranks) * (copies - 1) / copies, rel=0.01
    )


@pytest.mark.slow
def test_bytes_of_divided_codes(tmp_path):
    """About half a byte a weight of the layers, in each pass of each micro-batch, but for the
    backward pass of the last two layers, which are there still; beside the sums of adapters."""
    model = tiny.planned(num_hidden_layers=6)
    layers = sum(p.numel() for p in model.get_decoder().layers.parameters())
    quantise_layers(model)
    model = apply_lora(model, LoRAConfig(rank=64))
    fields = {
        "use_lora": True,
        "lora_rank": 64,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 3,
    }
    whole, divided = (
        traffic(model, runs.config(tmp_path, **fields, sharding=way), 4, in_backward=False)
        for way in ("optimizer", "weights")
    )
    assert divided.reduce_scatter == whole.reduce_scatter and divided.all_reduce == whole.all_reduce
    assert divided.all_gather - whole.all_gather == pytest.approx(
        3 * (6 + 4) / 6 * 0.516 * layers * 3 / 4, rel=0.01
    )


@pytest.mark.slow
def test_what_stays_whole_is_not_gathered(tmp_path):
    """3 cards divide the 6144 rows of MLPs, not the 2048 or 512 of the others."""
    fields = {"lora_rank": 64, "mixed_precision": "bf16", "gradient_accumulation_steps": 1}
    config = runs.config(tmp_path, use_lora=True, **fields, sharding="weights")
    model = apply_lora(
        tiny.planned(num_hidden_layers=6, intermediate_size=6144), LoRAConfig(rank=64)
    )
    divided = traffic(model, config, 3, in_backward=False).all_gather
    whole = traffic(model, config.fitted(sharding="optimizer"), 3, in_backward=False).all_gather
    assert divided - whole == pytest.approx((6 + 4) * 2 * (2 * 6144 * 2048) * 2 / 3, rel=0.01)


@pytest.mark.slow
def test_a_mixture_in_4_bits(tmp_path):
    """Its experts stay whole, however small the card; a token meets some of them."""
    import transformers

    sizes = {
        **tiny.PLANNED,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "head_dim": 128,
    }
    with torch.device("meta"):
        model, plain = (
            transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)) for _ in range(2)
        )
    experts = 4 * 8 * 3 * 2048 * 512
    others = (
        sum(p.numel() for p in plain.parameters() if p.ndim == 2)
        - plain.model.embed_tokens.weight.numel()
    )
    quantise_layers(model)
    fields = {"mixed_precision": "bf16", "lora_rank": 8, "batch_size": 1, "max_seq_length": 512}
    config = runs.config(tmp_path, quantization="nf4", **fields)
    apply_lora(model, LoRAConfig(rank=8, target_modules=["q_proj"])), plain.requires_grad_(False)
    attention = 3.5 * 2 * 4 * 16 * 128 * 512
    for each, tolerance in ((plain, 1e-6), (model, 1e-2)):
        products = 4 * (others + experts * 2 / 8)
        assert _flops_a_token(each, config, 0.0) == pytest.approx(
            products + attention, rel=tolerance
        )
    small = plan(model, config, 4, Machines(memory=GB // 10))
    assert not small.fits and small.sharding == "optimizer"
    sixteen = runs.config(tmp_path, use_lora=True, **fields)
    saved = plan(plain, sixteen, 1, Machines()).held - plan(model, config, 1, Machines()).held
    assert saved > 1.2 * experts


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "among"), [(4, None), (8, 2)])
def test_bytes_of_a_divided_embedding(ranks, among, tmp_path):
    """Of each micro-batch: ids of 8 bytes to all, and rows in 16 bit in as many parts as there
    are ranks.
    """
    fields = {
        "use_lora": True,
        "lora_rank": 64,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 3,
    }
    config = runs.config(
        tmp_path,
        **fields,
        batch_size=2,
        max_seq_length=512,
        sharding="weights",
        sharding_ranks=among,
    )
    sent = traffic(
        apply_lora(tiny.planned(), LoRAConfig(rank=64)), config, ranks, in_backward=False
    )
    tokens = 2 * 512
    share = among or ranks
    assert (
        sent.embedding == 3 * (share - 1) * (8 * tokens + 2 * tokens * 2048 / share)
        and sent.total > sent.embedding
    )
    tied = apply_lora(tiny.planned(tie_word_embeddings=True), LoRAConfig(rank=64))
    assert traffic(tied, config, ranks, in_backward=False).embedding == 0


@pytest.mark.parametrize("sharding", ["optimizer", "weights"])
def test_gradients_of_one_micro_batch_come_as_activations_go(sharding, tmp_path):
    """They stay for the next micro-batch, and where CUDA graphs write them."""

    def expected(count, graphs):
        fields = {
            **runs.FULL,
            "gradient_accumulation_steps": count,
            "sharding": sharding,
            "use_cuda_graphs": graphs,
        }
        facts = Facts(runs.config(tmp_path, **fields), tiny.planned(), 2, total=100 * GB)
        return expected_memory(facts)[1]

    once = expected(1, False)
    often = expected(2, False)
    assert often.gradients == 0 and often.fixed - once.fixed == once.gradients
    graphed = expected(1, True)
    alike = once if sharding == "weights" else often  # no graphs run where these are divided
    more = (GRAPHED_WORKSPACES - WORKSPACES) * WORKSPACE_BYTES
    assert graphed.gradients == alike.gradients and graphed.fixed == alike.fixed + more
    assert once.gradients >= 4 * trained(tiny.planned()) / (2 if sharding == "weights" else 1)


def test_gradients_of_adapters_over_divided_weights_stay_where_graphs_write_them(tmp_path):
    def expected(graphs):
        fields = {
            **runs.FULL,
            "use_lora": True,
            "gradient_accumulation_steps": 1,
            "sharding": "weights",
            "use_cuda_graphs": graphs,
        }
        model = apply_lora(tiny.planned(), LoRAConfig(rank=64))
        facts = Facts(runs.config(tmp_path, **fields), model, 2, total=100 * GB)
        return expected_memory(facts)[1]

    usual = expected(False)
    graphed = expected(True)
    more = (GRAPHED_WORKSPACES - WORKSPACES) * WORKSPACE_BYTES
    assert graphed.gradients == 0 < usual.gradients
    assert graphed.fixed - usual.fixed == usual.gradients + more


@pytest.mark.parametrize("kind", ["LoRA", "LoRA over NF4"])
@pytest.mark.parametrize("among", [2, 4])
def test_memory_of_divided_frozen_weights(kind, among, tmp_path):
    """The same before they are divided and afterwards; less by a share of the embedding where
    that is divided, too.
    """
    config = runs.config(
        tmp_path, use_lora=True, mixed_precision="bf16", sharding="weights", memory=[]
    )
    table = tiny.PLANNED["vocab_size"] * tiny.PLANNED["hidden_size"]

    def held(tied, divided=False):
        model = tiny.planned(tie_word_embeddings=tied).bfloat16()
        if "NF4" in kind:
            quantise_layers(model)
        apply_lora(model, LoRAConfig(rank=8))
        if divided:
            shard_frozen(
                decoder_layers(model), Mesh(0, among), among, torch.device("meta"), torch.bfloat16
            )
            shard_embedding(model, 0, among, torch.device("meta"))
        return expected_memory(Facts(config, model, among, total=GB))[1].fixed

    assert held(False) - held(True) == 2 * table // among
    assert held(False, divided=True) == pytest.approx(held(False), rel=1e-3)
    assert held(True, divided=True) == pytest.approx(held(True), rel=1e-3)


@pytest.mark.slow
def test_weights_are_divided_where_they_would_not_fit(tmp_path):
    model = tiny.planned(num_hidden_layers=16)
    config = runs.config(tmp_path, **runs.FULL, batch_size=1, max_seq_length=64)
    small = Machines(memory=GB, cards=64)  # where both do what they can
    whole, divided = (
        plan(model, config.replace(sharding=way), 64, small) for way in ("optimizer", "weights")
    )
    assert divided.held < 0.95 * whole.held
    between = Machines(memory=int((whole.held + divided.held) / 2 / RESERVE), cards=64)
    chosen = plan(model, config, 64, between)
    assert chosen.sharding == "weights" and chosen.fits
    assert (
        plan(model, config, 64, Machines()).sharding
        == plan(model, config, 1, between).sharding
        == "optimizer"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("context", "recomputed"), [(2, 0), (4, 3)])
def test_ranks_that_share_packs_exchange_heads(context, recomputed, tmp_path):
    """(2 H + 2 K) · D values a token of each rank, (c − 1) / c of them sent, forward, backward
    and forward again.
    """
    config = runs.config(
        tmp_path, **runs.FULL, batch_size=2, max_seq_length=1024, context_parallel=context
    )
    sent = traffic(tiny.planned(), config, 8, False, recomputed)
    tokens = 2 * 1024 // context
    values = (2 * 16 + 2 * 4) * 128
    assert sent.attention == 2 * tokens * values * (context - 1) / context * (2 * 4 + recomputed)


@pytest.mark.slow
@pytest.mark.parametrize(("context", "recomputed"), [(2, 0), (3, 3)])
def test_ranks_that_share_packs_gather_keys(context, recomputed, tmp_path):
    """2 K · D values a token of the others, forward and forward again, and their gradients in
    fp32.
    """
    config = runs.config(
        tmp_path,
        **runs.FULL,
        batch_size=1,
        max_seq_length=768,
        context_parallel=context,
        context_heads=1,
    )
    sent = traffic(tiny.planned(), config, 6, False, recomputed)
    others = 768 * (context - 1) / context
    values = 2 * 4 * 128
    assert sent.attention == others * values * (2 * (4 + recomputed) + 4 * 4)


@pytest.mark.slow
def test_ranks_that_share_packs_over_machines_exchange_heads_within_each(tmp_path):
    fields = {**runs.FULL, "batch_size": 2, "max_seq_length": 1024, "context_parallel": 4}
    config = runs.config(tmp_path, **fields)
    near, far = (
        traffic(tiny.planned(), config, 8, False, cards=cards).attention for cards in (8, 2)
    )
    asked = traffic(
        tiny.planned(), runs.config(tmp_path, **fields, context_heads=2), 8, False
    ).attention
    assert near != far == asked


def test_a_process_that_trains_with_others_does_not_plan(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="plan in a process of its own"):
            traffic(tiny.planned(), runs.config(tmp_path, **runs.FULL), 2, False)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["all weights", "LoRA", "LoRA over NF4"])
def test_memory_is_what_the_trainer_expects(kind, ranks, tmp_path, plant):
    fields = {**runs.FULL, "use_lora": kind != "all weights", "max_seq_length": 512, "memory": []}
    fields["use_cuda_graphs"] = False  # the trainer's model is on the CPU
    config = runs.config(tmp_path, **fields)
    found = []
    models = [tiny.llama(**tiny.PLANNED) if kind == "all weights" else tiny.llama(), None]
    models[1] = (
        tiny.planned()
        if kind == "all weights"
        else tiny.planned(**{name: getattr(models[0].config, name) for name in tiny.PLANNED})
    )
    for model in models:
        if "NF4" in kind:
            quantise_layers(model)
        if kind != "all weights":
            apply_lora(model, LoRAConfig(rank=8))

    def noted(estimate, *given):
        found.append(estimate(*given))
        return found[-1]

    planned = []

    def noted_plan(expected_memory, facts):
        planned.append(expected_memory(facts))
        return planned[-1]

    plant(needed_memory, "estimate", noted)
    plant(import_module("chronicals.planning.plan"), "expected_memory", noted_plan)
    decide(Facts.of(config, present(models[0], True, True, pack_width=512), ranks=ranks))
    made = plan(models[1], config, ranks, Machines(memory=10**15))
    assert made.fits and made.recomputed == 0 and found[1].fixed == found[0].fixed > 0
    assert found[1].gradients == found[0].gradients
    # Beside what both have, a card's plan has the workspaces of its kernels
    assert made.held == planned[0][1].needed("nothing") >= found[1].needed("nothing")


@pytest.mark.parametrize(
    ("memory", "again", "kept"),
    [
        ([], 0, "nothing"),
        (["recompute_layers"], 4, "layers"),
        (["recompute_elementwise"], 0, "norms and gated units"),
    ],
)
def test_what_is_asked_for_is_recomputed(memory, again, kept, tmp_path):
    """Whether it fits or not."""
    config = runs.config(tmp_path, **runs.FULL, memory=memory)
    made = plan(tiny.planned(), config, 1, Machines(memory=GB))
    _, needed = expected_memory(Facts(config, tiny.planned(), total=GB))
    assert made.recomputed == again and not made.fits
    assert made.held == needed.needed(kept) > needed.fixed + 3 * needed.kept[kept]


@pytest.mark.slow
def test_what_does_not_fit_is_said(tmp_path):
    config = runs.config(tmp_path, **runs.FULL)
    assert not plan(tiny.planned(), config, 1, Machines(memory=GB)).fits
    tight = plan(tiny.planned(), config, 2, Machines(memory=5 * GB))
    assert (
        tight.in_backward
        and not plan(tiny.planned(), config, 2, Machines(memory=100 * GB)).in_backward
    )


@pytest.mark.slow
def test_time_is_computation_and_what_nothing_hides(tmp_path):
    model = tiny.planned()
    config = runs.config(
        tmp_path, **runs.FULL, batch_size=1, max_seq_length=512, memory=["reduce_in_backward"]
    )
    machines = Machines(memory=100 * GB, cards=4, link=1e11, network=1e10, flops=1e12)
    near, far = (plan(model, config, gpus, machines) for gpus in (4, 8))
    products = trained(model) - model.model.embed_tokens.weight.numel()
    attention = 3.5 * 2 * 4 * 16 * 128 * 512
    assert _flops_a_token(model, config, 0.0) == pytest.approx(6 * products + attention, rel=1e-3)
    assert (
        near.computing
        == far.computing
        == pytest.approx(512 * (6 * products + attention) / 1e12, rel=1e-3)
    )
    assert near.exposed == pytest.approx((near.sent.all_gather + near.sent.all_reduce) / 1e11)
    after = plan(
        model,
        runs.config(tmp_path, **runs.FULL, batch_size=1, max_seq_length=512, memory=[]),
        4,
        machines,
    )
    assert after.exposed == pytest.approx(after.sent.total / 1e11) and not after.in_backward
    assert far.exposed > 10 * near.exposed and far.efficiency < near.efficiency < 1
    assert near.tokens_per_second == pytest.approx(
        4 * 512 / (near.computing + near.exposed + near.slowed)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("context", "rate"), [(2, 1e11), (8, 1e10)])
def test_ranks_that_share_packs_exchange_over_the_link_between_them(context, rate, tmp_path):
    """Within a machine of four cards over its link, whatever the others are connected by; beyond
    it over the network.
    """
    fields = {
        **runs.FULL,
        "batch_size": 1,
        "max_seq_length": 1024,
        "memory": [],
        "sharding": "optimizer",
    }
    config = runs.config(tmp_path, **fields, context_parallel=context)
    found = plan(
        tiny.planned(),
        config,
        16,
        Machines(memory=100 * GB, cards=4, link=1e11, network=1e10, flops=1e12),
    )
    others = found.sent.total - found.sent.attention
    assert found.sent.attention > 0 and not found.in_backward
    assert found.exposed == pytest.approx(others / 1e10 + found.sent.attention / rate)
    assert found.tokens == 16 // context * 1024
    assert found.computing == pytest.approx(
        1024 / context * _flops_a_token(tiny.planned(), config, 0.0) / 1e12
    )


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_ids_of_a_divided_embedding_are_those_of_a_rank(context, tmp_path):
    """Ranks that share packs ask for the rows of their own tokens."""
    model = apply_lora(tiny.planned(), LoRAConfig(rank=8))
    fields = {
        **runs.FULL,
        "use_lora": True,
        "batch_size": 2,
        "max_seq_length": 1024,
        "sharding": "weights",
    }
    sent = traffic(model, runs.config(tmp_path, **fields, context_parallel=context), 4, False)
    one = traffic(
        model, runs.config(tmp_path, **{**fields, "max_seq_length": 1024 // context}), 4, False
    )
    assert sent.embedding == one.embedding > 0


def test_all_that_is_sent_is_in_the_total():
    assert Traffic(1.0, 2.0, 4.0, 8.0, 16.0).total == 31.0


def test_layers_that_are_computed_twice_attend_twice(tmp_path):
    """2 FLOPs a token and weight that is multiplied by, and 2 heads x width x length of
    attention, of each layer again.
    """
    model = tiny.planned()
    config = runs.config(tmp_path, **runs.FULL, max_seq_length=512)
    products = trained(model) - model.model.embed_tokens.weight.numel()
    more = _flops_a_token(model, config, 1.0) - _flops_a_token(model, config, 0.0)
    assert more == pytest.approx(2 * products + 2 * 4 * 16 * 128 * 512, rel=1e-4)


@pytest.mark.parametrize("permitted", [True, False])
def test_nothing_is_recomputed_where_that_is_not_permitted(permitted, tmp_path):
    fields = {} if permitted else {"use_gradient_checkpointing": False}
    config = runs.config(tmp_path, **runs.FULL, batch_size=8, max_seq_length=1024, **fields)
    assert bool(plan(tiny.planned(), config, 1, Machines(memory=8 * GB)).recomputed) == permitted


def test_copies_of_divided_weights_are_summed_beside_the_last_backward_pass(tmp_path):
    fields = {
        **runs.FULL,
        "batch_size": 1,
        "max_seq_length": 512,
        "sharding": "weights",
        "sharding_ranks": 4,
        "memory": [],
    }
    slow = Machines(memory=100 * GB, cards=4, link=1e15, network=1e10, flops=1e13)
    one, four = (
        plan(
            tiny.planned(),
            runs.config(tmp_path, **{**fields, "gradient_accumulation_steps": count}),
            8,
            slow,
        )
        for count in (1, 4)
    )
    for found, micro_batches in ((one, 1), (four, 4)):
        hidden = min(found.sent.all_reduce / 1e10, found.computing * 2 / 3 / micro_batches)
        assert hidden > 0 and found.exposed == pytest.approx(
            found.sent.all_reduce / 1e10 - hidden, abs=1e-4
        )


DIVIDED = {**runs.FULL, "batch_size": 1, "max_seq_length": 512, "sharding": "weights", "memory": []}


def room_for(stay, config, model, gpus):
    """Bytes of a card on which so many layers and a half may stay gathered, and of what it holds
    beside them.
    """
    held = expected_memory(Facts(config, model, gpus, total=1))[1].needed("nothing")
    return int((held + (stay + 0.5) * gathered_bytes(Facts(config, model))) / RESERVE), held


@pytest.mark.parametrize(
    ("stay", "busy"), [(0, 0.0), (0, 0.75), (3, 0.75), (4, 0.75), (3, 1.5), (4, 100.0)]
)
def test_what_is_gathered_for_a_pass_is_hidden_beside_it(stay, busy, tmp_path):
    """Of the forward pass all layers and the rest, of the backward pass the layers that do not
    stay. ``busy``: how long the forward pass computes, beside what is gathered for it."""
    model = tiny.planned()
    config = runs.config(tmp_path, **DIVIDED)
    layer = sum(p.numel() for p in decoder_layers(model)[0].parameters())
    (memory, held) = room_for(stay, config, model, 8)
    forward, backward = (2 * count * 7 / 8 / 1e10 for count in (trained(model), (4 - stay) * layer))
    flops = 512 * _flops_a_token(model, config, 0.0) / (3 * busy * forward) if busy else 1e30
    made = plan(model, config, 8, Machines(memory=memory, link=1e10, flops=flops))
    assert made.stay == stay and made.recomputed == 0 and made.fits
    assert made.held == held + stay * gathered_bytes(Facts(config, model))
    assert made.sent == traffic(model, config, 8, False, stay=stay)
    summed = 2 * trained(model) * 7 / 8 / 1e10
    expected = max(0, forward - busy * forward) + max(0, backward + summed - 2 * busy * forward)
    assert made.exposed == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_fp16_gathers_fp32_that_autocast_reads(tmp_path):
    """Where layers are trained; frozen ones are gathered as products read them."""
    narrow, wide = (
        runs.config(tmp_path, **{**DIVIDED, "mixed_precision": name}) for name in ("bf16", "fp16")
    )
    model = tiny.planned()
    assert gathered_bytes(Facts(wide, model)) == 2 * gathered_bytes(Facts(narrow, model))
    assert (
        traffic(model, wide, 8, False).all_gather == 2 * traffic(model, narrow, 8, False).all_gather
    )
    apply_lora(model, LoRAConfig(rank=8))
    (first, _), (second, _) = (gathered_in_passes(model, config, 8) for config in (narrow, wide))
    assert first == second > 0


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0.0, 0.75, 100.0])
def test_adapters_over_divided_weights_are_summed_and_gathered_after_the_passes(busy, tmp_path):
    """By all cards of all machines; for the backward pass the last two layers are there."""
    model = tiny.planned(num_hidden_layers=6)
    layers = sum(p.numel() for p in model.get_decoder().layers.parameters())
    quantise_layers(model)
    model = apply_lora(model, LoRAConfig(rank=64))
    config = runs.config(
        tmp_path, **{**DIVIDED, "use_lora": True, "lora_rank": 64, "sharding_ranks": 4}
    )
    forward = 0.516 * layers * 3 / 4 / 1e8
    flops = 512 * _flops_a_token(model, config, 0.0) / (3 * busy * forward) if busy else 1e30
    made = plan(model, config, 16, Machines(cards=4, link=1e8, network=1e7, flops=flops))
    assert made.stay == 0
    afterwards = (
        made.sent.embedding / 1e8 + (2 * made.sent.reduce_scatter + made.sent.all_reduce) / 1e7
    )
    passes = max(0, forward - busy * forward) + max(0, forward * 4 / 6 - 2 * busy * forward)
    assert made.exposed == pytest.approx(passes + afterwards, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spare", "fields"),
    [
        (2, {}),
        (9, {}),
        (-1, {}),
        (2, {"memory": ["recompute_layers"]}),
        (2, {"memory": []}),
        (2, {"use_gradient_checkpointing": False}),
    ],
)
def test_as_many_layers_stay_as_the_trainer_lets_stay(spare, fields, tmp_path, let_return):
    usual = {name: value for name, value in DIVIDED.items() if name != "memory"}
    model = tiny.planned()
    config = runs.config(tmp_path, **{**usual, "max_seq_length": 16, **fields})
    memory, _ = room_for(spare, config, model, 8)
    let_return(facts, card_memory=memory)
    made = decide(Facts.of(config, present(model, True, True, pack_width=16), ranks=8))["sharding"]
    assert plan(model, config, 8, Machines(memory=memory)).stay == made.stay
    assert (made.stay > 0) == (spare > 0 and fields.get("memory") != ["recompute_layers"])


def test_cards_that_cannot_share_packs_are_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match="context_parallel=4: 6 cards cannot share packs 4 by 4"
    ):
        plan(tiny.planned(), runs.config(tmp_path, **runs.FULL, context_parallel=4), 6, Machines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        (
            ["--objective", "distill", "--teacher", "MODEL"],
            None,
        ),
        (
            ["--objective", "distill", "--teacher", "big", "--distill.stored-tokens", "8"],
            "the teacher big, which reads all",
        ),
        (
            ["--objective", "dpo", "--dpo.reference-model", "MODEL"],
            None,
        ),
        (
            ["--objective", "ipo", "--use-lora"],
            None,
        ),
        (
            ["--objective", "kto", "--no-use-lora"],
            "the reference policy: a forward pass over all data before the first step",
        ),
        (["--objective", "simpo"], None),
        ([], None),
    ],
    ids=str,
)
def test_passes_before_the_first_step_are_not_in_the_time_and_named(flags, beside, tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    flags = [flag.replace("MODEL", str(tmp_path)) for flag in flags]
    beside = beside and beside.replace("MODEL", str(tmp_path))
    shown = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--gpus", "1", *flags])
    assert shown.exit_code == 0, shown.output
    said = [
        line.removeprefix("Not in the time: ")
        for line in shown.output.splitlines()
        if line.startswith("Not in the time")
    ]
    assert len(said) == (beside is not None) and all(line.startswith(beside) for line in said), (
        shown.output
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tflops", "inf"], "must be a finite number"),
        (["--link", "inf"], "must be a finite number"),
        (["--document-length", "2049"], "is longer than a pack; give at most"),
        (["--document-length", "inf"], "is longer than a pack; give at most"),
        (["--gpus", "0"], "give numbers of cards up to 1,000,000"),
        (["--gpus", "99999999999"], "give numbers of cards up to 1,000,000"),
    ],
    ids=" ".join,
)
def test_what_no_plan_can_be_made_of_is_told(flags, said, tmp_path):
    tiny.llama().config.save_pretrained(tmp_path)
    given = ["plan", "--model", str(tmp_path), "--max-seq-length", "2048", *flags]
    refused = CliRunner().invoke(app, given)
    assert isinstance(refused.exception, ConfigurationError) or refused.exit_code == 1
    assert said in f"{refused.exception} {refused.output}"


@pytest.mark.slow
def test_the_command(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    given = ["plan", "--model", str(tmp_path), "--gpus", "1,2", "--no-use-lora"]
    shown = CliRunner().invoke(app, [*given, "--gpu-memory", "0.001"])
    assert shown.exit_code == 0, shown.output
    assert "too much" in shown.output and "Cards of 0.001 GB, 8 a machine" in shown.output
    assert "weights are on every card, but divided where there are 2." in shown.output
    assert "every card.\n" in CliRunner().invoke(app, given).output
    told = CliRunner().invoke(app, [*given, "--json"])
    one, two = json.loads(told.stdout)
    assert (one["gpus"], two["gpus"]) == (1, 2) and one["sent"]["total"] == 0 < two["sent"]["total"]
    assert two["efficiency"] < one["efficiency"] == 1 and two["fits"]
    assert "stay" not in shown.output and one["stay"] == two["stay"] == 0
    divided = [*given, "--sharding", "weights"]
    assert "Layers that stay are gathered once" in CliRunner().invoke(app, divided).output
    assert [
        made["stay"] for made in json.loads(CliRunner().invoke(app, [*divided, "--json"]).stdout)
    ] == [0, 2]
    wrong = CliRunner().invoke(app, [*given[:3], "--gpus", "two"])
    assert isinstance(wrong.exception, ConfigurationError) and "gpus='two': give numbers" in str(
        wrong.exception
    )


def test_a_plan_counts_the_parameters_of_the_built_model(tmp_path):
    """All of a model that was made for real, and of those the adapters' that are trained."""
    model = tiny.llama()
    own = sum(parameter.numel() for parameter in model.parameters())
    apply_lora(model, LoRAConfig(rank=4, alpha=8))
    planned = plan(model, runs.config(tmp_path, use_lora=True, lora_rank=4), 1, Machines())
    adapters = planned.parameters["trained"]
    assert planned.parameters["total"] == own + adapters and adapters == trained(model) > 0
