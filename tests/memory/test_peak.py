"""What a step is expected to hold, and the fastest recomputation that fits."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import runs
import tiny
from chronicals import ChronicalsConfig
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import CHEAP, LAYERS, NOTHING, Estimate, StepShape, WeightBytes, estimate
from chronicals.memory.layer_elements import AdapterColumns, LayerElements
from chronicals.memory.peak import GRADIENTS, HEAD_GRADIENT, TableBytes
from chronicals.models import load_by_bitsandbytes, load_model
from chronicals.models.four_bits import linear_layers, quantise_layers
from chronicals.policies import Facts
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.recompute_layers import asked_recomputation
from chronicals.quantization import Linear4bit, Packed
from chronicals.training import session
from chronicals.training.session import prepare_session
from chronicals.training.step.training_step import EagerStep

GIB = 2**30

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "long-documents-h200.json"
MEASURED = json.loads(RESULTS.read_text())["rows"]


KEPT = {NOTHING: 10 * GIB, CHEAP: 6 * GIB, LAYERS: 1 * GIB}
"""Of a layer; there are ten, beside 20 GiB."""


@pytest.mark.parametrize(
    ("total", "choice", "needed"),
    [
        (0, (NOTHING, 0), 120),
        (134, (NOTHING, 0), 120),
        (133, (CHEAP, 0), 80),
        (89, (CHEAP, 0), 80),
        (88, (CHEAP, 1), 75),
        (60, (CHEAP, 6), 20 + 6 + 4 * 6),
        (45, (CHEAP, 8), 20 + 8 + 12),
        (44, (CHEAP, 9), 20 + 9 + 10),
        (10, (CHEAP, 9), 39),
    ],
    ids=str,
)
def test_the_fastest_that_fits(total, choice, needed):
    """The last of ten saves nothing: while any is recomputed, it is there as a whole."""
    estimated = Estimate(20 * GIB, 10, KEPT, total * GIB)
    assert estimated.choice() == choice and estimated.needed(*choice) == needed * GIB


@pytest.mark.parametrize(
    ("gradients", "again", "needed"),
    [(5, 0, 120), (85, 0, 120), (95, 0, 125), (95, 6, 20 + 6 + 105)],
)
def test_gradients_come_as_activations_go(gradients, again, needed):
    """Ten layers keep 10 each: all before the backward pass, all gradients and one layer at its
    end.
    """
    found = Estimate(20 * GIB, 10, KEPT, 0, gradients * GIB)
    assert found.needed(NOTHING, again) == needed * GIB


def test_without_fused_layers_nothing_is_cheap():
    kept = {name: size for name, size in KEPT.items() if name != CHEAP}
    assert Estimate(20 * GIB, 10, kept, 100 * GIB).choice() == (NOTHING, 4)


@pytest.mark.parametrize(
    ("total", "words"),
    [
        (0, "not on a card"),
        (200, "estimated 120.0 of 200.0 GiB, nothing recomputed"),
        (100, "estimated 80.0 of 100.0 GiB, norms and gated units recomputed"),
        (
            60,
            "estimated 50.0 of 60.0 GiB, 6 of 10 layers recomputed, norms and gated units "
            "recomputed",
        ),
        (
            10,
            "estimated 39.0 of 10.0 GiB, 9 of 10 layers recomputed, norms and gated units "
            "recomputed",
        ),
    ],
    ids=str,
)
def test_what_is_said(total, words):
    assert Estimate(20 * GIB, 10, KEPT, total * GIB).words() == words


def test_what_is_counted():
    """A token and layer of width 64, 4 query and 2 key heads of 16, inner width 96, in 16 bit;
    300 tokens of vocabulary.
    """
    model = tiny.llama()
    model.get_input_embeddings().requires_grad_(False)
    found = estimate(model, StepShape(1000, True, 2, 4352), WeightBytes(2, 14))
    frozen = model.get_input_embeddings().weight.numel()
    trained = sum(p.numel() for p in model.parameters()) - frozen
    assert found.fixed == 2 * frozen + 14 * trained
    assert found.tables == TableBytes(summed=300 * 64 * 4, returned=300 * 64 * (4 + 2))
    # the last norm's input, the loss's states, gradient and rows, and of a chunk an fp32 product
    # and scaled states
    of_chunk = 1000 * 64 * (4 + 2)
    assert found.loss == 2000 * 5 * 64 + of_chunk + 1000 * 300 * 2
    assert found.logits == 1000 * 300 * 2
    attended = 16 * (2 * 4 + 2 * 2)
    of_rows = 2 * (4 + 2)
    assert found.kept == {
        NOTHING: 2000 * (4 * 64 + attended + 3 * 96 + of_rows),
        CHEAP: 2000 * (2 * 64 + attended + 2 * 96 + of_rows),
        LAYERS: 2000 * 64,
    }
    assert CHEAP not in estimate(model, StepShape(1000, False, 2, 4352), WeightBytes(2, 14)).kept
    for least, inputs in ((0, 2 * 64 + 96), (161, 2 * 64), (193, 64), (257, 0)):
        step = StepShape(1000, True, 2, 4352, in_fp8=lambda i, o, least=least: i + o >= least)
        narrow = estimate(model, step, WeightBytes(2, 14))
        assert (
            found.kept[NOTHING] - narrow.kept[NOTHING] == 1000 * inputs
            and narrow.kept[CHEAP] == found.kept[CHEAP]
        )
    scaled = estimate(model, StepShape(1000, True, 2, 4352, magnitudes=True), WeightBytes(2, 14))
    returned = 16 * (4 + 2 * 2) + 2 * 64
    assert {scaled.kept[policy] - found.kept[policy] for policy in (NOTHING, CHEAP)} == {
        2000 * returned
    }
    assert scaled.kept[LAYERS] == found.kept[LAYERS]
    wide = estimate(model, StepShape(1000, True, 4, 4352), WeightBytes(2, 14))
    assert wide.kept[NOTHING] == 2 * found.kept[NOTHING] - 2000 * of_rows
    assert wide.fixed - found.fixed == 2 * frozen
    assert wide.loss == 2 * found.loss - 1000 * 64 * 4
    few = estimate(model, StepShape(1000, True, 2, 100), WeightBytes(2, 14))
    assert found.loss - few.loss == 900 * (300 * 2 + 64 * (4 + 2))
    assert found.choice() == (NOTHING, 0) and found.layers == 2
    early = estimate(model, StepShape(1000, True, 2, 4352), WeightBytes(2, 10, 4.0))
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.fixed - early.fixed == early.gradients == 4 * weights and not found.gradients
    assert early.tables == TableBytes(
        summed=300 * 64 * 4, returned=300 * 64 * (4 + 2 + 4), head=300 * 64 * 4
    )
    model.get_decoder().layers.requires_grad_(False)
    others = sum(p.numel() for p in model.get_decoder().layers.parameters())
    assert (
        found.fixed - estimate(model, StepShape(1000, True, 2, 4352), WeightBytes(1, 14)).fixed
        == 13 * others
    )


@pytest.mark.parametrize("nested", [False, True])
def test_scales_of_bitsandbytes_are_counted_as_ours(tmp_path, nested):
    """But for its tables of codes, which each layer has."""
    pytest.importorskip("bitsandbytes")
    tiny.llama(intermediate_size=128).save_pretrained(tmp_path)
    kind = transformers.LlamaForCausalLM
    cpu = torch.device("cpu")
    theirs = load_by_bitsandbytes(kind, tmp_path, torch.float32, cpu, nested)
    ours = load_model(tmp_path, torch.float32)
    for path, layer in linear_layers(ours).items():
        ours.set_submodule(path, Linear4bit(Packed.of(layer.weight.detach(), nested=nested)))
    step = StepShape(64, False, 2, 16)
    weights = WeightBytes(2, 14)
    one, two = (
        estimate(model.requires_grad_(False), step, weights).fixed for model in (theirs, ours)
    )
    assert 0 <= one - two <= 14 * (16 + 256) * 4


MODEL = SimpleNamespace(width=64, queries=64, keys=32, inner=96)
"""Of ``tiny.llama``."""


def test_the_largest_moment_counts():
    """Nothing recomputed: at the gated unit's backward pass, gradients of gate, up and unit are
    there, and the unit is not.
    """
    found = estimate(tiny.llama(), StepShape(1000, True, 2, 8), WeightBytes(2, 14))
    kept = found.kept[NOTHING]
    width = 2000 * MODEL.width
    inner = 2000 * MODEL.inner
    in_attention = 2000 * (2 * MODEL.width + 8 * MODEL.queries + 4 * MODEL.keys)
    assert found.working[NOTHING] == max(kept + 2 * inner, in_attention)
    assert found.working[CHEAP] == max(found.kept[CHEAP] + 3 * inner + width, in_attention)
    assert found.working[LAYERS] == max(kept + 2 * inner + width, in_attention)
    beside = {NOTHING: kept, CHEAP: found.kept[CHEAP], LAYERS: 2 * width}
    for policy, before in beside.items():
        saved = before + (0 if policy == LAYERS else found.kept[policy])
        of_head = max(found.tables.summed, found.tables.returned - found.logits)
        at_loss = saved + found.loss + of_head
        assert found.needed(policy) == found.fixed + max(at_loss, before + found.working[policy])
    many_logits = estimate(tiny.llama(), StepShape(1000, True, 2, 1000), WeightBytes(2, 14))
    at_loss = 2 * kept + many_logits.loss + many_logits.tables.summed
    assert many_logits.needed(NOTHING) == many_logits.fixed + at_loss
    names = [moment.name for moment in many_logits.moments(NOTHING)]
    assert many_logits.peak(NOTHING).name == names[0] == "the loss" and len(names) == 5


def test_tiles_and_host_memory_take_away():
    def of(**changes):
        return estimate(tiny.llama(), StepShape(10_000, True, 2, 8, **changes), WeightBytes(2, 14))

    plain = of()
    tiled = of(tile=100)
    away = of(offloads=True)
    assert plain.kept[NOTHING] - tiled.kept[NOTHING] == 20_000 * 3 * MODEL.inner
    assert tiled.working[LAYERS] >= 200 * 6 * MODEL.inner and tiled.needed(NOTHING) < plain.needed(
        NOTHING
    )
    input_of_layer = 20_000 * MODEL.width
    assert away.window[LAYERS] == 3 * input_of_layer
    assert away.window[NOTHING] == 3 * 20_000 * 2 * MODEL.inner
    assert not plain.window and away.kept == plain.kept
    deep = replace(away, layers=100)
    at_loss = deep.window[LAYERS] + deep.loss + deep.tables.summed
    at_last = (3 + 3 + 1) * input_of_layer + deep.working[LAYERS]
    assert deep.needed(LAYERS) == deep.fixed + max(at_loss, at_last)
    kept = deep.kept[NOTHING]
    # two windows and the tensor in use, among them what the layer kept
    there = (3 + 3 + 1) * 20_000 * 2 * MODEL.inner
    moments = {moment.name: moment.held - deep.fixed for moment in deep.moments(NOTHING)}
    last = moments["the backward pass of the last layer"]
    assert last == there - kept + deep.working[NOTHING]
    assert moments["the loss"] == deep.window[NOTHING] + deep.loss + deep.tables.summed


def test_gradients_of_head_and_embedding_come_first_and_last():
    """Tied, the second gradient of the table is there beside the first, until it is added."""
    gradient = 300 * 64 * 2
    step = StepShape(10, True, 2, 8)
    apart = estimate(tiny.llama(tie_word_embeddings=False), step, WeightBytes(2, 12, 2.0))
    tied = estimate(tiny.llama(tie_word_embeddings=True), step, WeightBytes(2, 12, 2.0))
    returned = {"summed": 2 * gradient, "returned": 3 * gradient}
    assert apart.tables == TableBytes(**returned, head=gradient, embedding=gradient)
    assert tied.tables == TableBytes(**returned, head=gradient, again=gradient)
    for found in (apart, tied):
        _, of_head, last, first, end = found.moments(NOTHING)
        assert of_head.parts[HEAD_GRADIENT] == 3 * gradient
        assert last.parts[GRADIENTS] == gradient
        assert first.parts[GRADIENTS] == found.gradients - found.tables.embedding
        assert end.parts[GRADIENTS] == found.gradients + found.tables.again
        assert HEAD_GRADIENT not in last.parts


def test_gradients_that_stand_in_fp32_get_those_of_the_tables_in_two_copies():
    """Tied, the head's waits for the embedding's; apart, the embedding's is added by itself."""
    gradient = 300 * 64 * 2
    step = StepShape(10, True, 2, 8)
    weights = WeightBytes(2, 16, standing=4.0)
    apart = estimate(tiny.llama(tie_word_embeddings=False), step, weights)
    tied = estimate(tiny.llama(tie_word_embeddings=True), step, weights)
    returned = {"summed": 2 * gradient, "returned": 5 * gradient, "again": 3 * gradient}
    assert apart.tables == TableBytes(**returned)
    assert tied.tables == TableBytes(**returned, waiting=2 * gradient)
    *_, last, first, end = tied.moments(NOTHING)
    standing = tied.named[GRADIENTS]
    assert last.parts[GRADIENTS] == first.parts[GRADIENTS] == standing + 2 * gradient
    assert end.parts[GRADIENTS] == standing + 5 * gradient


