"""The space of a run by part: nothing is left out, nothing counted twice, frozen models are there."""

import json

import pytest
import torch
from typer.testing import CliRunner

import runs
import tiny
from chronicals.cli.app import app
from chronicals.config import ConfigurationError, Recipe
from chronicals.distributed import Mesh
from chronicals.kernels.adamw import REFERENCE_COPIES
from chronicals.memory import OTHERS
from chronicals.memory.peak import (
    ACTIVATIONS,
    DEQUANTISED,
    FROZEN_WEIGHTS,
    GRADIENTS,
    HEAD_GRADIENT,
    LOGITS,
    OFFLOADED,
    PADDING,
    STATES,
    TRAINED_WEIGHTS,
    WORKSPACES,
)
from chronicals.models import quantise_layers
from chronicals.objectives import FrozenModel, build_objective
from chronicals.patching import layer_policies
from chronicals.planning import Documents, Machines, plan, planned_frozen, planned_space
from chronicals.planning.space import DRIVER_BYTES, KEPT_BY_MALLOC, rounding_of
from chronicals.policies.frozen_models import Held, held_by, planned_bytes
from chronicals.policies.model_sizes import ModelSizes
from chronicals.policies.needed_memory import WORKSPACE_BYTES
from chronicals.policies.policy import GRAPHED_WORKSPACES
from chronicals.policies.step_time import AS_LONG_AS_PACKS
from chronicals.training.adapters import attach_adapters
from chronicals.training.run.guard import planned_disk_use

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}


def planned(tmp_path, frozen=None, documents=AS_LONG_AS_PACKS, **fields):
    """The space of a run of a small model on one card, and that model."""
    config = runs.config(tmp_path, **{**runs.FULL, **fields})
    with torch.device("meta"):
        model = tiny.llama(**SIZES)
    if config.quantization:
        quantise_layers(model)
    attach_adapters(model, config, None)
    return plan(model, config, 1, Machines(), frozen, documents), model


