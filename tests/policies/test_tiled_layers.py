"""The policy of layers in tiles: its checks, its bytes, and which inputs of layers move."""

from dataclasses import replace

import pytest
import torch

import choosers
import families
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import (
    LAYERS,
    ActivationOffload,
    Estimate,
    StepShape,
    decoder_layers,
    recompute,
)
from chronicals.memory.attention_results import RESULTS, AttentionResults, ResultsOnDevice
from chronicals.memory.recompute import TILE
from chronicals.memory.tiled_layers import LayerTiles, TiledElements
from chronicals.model_shape import ModelShape
from chronicals.patching.head_groups import ranges_of_heads
from chronicals.policies import Decision, Facts, decide, needed_memory
from chronicals.policies.exclusions import why_excluded
from chronicals.policies.model_sizes import ModelSizes
from chronicals.policies.needed_memory import expected_memory, refuse_what_cannot_fit
from chronicals.policies.policy import POLICIES, MemoryLoad, Running
from chronicals.policies.step_time import AS_LONG_AS_PACKS, StepWork
from chronicals.policies.tiled_layers import HEAD_KERNELS, makes_heads_at_once, number_of_groups

TILED = POLICIES["tiled_layers"]
OFFLOAD = POLICIES["activation_offload"]
BOTH = {
    "memory": ["tiled_layers", "offload_activations"],
    "batch_size": 1,
    "use_cuda_graphs": False,
}
GIB = 2**30


def facts_of(folder, model=None, total=GIB, **fields):
    """Of a run on a card of so many bytes, whose model has shapes alone."""
    config = runs.config(folder, **{"max_seq_length": 2 * TILE, **BOTH, **fields})
    with torch.device("meta"):
        model = model or tiny.llama(num_hidden_layers=6)
    return Facts(config, model, total=total, backend="flash")


def without_results(memory, **changes):
    """The estimate of a run that keeps no results of attention."""
    return replace(memory, kept_results=0, results_here=0, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unfused": "not on a card"}, "needs fused decoder layers.*not on a card.*recompute"),
        ({"fuses_halves": False}, "a part of the layers of LlamaForCausalLM does not run fused"),
    ],
)
def test_it_is_refused_with_its_reason(changes, reason, tmp_path):
    facts = replace(facts_of(tmp_path), **changes)
    with pytest.raises(ConfigurationError, match=rf"memory=\['tiled_layers'\]: {reason}"):
        decide(facts)


def test_layers_with_experts_are_refused(tmp_path):
    facts = facts_of(tmp_path, families.mixture("mixtral"))
    assert "needs layers without experts, MixtralForCausalLM has some" in TILED.why_not(facts)


def test_what_it_excludes(tmp_path):
    facts = facts_of(tmp_path)
    assert "leave it out" in why_excluded("tiled_mlp", {"tiled_layers"}, facts)
    assert "recompute_layers" in why_excluded("tiled_layers", {"divided weights"}, facts)
    with pytest.raises(ConfigurationError, match="makes everything again; leave out the other"):
        runs.config(tmp_path, memory=["tiled_layers", "recompute_elementwise"]).check()


def test_a_batch_of_one_tile_is_left_in_one_piece_and_recomputed(tmp_path):
    decisions = decide(facts_of(tmp_path, max_seq_length=TILE))
    assert not decisions["tiled_layers"].runs
    assert "no more rows than a tile" in decisions["tiled_layers"].reason
    assert decisions["use_gradient_checkpointing"].layers is None


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_bytes_of_sums_are_those_of_a_layer(adapted, tmp_path):
    model = tiny.llama()
    if adapted:
        apply_lora(model, LoRAConfig(rank=2))
    load = MemoryLoad(StepShape(TILE + 1, True, 2, 8), 2, 2, 2, 2, gradients_stay=False)
    tiles = TILED.bytes(Facts(runs.config(tmp_path), model), load).step.layer_tiles
    values = sum(p.numel() for p in model.get_decoder().layers[0].parameters())
    down = 64 * 96
    assert tiles == LayerTiles(TILE, 1, 0 if adapted else 4 * values, 0 if adapted else 2 * down)


def test_elements_of_an_8b_are_those_of_its_page():
    shape = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 0)
    found = TiledElements.of(shape, 1 << 18, LayerTiles(TILE), 2, 0)
    rows = 32 * 4 // 2
    assert found.of_token == (2 + 2) * 4096 + rows
    assert found.of_group == (6 * 4096 + 4 * 1024) // 8 + rows
    at_once = TiledElements.of(shape, 1 << 18, LayerTiles(TILE, at_once=True), 2, 0)
    assert at_once.of_token == (2 + 3) * 4096 + 2 * 1024 + rows
    assert at_once.of_group == (5 * 4096 + 2 * 1024) // 8 + rows