def test_columns_of_adapters_stay_with_the_inputs_that_are_kept():
    columns = AdapterColumns(queries=128, output=64, gate=64, down=64)
    plain, adapted = (
        estimate(tiny.llama(), StepShape(1000, True, 2, 8, columns=given), WeightBytes(2, 14))
        for given in (AdapterColumns(), columns)
    )
    more = {policy: adapted.kept[policy] - plain.kept[policy] for policy in plain.kept}
    assert more == {NOTHING: 2000 * 320, CHEAP: 2000 * 64, LAYERS: 0}


def test_keys_of_shared_prompts_are_gathered():
    plain, gathered = (
        estimate(tiny.llama(), StepShape(1000, True, 2, 8, gathers_keys=g), WeightBytes(2, 14))
        for g in (False, True)
    )
    assert gathered.kept[CHEAP] - plain.kept[CHEAP] == 2000 * 2 * MODEL.keys
    assert gathered.kept[LAYERS] == plain.kept[LAYERS]


def test_experts_keep_the_inputs_of_their_units_for_each_pair():
    config = SimpleNamespace(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        intermediate_size=500,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        vocab_size=300,
    )
    config.get_text_config = lambda: config
    found = LayerElements.of(config, StepShape(1000, True, 2, 8))
    width, pairs = 64, 3 * 24
    attended = 16 * (2 * 4 + 2 * 2) + 2 * (4 + 2)
    assert found.kept[NOTHING] == 4 * width + attended + 2 * pairs
    assert found.in_mlp[NOTHING] == found.kept[NOTHING] + 2 * pairs + 3 * width


