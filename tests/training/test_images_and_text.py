"""Models of images and text, family by family: text trains as in transformers, what reads images
stays bit by bit.
"""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import families
import runs
import tiny
import vision_models
from chronicals.cli import main
from chronicals.data import DataError
from chronicals.generation import load_trained
from chronicals.models import is_within, present
from chronicals.objectives import build_objective
from chronicals.patching import patch_parts
from chronicals.training import ChronicalsTrainer
from chronicals.training.run.evaluation import evaluate_data
from chronicals.verification import verify
from comparison import equal

every_family = pytest.mark.parametrize("name", vision_models.MODELS)
TOLERANCE = 3e-5
"""In fp64, where the classes themselves round to fp32 in their norms and rotations."""

ways = pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@every_family
def test_loss_and_gradients_are_those_of_transformers(name, packed):
    """Documents of a pack, through fused layers, beside each document alone through the whole
    class: positions of several dimensions, windows and masks of images change nothing. What
    reads images has no gradient."""
    model = vision_models.build(name).double()
    batch = families.documents_batch((40, 3, 1, 25))
    presented = present(model)
    assert presented.packed and presented.head is not None
    presented = dataclasses.replace(presented, packed=packed)
    objective = build_objective(runs.config(Path("unused")))

    def alone():
        total = 0.0
        for span in families.documents(batch):
            ids = batch.input_ids[None, span]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            total = total + loss * (ids.shape[1] - 1)
        return total

    def together():
        with presented.attending_documents():
            return objective(presented, batch)["cross_entropy"].sum

    losses = []
    gradients = []
    for call in (alone, together):
        found = []
        gradients.append(
            families.gradients(
                model, lambda call=call, found=found: found.append(call()) or found[0]
            )
        )
        losses.append(float(found[0]))
        if call is alone:
            patch_parts(model, whole_layers=packed)
    expected, got = gradients
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for path, gradient in expected.items():
        if is_within(path, vision_models.TOWERS[name]):
            assert gradient is None and got[path] is None, path
        else:
            assert gradient.any() and families.distance(got[path], gradient) <= TOLERANCE, path


def test_text_in_a_pack_has_the_positions_of_transformers():
    """Time, height and width are one number for text, from 0 in each document."""
    model = vision_models.build("qwen2_5_vl")
    ids = torch.randint(1, 61, (1, 9))
    theirs, _ = model.model.get_rope_index(ids, mm_token_type_ids=torch.zeros_like(ids))
    assert equal(theirs, torch.arange(9).expand(3, 1, 9))


@pytest.mark.slow
@pytest.mark.sample(4)
@ways
@every_family
def test_a_run_leaves_what_reads_images_bit_by_bit(name, lora, tmp_path, caplog):
    made = vision_models.build(name)
    towers = vision_models.TOWERS[name]
    made.save_pretrained(tmp_path / "base")
    before = load_file(tmp_path / "base" / "model.safetensors")
    model = type(made).from_pretrained(tmp_path / "base")
    config = runs.config(tmp_path, use_lora=lora, weight_decay=0.1, trackers=[])
    ChronicalsTrainer(model, tiny.tokenizer(), config).train(tiny.chat_rows())
    assert (
        "padded rows" not in caplog.text
        and "its own logits" not in caplog.text
        and "experts" not in caplog.text
    )
    trained = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not any(is_within(path, towers) for path in trained)
    if not lora:
        after = runs.weights(tmp_path)
        assert after.keys() == before.keys()
        same = {path for path in before if equal(after[path], before[path])}
        stems = tuple(tower.partition(".")[2] for tower in towers)
        assert same == {path for path in before if path.removeprefix("model.").startswith(stems)}
        again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
        assert type(again) is type(made)
    loaded = load_trained(tmp_path / "run")
    kept = loaded.model.state_dict()
    for path, tensor in made.state_dict().items():
        assert not is_within(path, towers) or equal(kept[path], tensor), path
    scored = runs.config(tmp_path, output_dir=tmp_path / "scored")
    losses = [
        evaluate_data(m, tiny.tokenizer(), tiny.chat_rows(), scored).loss
        for m in (model, loaded.model, made)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] < losses[2]


@pytest.mark.slow
@pytest.mark.sample(4)
@ways
@every_family
def test_such_a_run_is_verified(name, lora, tmp_path):
    config = runs.config(tmp_path, use_lora=lora, gradient_accumulation_steps=1)
    found = verify(vision_models.build(name), tiny.tokenizer(), config, tiny.chat_rows(), steps=5)
    assert found.passed, found.failures


@pytest.mark.slow
@pytest.mark.sample(2)
@every_family
def test_the_command_line_reads_what_it_trained(name, tmp_path, monkeypatch, capsys):
    vision_models.build(name).save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    rows = "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    common = ["--max-seq-length", "128", "--cache-dir", "tokens"]
    training = [
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        *common,
        "--mixed-precision",
        "fp32",
        "--max-steps",
        "2",
    ]
    for command in (
        ["train", *training, "--output-dir", "run", "--trackers", "none"],
        ["evaluate", "run", "--data", "rows.jsonl", *common],
        ["generate", "run", "--prompt", "hi", "--max-new-tokens", "3"],
        ["verify", *training[:-2], "--batch-size", "2"],
    ):
        monkeypatch.setattr(sys, "argv", ["chronicals", *command])
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == 0, capsys.readouterr().err


PICTURES = [
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "cat.png"},
                    {"type": "text", "text": "what?"},
                ],
            }
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:…"}}]}
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "video", "video": "cat.mp4"}]}]},
    {"messages": [{"role": "user", "content": "<image> what is it?"}], "images": ["cat.png"]},
    {"image": "cat.png", "conversations": [{"from": "human", "value": "<image>\nwhat is it?"}]},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", PICTURES, ids=["image", "image_url", "video", "images", "image column"]
)
def test_rows_with_pictures_are_refused_before_anything_is_trained(row, tmp_path):
    """By name, with a remedy; and with that remedy the rows of text are trained."""
    answer = {"role": "assistant", "content": "a cat"}
    said = {"from": "gpt", "value": "a cat"}
    row = {
        name: [*value, answer if name == "messages" else said]
        if name in ("messages", "conversations")
        else value
        for name, value in row.items()
    }
    rows = [*tiny.chat_rows(), row]
    model = vision_models.build("llava")
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    with pytest.raises(
        DataError,
        match=r"pictures_or_sound: 1 rows with pictures, video or sound.*row.* 61.*leave them out",
    ):
        runs.train(tmp_path, rows, model, max_steps=1, trackers=[])
    assert all(equal(tensor, before[path]) for path, tensor in model.state_dict().items())
    result = runs.train(
        tmp_path, rows, model, max_steps=1, trackers=[], gate={"pictures_or_sound": 0.1}
    )
    assert result.steps == 1
