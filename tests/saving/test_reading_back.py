"""A folder is read back before a run says that it ended: what it states otherwise than the model
that was trained is named.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import runs
import tiny
from chronicals.models import load_model
from chronicals.saving import CheckpointError, differences
from chronicals.training.run import run_checkpoints
from chronicals.training.run.checkpoint import newest_valid

QUICK = {"mixed_precision": "fp32", "max_steps": 1, "trackers": [], "save_steps": 1}
KINDS = {
    "whole": {},
    "adapters": {"use_lora": True},
    "over 4 bits": {"quantization": "nf4"},
    "starting values": {"use_lora": True, "lora_init": "pissa", "lora_rank": 2},
    "tokens and head": {
        "use_lora": True,
        "lora_trainable_tokens": [3, 5],
        "lora_modules_to_save": ["lm_head"],
    },
    "tied": {},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Of each kind of run its folder, its model, and what it noted."""
    done = {}

    def of(kind):
        if kind not in done:
            folder = tmp_path_factory.mktemp("reading")
            tiny.llama(tie_word_embeddings=kind == "tied").save_pretrained(folder / "base")
            model = load_model(folder / "base", torch.float32)
            if kind == "PEFT":
                peft = pytest.importorskip("peft")
                model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
            place = runs.train(
                folder, rows=tiny.chat_rows(8), model=model, **QUICK, **KINDS.get(kind, {})
            ).model_dir
            done[kind] = place, model, json.loads((place / "chronicals.json").read_text())
        return done[kind]

    return of


def edit(name, change):
    """Change a file of JSON."""

    def spoil(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return spoil


def tensors(name, change):
    """Change a file of tensors."""

    def spoil(folder):
        stored = load_file(folder / name)
        change(stored)
        save_file(stored, folder / name)

    return spoil


def set_base(content):
    content["base"]["in_4_bits"][0]["block"] = 128


def move(stored):
    name = next(iter(sorted(stored)))
    stored[name] = stored[name] + 1e-3


def drop(stored):
    del stored[sorted(stored)[-1]]


def drop_head(stored):
    del stored["base_model.model.lm_head.weight"]


def cast(stored):
    stored.update({name: value.bfloat16() for name, value in stored.items()})


ADAPTER = "adapter_model.safetensors"
WHOLE = "model.safetensors"
FAULTS = {
    "another base": (
        "over 4 bits",
        edit("chronicals.json", set_base),
        "says that the base is in NF4 in blocks of 128",
    ),
    "no base": (
        "over 4 bits",
        edit("chronicals.json", lambda c: c.update(base={})),
        "the base is not quantised, it is in NF4",
    ),
    "another run": (
        "whole",
        edit("chronicals.json", lambda c: c.update(kinds=["text"])),
        "what was noted of the run",
    ),
    "another scale": (
        "adapters",
        edit("adapter_config.json", lambda c: c.update(lora_alpha=1)),
        "scales the adapter of",
    ),
    "other adapters": ("adapters", tensors(ADAPTER, move), "has other values than were trained"),
    "fewer adapters": ("adapters", tensors(ADAPTER, drop), "is missing"),
    "adapters of another type": (
        "adapters",
        tensors(ADAPTER, cast),
        "is torch.bfloat16, torch.float32 was trained",
    ),
    "other starting values": (
        "starting values",
        tensors(ADAPTER, move),
        "has other values than were trained",
    ),
    "no head": (
        "tokens and head",
        tensors(ADAPTER, drop_head),
        "lacks lm_head.weight, which was trained",
    ),
    "other tokens": (
        "tokens and head",
        tensors(ADAPTER, move),
        "has other values than were trained",
    ),
    "PEFT's other rank": (
        "PEFT",
        edit("adapter_config.json", lambda c: c.update(r=4)),
        "has r=4, 2 was trained",
    ),
    "PEFT's other values": ("PEFT", tensors(ADAPTER, move), "has other values than were trained"),
    "PEFT's other adapter": (
        "PEFT",
        edit("chronicals.json", lambda c: c.update(active_adapters=["mine"])),
        "names the adapters ['mine']",
    ),
    "another class": (
        "whole",
        edit("config.json", lambda c: c.update(architectures=["X"])),
        "the class ['X'], it is Llama",
    ),
    "another type": (
        "whole",
        edit("config.json", lambda c: c.update(dtype="bfloat16")),
        "weights are bfloat16, they are",
    ),
    "a format": (
        "whole",
        edit("config.json", lambda c: c.update(quantization_config={"x": 1})),
        "has a quantization_config",
    ),
    "other weights": ("whole", tensors(WHOLE, move), "has other values than were trained"),
    "fewer weights": ("whole", tensors(WHOLE, drop), "is missing"),
    "weights of another type": (
        "whole",
        tensors(WHOLE, cast),
        "is torch.bfloat16, torch.float32 was trained",
    ),
    "a stop token": (
        "adapters",
        edit("generation_config.json", lambda c: c.update(eos_token_id=0)),
        "has eos_token_id=0",
    ),
    "no settings": (
        "whole",
        lambda folder: (folder / "generation_config.json").unlink(),
        "is missing",
    ),
    "a template": (
        "adapters",
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        "another chat template",
    ),
    "a tokenizer": (
        "whole",
        edit("tokenizer.json", lambda c: c.update(normalizer={"type": "Lowercase"})),
        "gives other ids than",
    ),
    "a vocabulary": (
        "whole",
        edit("tokenizer.json", lambda c: c["model"]["merges"].pop()),
        "has other merges than",
    ),
    "an end of text": (
        "adapters",
        edit("tokenizer_config.json", lambda c: c.update(eos_token="<|im_end|>")),
        "the tokenizer has eos_token_id=",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "PEFT"])
def test_what_a_run_writes_is_what_it_trained(made, kind):
    folder, model, about = made(kind)
    assert list(differences(folder, model, tiny.tokenizer(), about)) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_is_named(made, tmp_path, fault):
    kind, spoil, said = FAULTS[fault]
    folder, model, about = made(kind)
    shutil.copytree(folder, tmp_path / "model")
    spoil(tmp_path / "model")
    found = list(differences(tmp_path / "model", model, tiny.tokenizer(), about))
    assert any(said in clause for clause in found), found


@pytest.mark.slow
def test_a_run_that_wrote_something_else_does_not_say_that_it_ended(tmp_path, monkeypatch):
    """Its checkpoint stays, from which it ends as it should once what was wrong is mended."""
    right = run_checkpoints.save_model

    def wrong(folder, *given):
        right(folder, *given)
        tensors(ADAPTER, move)(folder)

    with monkeypatch.context() as patch:
        patch.setattr(run_checkpoints, "save_model", wrong)
        with pytest.raises(
            CheckpointError,
            match="is not what was trained, so it was not kept: .* stays: .*step-0+1",
        ):
            runs.train(tmp_path, use_lora=True, **QUICK)
    assert not (tmp_path / "run" / "model").exists() and newest_valid(tmp_path / "run") is not None
    result = runs.train(tmp_path, use_lora=True, resume=True, **QUICK)
    assert (result.model_dir / ADAPTER).exists()
