"""Micro-steps with streamed experts as graphs that are cut at the experts: the same bits."""

import pytest
import torch

import families
import runs
import tiny
from chronicals.moe.offload.engine import ExpertEngine
from chronicals.patching.patch import patch_parts
from chronicals.policies.cuda_graphs import CudaGraphs
from chronicals.training import session
from recorded_graphs import RecordedStep

WORDS = ("red", "blue", "green", "black", "white")


def rows_of_one_length():
    """Rows that fill packs in one way, so that all batches have one shape.

    Attention on the CPU reads the bounds of documents on the host, which a capture does not repeat.
    """
    tokenizer = tiny.tokenizer()
    found = {}
    for n in range(400):
        words = f"{WORDS[n % 5]} {n // 5 % 10} {n // 50}"
        asked = {"role": "user", "content": f"what is the {words}?"}
        told = {"role": "assistant", "content": f"it is {words} and {WORDS[n // 5 % 5]}"}
        ids = tokenizer.apply_chat_template([asked, told], return_dict=False)
        found.setdefault(len(ids), []).append({"messages": [asked, told]})
    return max(found.values(), key=len)[:60]


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_target_parameters": [*EXPERTS, "mlp.gate.weight"],
}


def model(name):
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64}
    experts = "num_local_experts" if name == "GptOss" else "num_experts"
    given = families.routed(name, max_position_embeddings=256, **sizes, **{experts: 64})
    if not torch.cuda.is_available():
        patch_parts(given)  # as on a card
    return given


def train(folder, name="Qwen3Moe", **fields):
    """Losses and norms of a run, what it learned, and its model."""
    given = model(name)
    options = {**ADAPTERS, "max_steps": 4, "gradient_accumulation_steps": 2, **fields}
    runs.train(folder, rows_of_one_length(), given, **options)
    learned = {n: p.detach().clone() for n, p in given.named_parameters() if p.requires_grad}
    return runs.trajectory(folder), learned, given


SIZES = {"Qwen3Moe": "0.3MiB", "nf4": "0.06MiB", "GptOss": "1MiB"}
"""Memory of some 25 experts of 128."""


def streamed(fields, size):
    memory = [*fields.get("memory", []), "offload_experts"]
    return {**fields, "memory": memory, "expert_memory": size}


def assert_same_run(one, other):
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    for key, value in one[1].items():
        assert torch.equal(value, other[1][key]), key


@pytest.fixture
def recorded(monkeypatch, let_return):
    let_return(CudaGraphs, why_not=None)
    monkeypatch.setattr(session, "GraphedStep", RecordedStep)


@pytest.fixture
def waves(monkeypatch):
    """Places of each wave that a pass over the first layer asked for, forward and backward."""
    seen = {False: [], True: []}
    usual = ExpertEngine.waves

    def noted(engine, layer, bounds, backward):
        for wave in usual(engine, layer, bounds, backward):
            if layer == 0:
                seen[backward].append((wave[0], list(wave[1].on_host)))
            yield wave

    monkeypatch.setattr(ExpertEngine, "waves", noted)
    return seen


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has graphs of its own")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Qwen3Moe", {}),
        ("Qwen3Moe", {"quantization": "nf4"}),
        ("Qwen3Moe", {"memory": ["recompute_layers"]}),
        ("Qwen3Moe", {"lora_target_parameters": None}),
        ("GptOss", {"lora_target_parameters": ["mlp.experts.down_proj"]}),
    ],
    ids=str,
)
def test_replayed_runs_give_the_same_bits(tmp_path, recorded, waves, name, fields):
    """As eager ones do, and as those with all experts on the card."""
    expected = train(tmp_path / "resident", name, use_cuda_graphs=False, **fields)
    size = SIZES[fields.get("quantization", name)]
    eager = train(tmp_path / "eager", name, use_cuda_graphs=False, **streamed(fields, size))
    assert_same_run(expected, eager)
    for seen in waves.values():
        seen.clear()
    graphs = train(tmp_path / "graphs", name, use_cuda_graphs=True, **streamed(fields, size))
    assert_same_run(expected, graphs)
    graphed = RecordedStep.last
    assert graphed.recorder.replays and not graphed.failed
    passes = 3 if "recompute_layers" in fields.get("memory", ()) else 2
    layers = len(graphs[2].offload.engine.layers)
    assert graphed.recorder.cuts == passes * layers * len(graphed.recorder.graphs)
    assert graphs[2].offload.report().misses > 0
    assert all(len(set(map(str, seen))) > 2 for seen in waves.values())
    eager[2].offload.close()
    graphs[2].offload.close()


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"quantization": "nf4"}, {"memory": ["recompute_layers"]}])
def test_graphs_on_a_card_give_the_bits_of_resident_ones(tmp_path, caplog, fields):
    """Attention sums in one order; both arms are graphs, whose heads have as many rows."""
    options = {"mixed_precision": "bf16", "use_cuda_graphs": True, "max_steps": 8}
    size = SIZES[fields.get("quantization", "Qwen3Moe")]
    torch.use_deterministic_algorithms(True)
    try:
        expected = train(tmp_path / "resident", **options, **fields)
        got = train(tmp_path / "streamed", **options, **streamed(fields, size))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "could not be captured" not in caplog.text
    assert_same_run(expected, got)
    assert got[2].offload.report().misses > 0
    got[2].offload.close()
