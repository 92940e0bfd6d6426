"""Checkpoints of runs whose weights are divided: any number of processes goes on from any of
them.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import runs
import tiny
import two_processes
from chronicals.kernels.adamw import join_master, split_master
from chronicals.models.loading import load_for_rows
from chronicals.saving import StoredStates

sys.path.insert(0, str(Path(__file__).parent))
import divided_runs

from comparison import equal

pytestmark = [
    pytest.mark.of_file(4),
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU"
    ),
]


STILL = 1e-30
"""A learning rate that changes no weight."""


def by(count, folder, **fields):
    """So many processes make the run, or go on with it; one alone has all weights."""
    folder.mkdir(exist_ok=True)
    if count == 1:
        divided_runs.train(
            folder, 1, **{name: value for name, value in fields.items() if name != "sharding_ranks"}
        )
        return
    codes, words = two_processes.run(divided_runs.__file__, folder, json.dumps(fields), count=count)
    assert codes == [0] * count, [said[-2500:] for said in words]


def steps(folder):
    return torch.tensor(runs.trajectory(folder), dtype=torch.float64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    by(1, folder)
    return folder


WAYS = {"1, 2, 4": (1, 2, 4), "4, 1, 2": (4, 1, 2), "2, 4, 2": (2, 4, 2)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_another_number_goes_on(tmp_path, whole, way):
    for number, count in enumerate(WAYS[way]):
        by(count, tmp_path / "a", max_steps=2 * (number + 1), resume=number > 0)
    torch.testing.assert_close(steps(tmp_path / "a"), steps(whole), rtol=1e-4, atol=0.0)
    ours = runs.weights(tmp_path / "a")
    theirs = runs.weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in theirs)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_another_number_goes_on_where_each_has_all_weights(tmp_path, whole, way):
    """And a share of the optimizer states."""
    for number, count in enumerate(WAYS[way]):
        by(
            count,
            tmp_path / "a",
            max_steps=2 * (number + 1),
            resume=number > 0,
            sharding="optimizer",
        )
    torch.testing.assert_close(steps(tmp_path / "a"), steps(whole), rtol=1e-4, atol=0.0)
    ours = runs.weights(tmp_path / "a")
    theirs = runs.weights(whole)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in theirs)


@pytest.mark.long
def test_copies_go_on_from_divided_weights(tmp_path, whole):
    by(2, tmp_path / "a", max_steps=2)
    by(4, tmp_path / "a", max_steps=4, resume=True, sharding_ranks=2)
    by(2, tmp_path / "a", resume=True, sharding="optimizer")
    torch.testing.assert_close(steps(tmp_path / "a"), steps(whole), rtol=1e-4, atol=0.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fields", [{}, {"tied": True, "mixed_precision": "bf16"}], ids=["fp32", "bf16, tied"]
)
def test_the_same_number_goes_on_to_the_bit(tmp_path, fields):
    by(2, tmp_path / "once", **fields)
    by(2, tmp_path / "twice", max_steps=4, **fields)
    by(2, tmp_path / "twice", resume=True, **fields)
    assert equal(steps(tmp_path / "once"), steps(tmp_path / "twice"))
    once, twice = (
        StoredStates(folder / "run/checkpoints/step-00000006")
        for folder in (tmp_path / "once", tmp_path / "twice")
    )
    assert once.names == twice.names
    assert all(equal(once.read(name), twice.read(name)) for name in once.names)


@pytest.mark.long
def test_masters_are_carried_over_exactly(tmp_path):
    """One process splits a weight into bf16 and the rest, divided weights are fp32: what is read
    is what was written.
    """
    by(2, tmp_path / "a", max_steps=2, mixed_precision="bf16")
    folder = tmp_path / "a/run/checkpoints/step-00000002"
    stored = StoredStates(folder)
    model = load_file(folder / "model/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    value = stored.read(f"{name}:weight")
    assert value.dtype == torch.float32 and model[name].dtype == torch.bfloat16
    assert equal(split_master(value)[0], model[name]) and not equal(model[name].float(), value)
    by(1, tmp_path / "a", max_steps=3, resume=True, mixed_precision="bf16", learning_rate=STILL)
    after = tmp_path / "a/run/checkpoints/step-00000003"
    high = load_file(after / "model/model.safetensors")[name]
    low = StoredStates(after).read(f"{name}:low")
    assert equal(join_master(high, low), value)
    by(2, tmp_path / "a", max_steps=4, resume=True, mixed_precision="bf16", learning_rate=STILL)
    assert equal(
        StoredStates(tmp_path / "a/run/checkpoints/step-00000004").read(f"{name}:weight"), value
    )


def test_what_is_left_is_a_whole_model_of_the_best_step(tmp_path):
    by(
        2,
        tmp_path / "a",
        keep="best",
        learning_rate=3e-2,
        eval_steps=1,
        save_steps=None,
        file_bytes=1,
    )
    result = json.loads((tmp_path / "a/result.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a/run/model")
    assert type(model).__name__ == "LlamaForCausalLM"
    files = sorted(
        (tmp_path / f"a/run/checkpoints/step-{result['step']:08d}/model").glob("*.safetensors")
    )
    best = {name: value for file in files for name, value in load_file(file).items()}
    assert best.keys() == model.state_dict().keys()
    assert all(equal(value, model.state_dict()[name]) for name, value in best.items())
    wrote = [json.loads((tmp_path / f"a/wrote-{rank}.json").read_text()) for rank in range(2)]
    assert wrote == [[0, 2], [1]] and len(files) == 3  # what is in no layer, and two layers
    assert all(
        file.samefile(tmp_path / "a/run/model" / file.name) for file in files
    )  # nobody copies them


LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
READ = {
    "full": {},
    "LoRA": LORA,
    "NF4": {**LORA, "quantization": "nf4"},
    "DoRA over NF4": {**LORA, "quantization": "nf4", "use_dora": True},
}


def test_adapters_beside_a_divided_base_go_on(tmp_path):
    """By as many processes, and by one."""
    fields = {**LORA, "learning_rate": 1e-3}
    for number, count in enumerate((2, 2, 1)):
        by(count, tmp_path / "a", max_steps=2 * (number + 1), resume=number > 0, **fields)
    by(1, tmp_path / "alone", **fields)
    torch.testing.assert_close(
        steps(tmp_path / "a"), steps(tmp_path / "alone"), rtol=1e-4, atol=0.0
    )
    names = runs.weights(tmp_path / "a").keys()
    assert names == runs.weights(tmp_path / "alone").keys() and all(
        "lora_" in name for name in names
    )


def read_by_two_and_by_one(folder, **fields):
    """Both train the same, over a model in files; that, and the bytes of weights that each of
    the two held when it was read.
    """
    source = folder / "source"
    model = tiny.llama(hidden_size=256, intermediate_size=512)
    model.save_pretrained(source)
    tiny.tokenizer().save_pretrained(source)
    fields = {
        **fields,
        "source": str(source),
        "max_steps": 2,
        "validation_split": 0.1,
        "learning_rate": 1e-3,
    }
    by(2, folder / "two", **fields)
    (folder / "one").mkdir()
    with patch.object(divided_runs.Mesh, "current", return_value=divided_runs.Mesh()):
        divided_runs.train(folder / "one", 1, **fields)
    torch.testing.assert_close(steps(folder / "two"), steps(folder / "one"), rtol=1e-4, atol=0.0)
    return model, [json.loads((folder / f"two/held-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", READ)
def test_weights_are_divided_while_they_are_read(tmp_path, kind):
    """No process has them whole; what it trains is what one process trains that has."""
    model, held = read_by_two_and_by_one(tmp_path, **READ[kind])
    layers = sum(p.numel() for p in model.get_decoder().layers.parameters())
    others = sum(p.numel() for p in model.parameters()) - layers
    at_most = (
        0 if kind == "full" else others + 0.6 * layers * (4 if kind == "LoRA" else 0.52)
    )  # bytes, of rows
    assert max(held) <= at_most


@pytest.mark.sample(1)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_begin_with_weights_are_divided_after_they_began(tmp_path, init):
    model, held = read_by_two_and_by_one(tmp_path, **LORA, lora_init=init)
    assert held == [sum(p.numel() for p in model.parameters())] * 2


def test_weights_that_cannot_be_read_by_rows_are_named(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 weights .* the first is model\.norm\.weight.*sharding='optimizer'"
    ):
        load_for_rows(tmp_path, torch.float32)