def trained(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_parts_of_full_fine_tuning(tmp_path):
    """Weights 2 bytes, moments 8 and masters 2, gradients 4, as the formats say."""
    made, model = planned(tmp_path, gradient_accumulation_steps=2, optimizer_state_dtype="fp32")
    parts = made.space.peak.parts
    count = trained(model)
    assert parts[TRAINED_WEIGHTS] == 2 * count and parts[STATES] == 10 * count
    assert parts[GRADIENTS] == 4 * count
    assert made.space.peak.name == "the gradient of the head"
    assert parts[HEAD_GRADIENT] == (4 + 2 + 4) * model.lm_head.weight.numel()
    assert parts[WORKSPACES] == WORKSPACE_BYTES * GRAPHED_WORKSPACES
    assert parts[ACTIVATIONS] > 0
    assert FROZEN_WEIGHTS not in parts and OTHERS not in parts and PADDING not in parts
    many = {"max_seq_length": 2048, "gradient_accumulation_steps": 2}
    made, model = planned(tmp_path, **many)
    assert made.space.peak.name == "the loss"
    parts = made.space.peak.parts
    assert parts[HEAD_GRADIENT] == 4 * model.lm_head.weight.numel() and parts[LOGITS] > 0


def test_gradients_that_stay_are_counted_once(tmp_path):
    """With two micro-batches a gradient is there during the forward pass, and no second one."""
    made, model = planned(tmp_path, gradient_accumulation_steps=2)
    parts = made.space.peak.parts
    assert parts[GRADIENTS] == 4 * trained(model)
    always = (TRAINED_WEIGHTS, STATES, GRADIENTS, WORKSPACES)
    table = (2 + 4) * model.get_input_embeddings().weight.numel()
    at_the_end = made.space.moments["the gradient of the embedding"]
    assert at_the_end == sum(map(parts.get, always)) + table


def test_a_peak_is_the_largest_moment_and_the_sum_of_its_parts(tmp_path):
    made, _ = planned(tmp_path)
    space = made.space
    assert made.held == space.peak.held == sum(space.peak.parts.values())
    assert made.held == max(space.moments.values()) == space.moments[space.peak.name]
    assert len(space.moments) == 5
    assert space.on_card == made.held + space.rounding + space.graphs + space.driver
    assert space.driver == DRIVER_BYTES


def test_weights_are_named_by_their_format(tmp_path):
    made, model = planned(tmp_path, use_lora=True, quantization="nf4", lora_rank=8)
    parts = made.space.peak.parts
    codes = sum(p.nbytes for p in model.parameters() if not p.is_floating_point())
    (packed,) = [size for name, size in parts.items() if "nf4" in name]
    assert codes < packed < 1.1 * codes and parts[DEQUANTISED] > 0
    assert parts[TRAINED_WEIGHTS] == 4 * trained(model)


def test_frozen_models_are_on_the_card(tmp_path):
    teacher = ModelSizes.of(tiny.llama())
    alone, _ = planned(tmp_path)
    taught, _ = planned(tmp_path, frozen={"teacher": Held(10**9, teacher)})
    assert taught.held - alone.held == 10**9
    assert taught.space.peak.parts["teacher, frozen"] == 10**9


@pytest.mark.parametrize(
    ("precision", "each"), [("fp32", 4.0), ("bf16", 2.0), ("int8", 1.0), ("nf4", 0.5)]
)
def test_bytes_of_a_frozen_model_by_its_precision(precision, each):
    """Its table and head are not packed; a scale stands for a row, or for 64 values."""
    with torch.device("meta"):
        model = tiny.llama(**SIZES)
    tables = 2 * 32000 * 1024
    layers = held_by(model, 1) - tables - sum(buffer.nbytes for buffer in model.buffers())
    size = planned_bytes(FrozenModel("teacher", "x", precision, "distill"), model)
    expected = tables * max(each, 2) + layers * each
    assert size == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_an_objective_declares_what_it_loads(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    size = held_by(tiny.llama(), 2)
    for objective, settings in (
        ("distill", {"teacher": str(tmp_path)}),
        ("dpo", {"reference_model": str(tmp_path)}),
    ):
        config = runs.config(
            tmp_path, mixed_precision="bf16", objective=objective, **{objective: settings}
        )
        (found,) = planned_frozen(build_objective(config), config).values()
        assert found.size == size
    stored = runs.config(
        tmp_path, objective="distill", distill={"teacher": "big", "stored_tokens": 8}
    )
    assert planned_frozen(build_objective(stored), stored) == {}
    missing = runs.config(tmp_path, objective="distill", distill={"teacher": str(tmp_path / "no")})
    with pytest.raises(ConfigurationError, match="^distill="):
        planned_frozen(build_objective(missing), missing)


def test_host_memory_holds_what_is_offloaded(tmp_path):
    """Inputs of both layers in pinned buffers of powers of two, and the states of an update."""
    made, model = planned(
        tmp_path,
        memory=["recompute_layers", "offload_activations", "offload_optimizer_states"],
        batch_size=3,
        max_seq_length=1024,
    )
    host = made.space.host
    assert host[OFFLOADED] == 2 * 2**23  # 3 · 1024 rows of 1024 values are 6 MiB
    assert 9.9 < host["optimizer states in host memory"] / trained(model) <= 10
    plain, _ = planned(tmp_path, save_steps=2)
    assert set(plain.space.host) == {"staging of a checkpoint"}
    assert not planned(tmp_path)[0].space.host  # its only checkpoint waits for the last step
    assert plain.space.host["staging of a checkpoint"] == 12 * trained(model)


def test_on_the_cpu_host_memory_holds_the_moments(tmp_path):
    """And the reference's copies of the largest weight in its update, which no card makes."""
    tiny.llama().config.save_pretrained(tmp_path)
    recipe = Recipe(model=str(tmp_path), data=["rows.jsonl"])
    space = planned_space(recipe, runs.config(tmp_path, use_lora=False), Mesh())
    assert not space.is_on_card and space.on_card == space.driver == space.rounding == 0
    assert sum(space.host.values()) == space.peak.held == max(space.moments.values())
    count = sum(p.numel() for p in tiny.llama().parameters())
    update = 4 * REFERENCE_COPIES * 300 * 64  # its embedding is as large as its head
    assert space.moments["the update"] == 16 * count + update
    assert KEPT_BY_MALLOC in space.uncounted and WORKSPACES not in space.host
    fields = {"use_lora": False, "gradient_accumulation_steps": 1}
    single = planned_space(recipe, runs.config(tmp_path, **fields), Mesh())
    assert space.moments["the loss"] - single.moments["the loss"] == 4 * count


def test_disk_holds_checkpoints_and_the_model(tmp_path):
    """All that are kept and the one that is written, or as many as a short run writes."""
    _, model = planned(tmp_path)
    fields = {**runs.FULL, "save_total_limit": 3, "keep": "last", "save_steps": 10}
    long = planned_disk_use(model, runs.config(tmp_path, **fields, max_steps=1000))
    assert long.at_a_time == 4 and long.model == 2 * trained(model)
    assert long.checkpoint == 12 * trained(model)
    short = planned_disk_use(model, runs.config(tmp_path, **fields, max_steps=15))
    assert short.at_a_time == 2


def test_only_large_weights_are_rounded_to_blocks(tmp_path):
    config = runs.config(tmp_path, **runs.FULL)
    with torch.device("meta"):
        layers = torch.nn.ModuleList([torch.nn.Linear(3000, 2000, bias=False) for _ in range(2)])
    assert rounding_of(layers, config) == 2 * (12 * 2**20 - 12_000_000)
    assert rounding_of(layers[0].half().float(), config) == 12 * 2**20 - 12_000_000
    small = torch.nn.Linear(1000, 1000, device="meta")
    assert rounding_of(small, config) == 0


def test_graphs_keep_a_pool_where_they_run(tmp_path):
    """What a step makes beside weights, states and gradients, once more."""
    fields = {"gradient_accumulation_steps": 2, "max_seq_length": 2048}
    made, _ = planned(tmp_path, **fields)
    standing = (TRAINED_WEIGHTS, STATES, GRADIENTS, WORKSPACES)
    made_by_step = made.held - sum(made.space.peak.parts[part] for part in standing)
    assert made.space.graphs == made_by_step > 0
    for without in ({"use_cuda_graphs": False}, {"mixed_precision": "fp16"}):
        assert planned(tmp_path, **{**fields, **without})[0].space.graphs == 0


@pytest.mark.parametrize("adapted", [False, True])
def test_inputs_of_products_in_fp8_are_kept_in_8_bits(tmp_path, adapted, set_constants):
    """In a plan as in a run, where the products' weights are trained."""
    set_constants(layer_policies, MIN_FP8_WIDTH=16)
    sizes = {"use_fp8": True, "use_lora": adapted}
    made, _ = planned(tmp_path, **sizes)
    usual, _ = planned(tmp_path, **{**sizes, "use_fp8": False})
    kept = made.space.peak.parts[ACTIVATIONS] / usual.space.peak.parts[ACTIVATIONS]
    assert (kept == 1) == adapted and kept > 0.5


def test_a_reward_has_no_logits(tmp_path):
    made, _ = planned(tmp_path, objective="reward")
    parts = made.space.peak.parts
    assert LOGITS not in parts and HEAD_GRADIENT not in parts


def test_attention_in_fp32_keeps_keys_for_every_query_head(tmp_path):
    kept = {}
    for precision in ("fp16", "fp32"):
        made, model = planned(tmp_path, mixed_precision=precision)
        kept[precision] = made.space.peak.parts[ACTIVATIONS]
    config = runs.config(tmp_path, **runs.FULL)
    tokens = config.batch_size * config.max_seq_length
    repeated = 2 * 4 * model.config.hidden_size * tokens * model.config.num_hidden_layers
    assert kept["fp32"] == pytest.approx(2 * kept["fp16"] + repeated, rel=0.02)


def test_documents_that_fill_packs_share_one_graph(tmp_path):
    """Gradients then take turns with activations, and no pool stands beside a step."""
    length = runs.config(tmp_path, **runs.FULL).max_seq_length
    usual, _ = planned(tmp_path)
    alike, _ = planned(tmp_path, documents=Documents(length))
    assert usual.space.graphs > alike.space.graphs == 0
    gradients = usual.space.peak.parts[GRADIENTS]
    assert alike.held <= usual.held - gradients // 2


def test_frozen_weights_with_copies_in_fp8_are_in_host_memory(tmp_path):
    """In 16 bits, those of the layers' products; the table, the head and adapters stay."""
    fields = {"use_lora": True, "use_fp8": True, "memory": ["offload_frozen_weights"]}
    made, model = planned(tmp_path, **fields)
    layer = model.model.layers[0]
    values = sum(p.numel() for p in layer.parameters() if p.ndim > 1 and not p.requires_grad)
    assert made.space.host["frozen weights in host memory"] == 2 * 2 * values


@pytest.mark.slow
def test_one_card_is_shown_by_part(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    given = ["plan", "--model", str(tmp_path), "--no-use-lora"]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    for words in (TRAINED_WEIGHTS, STATES, "the driver's own", "host memory", "disk", "at the"):
        assert words in shown.output
    assert " of 74.51" in shown.output and "In no part: blocks that" in shown.output
    (one,) = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert one["space"]["held"] == one["held"] == sum(one["space"]["parts"].values())
    assert one["space"]["on_card"] > one["held"]
    several = CliRunner().invoke(app, [*given, "--gpus", "1,2"])
    assert "host memory" not in several.output
