"""Adapters that start as what quantising took from the weights: beside PEFT's own decomposition,
in runs, and saved.
"""

import json

import pytest
import torch
from adapted import changed, close, llama, logits, tokens, train_on
from typer.testing import CliRunner

import runs
import tiny
from chronicals.cli.app import app
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.export.merge import merge
from chronicals.lora import (
    LoRAConfig,
    adapters,
    apply_lora,
    load_adapter,
    save_adapter,
    without_adapters,
)
from chronicals.lora.loftq import LoftQ
from chronicals.models import load_model, quantise_layers
from chronicals.models.four_bits import WATCHED
from chronicals.quantization import Linear4bit, Packed
from chronicals.training.adapters import watcher
from chronicals.verification import verify
from comparison import equal

peft = pytest.importorskip("peft")

CASES = {
    "plain": {},
    "scaled": {"alpha": 3},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"down_proj": 3}},
    "some layers": {"target_modules": ["q_proj"], "layers": [1]},
    "an expression": {"target_modules": r".*mlp\.(up|down)_proj"},
    "dora": {"use_dora": True},
}


def ours(**fields):
    config = LoRAConfig(**{"rank": 4, "alpha": 4, "dropout": 0.0, "init": "loftq", **fields})
    model = llama()
    quantise_layers(model, LoftQ(config))
    return apply_lora(model, config).eval()


@pytest.mark.parametrize("case", CASES)
def test_the_start_is_nearer_to_the_weights(case):
    """By as much as a matrix of that rank can be, which PEFT's decomposition gives; of targets
    alone.
    """
    from peft.utils.loftq_utils import _low_rank_decomposition

    model = ours(**CASES[case])
    plain = llama()
    assert WATCHED not in vars(model)
    for path, layer in adapters(model):
        weight = plain.get_submodule(path).weight
        base = layer.base_layer.packed.dense()
        taken = weight - base
        added = layer.scale * layer.lora_B @ layer.lora_A
        found = _low_rank_decomposition(taken.detach(), len(layer.lora_A))
        assert close(added, found["L"] @ found["R"], 1e-3)
        best = torch.linalg.svdvals(taken.detach())[len(layer.lora_A) :].norm()
        assert close((taken - added).norm(), best, 1e-4) and best < 0.97 * taken.norm()
        if layer.lora_magnitude_vector is not None:  # rows are as long as they are
            assert close(layer.lora_magnitude_vector, (base + added).norm(dim=1), 1e-5)


@pytest.mark.gpu
def test_the_start_is_pefts_own(device):
    from peft.utils.loftq_utils import loftq_init

    weight = torch.randn(64, 96, device=device)
    _, a, b = loftq_init(weight, num_bits=4, reduced_rank=8, num_iter=1)
    config = LoRAConfig(8, 8, 0.0)
    watch = LoftQ(config)
    watch("layer", weight, Packed.of(weight, nested=False))
    mine = watch.starts["layer"]
    assert close((mine[1] @ mine[0]).to(device), b @ a, 1e-3)


def test_logits_are_nearer_to_the_models():
    """With the rank of the weights nothing is lost."""
    ids = tokens()
    plain = llama()
    expected = logits(plain, ids)
    quantised = llama()
    quantise_layers(quantised)
    lost = (logits(quantised.eval(), ids) - expected).norm()
    assert (logits(ours(rank=32, alpha=32), ids) - expected).norm() < 0.6 * lost
    assert (
        logits(ours(rank=32, alpha=32, target_modules=["q_proj", "o_proj"]), ids) - expected
    ).norm() < lost


def test_read_is_quantised_in_memory(tmp_path):
    """While a checkpoint is read, in shards: the same starts."""
    tiny.llama().save_pretrained(tmp_path, max_shard_size="100KB")
    config = LoRAConfig(4, 12, 0.0, init="loftq")
    read = apply_lora(
        load_model(tmp_path, torch.float32, quantization="nf4", watch=LoftQ(config)), config
    )
    for (path, layer), (other, mate) in zip(adapters(read), adapters(ours(alpha=12)), strict=True):
        assert path == other and layer.lora_B.any() and isinstance(layer.base_layer, Linear4bit)
        if not torch.cuda.is_available():
            assert equal(layer.lora_A, mate.lora_A) and equal(layer.lora_B, mate.lora_B)
        # On a card the singular vectors of near values mix, and have another sign: what is compared
        # is their product.
        assert close(layer.lora_B @ layer.lora_A, mate.lora_B @ mate.lora_A, 5e-3)


def test_saved_it_is_right_on_the_base_in_4_bits(tmp_path):
    """Which is what anybody gets who quantises the original weights."""
    model = ours()
    ids = tokens()
    expected = train_on(model, ids)
    save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] is True
    base = llama()
    quantise_layers(base)
    bare = logits(base.eval(), ids)
    with without_adapters(model):
        assert equal(logits(model, ids), bare)
    assert equal(logits(load_adapter(base, tmp_path).eval(), ids), expected) and changed(
        expected, bare
    )
    for module in (plain := llama()).modules():  # PEFT's over the values that the 4 bits stand for
        if type(module) is torch.nn.Linear and module is not plain.lm_head:
            module.weight.data.copy_(Linear4bit.of(module).packed.dense())
    assert close(
        logits(peft.PeftModel.from_pretrained(plain, tmp_path).eval(), ids), expected, 1e-4
    )
    assert close(logits(model.merge_and_unload(), ids), expected, 1e-4)