@pytest.mark.parametrize("key_heads", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("gathers", [False, True])
def test_elements_are_those_of_the_largest_group(key_heads, gathers):
    """Counted group after group: a, da and gathered keys leave, gradients of heads come."""
    shape = ModelShape(32, 4096, 32, key_heads, 128, 14336, 128256, 0)
    tokens = 1 << 18
    found = TiledElements.of(shape, tokens, LayerTiles(TILE), 2, 0, gathers)
    groups = len(ranges_of_heads(tokens, 32, key_heads))
    q, k = 4096 // groups, key_heads * 128 // groups
    held = []
    for done in range(groups):
        left = groups - done
        waiting = left * (2 * q + 2 * k * gathers)
        working = (q + 2 * k) + (5 * q + 2 * k) + 2 * k * gathers
        held.append(waiting + done * (q + 2 * k) + working)
    rows = 32 * 4 // 2
    total = found.of_token + found.of_group - 2 * 4096 - 2 * rows
    assert total == max(held)
    assert found.of_token - 2 * 4096 - rows >= groups * (q + 2 * k)  # before the last product


@pytest.mark.parametrize(
    ("family", "fp8", "at_once"),
    [
        ("llama", False, False),
        ("phi3", False, False),
        ("qwen3", False, False),
        ("olmo2", False, True),
        ("deepseek_v3", False, True),
        ("llama", True, True),
    ],
)
def test_the_plan_knows_whose_heads_are_made_at_once(family, fp8, at_once, tmp_path):
    """As the layers do that run; adapters or not."""
    mixed = family in choosers.CLASSES
    model = choosers.build(family) if mixed else families.build(family)
    facts = facts_of(tmp_path, model, use_fp8=fp8)
    assert makes_heads_at_once(facts) is at_once
    apply_lora(model, LoRAConfig(rank=2))
    assert makes_heads_at_once(facts) is at_once


def test_heads_by_groups_take_a_norm_each_and_a_product_once_more(tmp_path, set_constants):
    """Of the whole model; where results of attention are kept, the product is not repeated."""
    set_constants(recompute, GROUP_ROWS=1)
    facts = facts_of(tmp_path)
    memory = expected_memory(facts)[1]
    sizes = ModelSizes.of(facts.model)
    plain = StepWork.of(facts, memory, sizes, AS_LONG_AS_PACKS)
    made = Decision("tiled_layers", True, "as asked")
    shape = plain.job.shape
    assert shape.kv_heads == number_of_groups(facts) == 2
    norm = 2 * TILE * shape.layers * 2 * 2 * shape.width

    def added(kept):
        given = replace(plain, memory=replace(memory, kept_results=kept))
        work = TILED.work(facts, given, made)
        made_again = work.backward.products[len(plain.backward.products) :]
        return (
            (work.forward.moved - plain.forward.moved) / norm,
            (work.backward.moved - plain.backward.moved) / norm,
            {each.product.name: each.times for each in made_again},
            work.kernels - plain.kernels,
        )

    forward, backward, products, kernels = added(0)
    assert (forward, backward, products) == (1, 4, {"qkv": shape.layers})
    assert added(shape.layers // 2)[:3] == (1, 3, {"qkv": shape.layers / 2})
    assert added(shape.layers)[:3] == (1, 2, {})
    set_constants(recompute, GROUP_ROWS=1 << 30)
    forward, backward, products, fewer = added(0)
    assert (forward, backward, products) == (0, 1, {})
    assert kernels - fewer == shape.layers * 2 * HEAD_KERNELS * (3 + 1)


def test_as_few_inputs_move_as_the_card_needs(tmp_path):
    """None where all stay; one more for each input's bytes that a smaller card lacks."""
    roomy = expected_memory(facts_of(tmp_path))[1]
    assert roomy.moved_inputs == 0
    size = roomy.kept[LAYERS]
    assert size == 2 * TILE * 64 * 4
    # the last moment holds all inputs, or those that stay and two
    needed = without_results(roomy, moved_inputs=6).needed(LAYERS)
    moved = []
    for more in range(5):
        card = int((needed + more * size) / 0.9) + 2
        moved.append(expected_memory(facts_of(tmp_path, total=card))[1].moved_inputs)
    assert moved == [6, 5, 4, 3, 0]


def test_where_the_host_is_too_small_the_rest_stays_or_the_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Facts, "planned", property(lambda self: False))
    monkeypatch.setattr(needed_memory, "input_device", lambda model: torch.device("cuda"))
    roomy = expected_memory(facts_of(tmp_path))[1]
    size = roomy.kept[LAYERS]
    card = int(without_results(roomy, moved_inputs=6).needed(LAYERS) / 0.9) + 2
    free = int(3.5 * size / needed_memory.HOST_SHARE)
    monkeypatch.setattr(needed_memory, "available_memory", lambda: free)
    memory = expected_memory(facts_of(tmp_path, total=card))[1]
    assert memory.moved_inputs == 3
    assert memory.in_host_memory(LAYERS) == {"offloaded activations": 3 * size}
    config = facts_of(tmp_path).config
    small = replace(memory, total=int(0.9 * card))
    with pytest.raises(ConfigurationError, match="Inputs of 3 of 6 layers are in host memory"):
        refuse_what_cannot_fit(config, small, LAYERS, lambda length: small)


def test_the_run_moves_the_layers_that_were_decided():
    model = tiny.llama(num_hidden_layers=6)
    decision = Decision("activation_offload", True, "as asked", layers=2)
    with OFFLOAD.around_steps(model, decision):
        moved = [bool(layer._forward_pre_hooks) for layer in decoder_layers(model)]
        assert moved == [False, False, True] * 2
    with OFFLOAD.around_steps(model, replace(decision, layers=0)) as away:
        assert type(away) is ActivationOffload


def test_a_run_without_offload_keeps_all_inputs():
    kept = {LAYERS: 10, "nothing": 10}
    tiled = Estimate(100, 4, kept, 1000, working=dict.fromkeys(kept, 7))
    assert tiled.needed(LAYERS) == 100 + 40 + 7
    assert replace(tiled, moved_inputs=4).needed(LAYERS) == 100 + 20 + 7
    assert replace(tiled, moved_inputs=1).needed(LAYERS) == 100 + 50 + 7


def worked(facts, memory):
    """Work of a step in which both policies run."""
    work = StepWork.of(facts, memory, ModelSizes.of(facts.model), AS_LONG_AS_PACKS)
    for policy in (TILED, OFFLOAD):
        work = policy.work(facts, work, Decision(policy.name, True, "as asked"))
    return work


def test_results_stay_on_the_card_as_far_as_it_has_room(tmp_path, monkeypatch):
    """Where all inputs do; the host takes those of the other layers, in a run and not in a plan."""
    roomy = expected_memory(facts_of(tmp_path))[1]
    result = roomy.result
    assert (roomy.kept_results, roomy.results_here) == (6, 6)
    bare = without_results(roomy)
    assert roomy.needed(LAYERS) - bare.needed(LAYERS) == 6 * result
    card = int((bare.needed(LAYERS) + 2.5 * result) / 0.9)
    facts = facts_of(tmp_path, total=card)
    memory = expected_memory(facts)[1]
    assert (memory.moved_inputs, memory.kept_results, memory.results_here) == (0, 2, 2)
    assert memory.needed(LAYERS) <= 0.9 * card and not memory.in_host_memory(LAYERS)

    monkeypatch.setattr(Facts, "planned", property(lambda self: False))
    monkeypatch.setattr(needed_memory, "input_device", lambda model: torch.device("cuda"))
    free = int(3.5 * result / needed_memory.HOST_SHARE)
    monkeypatch.setattr(needed_memory, "available_memory", lambda: free)
    more = expected_memory(facts)[1]
    assert (more.kept_results, more.results_here) == (5, 2)
    assert more.in_host_memory(LAYERS) == {"results of attention": 3 * result}
    monkeypatch.setattr(Facts, "on_card", property(lambda self: True))
    decisions = decide(facts)
    assert decisions["tiled_layers"].results == 2
    assert "results of 2 of 6 layers stay" in decisions["tiled_layers"].reason
    offload = decisions["activation_offload"]
    assert (offload.runs, offload.layers, offload.results) == (True, 0, 3)
    assert "attention's results of 3," in offload.reason
    alone = replace(facts, config=facts.config.replace(memory=["tiled_layers"]))
    assert expected_memory(alone)[1].kept_results == 2

    work = worked(facts, more)
    assert work.backward.scores == pytest.approx(-5 / 6 * work.forward.scores)
    assert work.offloaded == 3 * result


def test_results_are_kept_as_far_as_the_host_has_room(tmp_path, monkeypatch):
    """Behind the inputs; their attention is not computed again, and their bytes are copied."""
    monkeypatch.setattr(Facts, "planned", property(lambda self: False))
    monkeypatch.setattr(needed_memory, "input_device", lambda model: torch.device("cuda"))
    roomy = expected_memory(facts_of(tmp_path))[1]
    size, result = roomy.kept[LAYERS], roomy.result
    assert result == 2 * TILE * (64 * 4 + 4 * 4)  # D values of 4 bytes, and one for each head
    card = int(without_results(roomy, moved_inputs=6).needed(LAYERS) / 0.9) + 2
    facts = facts_of(tmp_path, total=card)
    found = {}
    for room in (0.5, 2.5, 9):
        free = int((6 * size + room * result) / needed_memory.HOST_SHARE) + 1
        monkeypatch.setattr(needed_memory, "available_memory", lambda free=free: free)
        found[room] = memory = expected_memory(facts)[1]
        assert memory.moved_inputs == 6
    assert [memory.kept_results for memory in found.values()] == [0, 2, 6]
    assert found[2.5].in_host_memory(LAYERS) == {
        "offloaded activations": 6 * size,
        "results of attention": 2 * result,
    }
    work = {room: worked(facts, memory) for room, memory in found.items()}
    forward = work[0.5].forward.scores
    assert forward > 0
    for room, share in ((2.5, 1 / 3), (9, 1)):
        spared = work[0.5].backward.scores - work[room].backward.scores
        assert spared == pytest.approx(share * forward)
        assert work[room].offloaded - work[0.5].offloaded == found[room].kept_results * result


@pytest.mark.parametrize(
    ("ranks", "told", "processes"), [(1, "", 1), (4, "", 4), (4, "2", 2), (1, "8", 1)]
)
def test_processes_of_a_machine_share_its_memory(ranks, told, processes, tmp_path, monkeypatch):
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    monkeypatch.setattr(Facts, "planned", property(lambda self: False))
    monkeypatch.setattr(needed_memory, "available_memory", lambda: 1 << 20)
    facts = replace(facts_of(tmp_path), ranks=ranks)
    memory = Estimate(100, 1 << 20, {LAYERS: 1, "nothing": 1}, GIB)
    share = int(needed_memory.HOST_SHARE * (1 << 20) / processes)
    assert needed_memory.layers_away(facts, memory, 1) == share


@pytest.mark.parametrize(
    "changes", [{"backend": "per-document"}, {"backend": ""}, {"context": 2}], ids=str
)
def test_results_are_computed_again_where_a_backend_saves_more_than_they_are(changes, tmp_path):
    facts = facts_of(tmp_path)
    step = StepShape(2 * TILE, True, 2, 8)
    assert needed_memory.keeps_results(facts, step)
    assert not needed_memory.keeps_results(facts, replace(step, gathers_keys=True))
    assert not needed_memory.keeps_results(replace(facts, **changes), step)
    padded = tiny.llama(hidden_size=4 * 20, head_dim=20)
    assert not needed_memory.keeps_results(replace(facts, model=padded), step)


def test_the_run_keeps_the_results_that_were_decided():
    model = tiny.llama(num_hidden_layers=6)
    there = []

    def kept():
        found = [getattr(layer, RESULTS, None) for layer in decoder_layers(model)]
        return [type(results) for results in found]

    away = Decision("activation_offload", True, "as asked", layers=6, results=3)
    here = Decision("tiled_layers", True, "as asked", results=2)
    for layers in (6, 0):
        with (
            TILED.around_steps(model, here),
            OFFLOAD.around_steps(model, replace(away, layers=layers)),
        ):
            there.append(kept())
    assert there == 2 * [[AttentionResults] * 3 + [type(None)] + [ResultsOnDevice] * 2]
    assert not any(hasattr(layer, RESULTS) for layer in decoder_layers(model))


def test_a_run_that_is_short_of_memory_lets_go_of_results(tmp_path):
    """Those that stay on the card; a host's are left."""
    model = tiny.llama(num_hidden_layers=6)
    here = Decision("tiled_layers", True, "as asked", results=2)
    away = Decision("activation_offload", True, "as asked", results=3)
    facts = facts_of(tmp_path, model)
    running = Running(facts, {"tiled_layers": here}, model, None)
    with TILED.around_steps(model, here), OFFLOAD.around_steps(model, away):
        added = TILED.addition(running)
        assert added.runs and added.results == 0 and "compute attention again" in added.reason
        TILED.join(running, added)
        kept = [hasattr(layer, RESULTS) for layer in decoder_layers(model)]
        assert kept == [True] * 3 + [False] * 3
    assert TILED.addition(replace(running, decisions={"tiled_layers": added})) is None
    assert not any(hasattr(layer, RESULTS) for layer in decoder_layers(model))