def test_the_copy_of_what_attention_returns():
    one, two = (
        estimate(
            tiny.llama(), StepShape(1000, True, 2, 8, copies_attended=copies), WeightBytes(2, 14)
        )
        for copies in (False, True)
    )
    assert {two.kept[policy] - one.kept[policy] for policy in (NOTHING, CHEAP)} == {
        2000 * MODEL.queries
    }
    assert two.kept[LAYERS] == one.kept[LAYERS]


@cache
def layers_of_8b(layers):
    """On the meta device, as it is trained."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        num_hidden_layers=layers,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    quantise_layers(model)
    return apply_lora(model, LoRAConfig(32, 32, 0.0))


def estimated_of_8b(length, layers, fields):
    """GiB that a run of one document a step expects to hold."""
    config = ChronicalsConfig(
        use_lora=True,
        lora_rank=32,
        quantization="nf4",
        batch_size=1,
        gradient_accumulation_steps=1,
        max_seq_length=length,
        **fields,
    )
    card = int(139.8 * GIB)
    _, expected = expected_memory(Facts(config, layers_of_8b(layers), total=card))
    asked = asked_recomputation(config)
    return expected.needed(*(expected.choice() if asked is None else (asked, 0))) / GIB


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['length']}-{row['policies']}")
def test_long_documents_are_expected_as_they_were_measured(row):
    """Within 5 %, of layers of an 8B in NF4 with adapters of rank 32."""
    expected = estimated_of_8b(row["length"], row["layers"], row["fields"])
    assert expected == pytest.approx(row["held_gib"], rel=0.05)


ON_HOST = {
    "full": {},
    "full in bf16": {"mixed_precision": "bf16"},
    "LoRA": {"use_lora": True, "lora_dropout": 0.0},
    "LoRA with dropout": {"use_lora": True, "lora_dropout": 0.05},
    "LoRA of attention": {"use_lora": True, "lora_target_modules": ["q_proj", "v_proj"]},
    "DoRA": {"use_lora": True, "use_dora": True, "lora_dropout": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ON_HOST)
def test_layers_on_the_cpu_keep_what_autograd_saves_there(way, tmp_path, monkeypatch):
    """By the tensors that a micro-batch saves: a third layer keeps as much as is expected."""
    kept = {}
    sessions = []
    micro_step = EagerStep.micro

    def saving(step, *given):
        own = {p.untyped_storage().data_ptr() for p in sessions[-1].model.parameters()}
        seen = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = tensor  # so that no other one gets its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = micro_step(step, *given)
        layers = sessions[-1].model.config.num_hidden_layers
        kept[layers] = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
        return made

    def prepared(*given, **named):
        sessions.append(prepare_session(*given, **named))
        return sessions[-1]

    monkeypatch.setattr(EagerStep, "micro", saving)
    monkeypatch.setattr(session, "prepare_session", prepared)
    sizes = {"hidden_size": 96, "intermediate_size": 200, "head_dim": 34}
    for layers in (2, 3):
        model = tiny.llama(num_hidden_layers=layers, **sizes)
        fields = {"max_steps": 1, "use_lora": False, "lora_rank": 8, **ON_HOST[way]}
        runs.train(tmp_path / str(layers), model=model, **fields)
    expected = expected_memory(sessions[-1].facts)[1].kept[NOTHING]
    assert expected == pytest.approx(kept[3] - kept[2], rel=0.03)