FIELDS = {
    "use_lora": True,
    "quantization": "nf4",
    "lora_init": "loftq",
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "trackers": [],
}
FIELDS |= {"learning_rate": 1e-3, "save_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["while it is read", "when the run begins"])
def test_a_run_resumes_and_merges(tmp_path, loaded):
    """Bit-equal after a break; what ``merge`` writes from files is the trained model."""
    import shutil

    tiny.llama().save_pretrained(tmp_path / "base")
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"

    def train(folder, **more):
        config = runs.config(folder, **FIELDS)
        early = (
            {"quantization": "nf4", "watch": watcher(config)}
            if loaded == "while it is read"
            else {}
        )
        model = load_model(tmp_path / "base", torch.float32, **early)
        runs.train(folder, model=model, **FIELDS, **more)
        return model.eval()

    model = train(whole)
    first = "run/checkpoints/step-00000003"
    shutil.copytree(whole / first, broken / first)
    train(broken, resume=True)
    once, twice = (runs.weights(folder) for folder in (whole, broken))
    assert once.keys() == twice.keys() and all(equal(once[name], twice[name]) for name in once)
    merged = merge(whole / "run", tmp_path / "merged")
    assert all(change.change > 0 for change in merged.changes.values())
    ids = tokens()
    assert close(
        logits(load_model(tmp_path / "merged", torch.float32).eval(), ids), logits(model, ids), 1e-3
    )
    again = dict(FIELDS, max_steps=2)
    runs.train(
        tmp_path / "more", model=model, **again
    )  # a second run of the same settings goes on with the adapters


@pytest.mark.slow
def test_the_command_line(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in tiny.chat_rows()))
    options = [
        "--load-in-4bit",
        "--lora-init",
        "loftq",
        "--lora-rank",
        "8",
        "--max-steps",
        "1",
        "--mixed-precision",
        "fp32",
    ]
    options += [
        "--max-seq-length",
        "128",
        "--output-dir",
        str(tmp_path / "run"),
        "--cache-dir",
        str(tmp_path / "tokens"),
    ]
    options += [
        "--report-samples",
        "0",
        "--learning-rate",
        "1e-9",
        "--lora-dropout",
        "0",
        "--trackers",
        "none",
    ]
    command = [
        "train",
        "--model",
        str(tmp_path / "base"),
        "--data",
        str(tmp_path / "rows.jsonl"),
        *options,
    ]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    found = runs.weights(tmp_path)
    assert all(tensor.norm() > 1e-2 for name, tensor in found.items() if "lora_B" in name)


@pytest.mark.slow
def test_the_run_is_the_plain_one(tmp_path):
    model = tiny.llama()
    config = runs.config(tmp_path, **FIELDS)
    quantise_layers(model, watcher(config))
    assert not verify(model, tiny.tokenizer(), config, tiny.chat_rows()).failures


# --- what is refused
# -----------------------------------------------------------------------------------------------


def test_over_16_bits_it_is_refused():
    with pytest.raises(
        ConfigurationError,
        match="lora_init='loftq': .* quantization is not set; set quantization='nf4'",
    ):
        ChronicalsConfig(use_lora=True, lora_init="loftq")
    model = llama()
    with pytest.raises(ValueError, match="is not in 4 bits.*set quantization='nf4'"):
        apply_lora(model, LoRAConfig(4, 4, 0.0, init="loftq"))
    assert all(p.requires_grad for p in model.parameters()) and not list(adapters(model))


def test_weights_that_are_gone_are_refused():
    model = llama()
    quantise_layers(model)
    with pytest.raises(
        ValueError, match="quantised before, .* give the model in 16 bits with quantization='nf4'"
    ):
        apply_lora(model, LoRAConfig(4, 4, 0.0, init="loftq"))


@pytest.mark.parametrize("other", [{"rank": 5, "alpha": 5}, {"alpha": 9}], ids=str)
def test_starts_of_another_shape_are_refused(other):
    model = llama()
    quantise_layers(model, LoftQ(LoRAConfig(4, 4, 0.0)))
    with pytest.raises(ValueError, match="for another rank and alpha"):
        apply_lora(
            model, LoRAConfig(**{"rank": 4, "alpha": 4, "dropout": 0.0, "init": "loftq", **other})
        )


def test_a_rank_beyond_the_weight_is_refused():
    with pytest.raises(
        ValueError, match=r"has rank 65, its weight \(64, 64\) only 64; set lora_rank"
    ):
        ours(rank=65)


@pytest.mark.parametrize("field", ["loftq_config", "loftq_iter"])
def test_more_alternations_are_refused_by_name(field):
    with pytest.raises(ConfigurationError, match=f"{field}.*lora_init='loftq'.*one alternation"):
        ChronicalsConfig(**{field: 4})
