"""Twenty configurations, converted, pass the check with the other tool's steps, rates and masks.

Steps and warm-up are counted here as the tools count them, rates are transformers' own schedules,
and trained tokens those of the rows' messages.
"""

import json
import math

import pytest
import torch
import transformers
import yaml

import tiny
from chronicals.cli import main
from chronicals.config import Recipe
from chronicals.convert import convert
from chronicals.training.step.training_step import rate_factor

ROWS = 41
"""A prime number, which no batch divides."""

AXOLOTL = {
    "base_model": "base",
    "datasets": [{"path": "chats.jsonl", "type": "chat_template"}],
    "sequence_len": 128,
    "learning_rate": "3e-4",
}
FACTORY = {
    "model_name_or_path": "base",
    "stage": "sft",
    "dataset": "chats.jsonl",
    "cutoff_len": 128,
    "finetuning_type": "full",
}
TRL = {"model_name_or_path": "base", "dataset_name": "chats.jsonl", "max_length": 128}

CASES = [
    (AXOLOTL, {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "num_epochs": 2}),
    (AXOLOTL, {"micro_batch_size": 4, "warmup_ratio": 0.15}),
    (AXOLOTL, {"micro_batch_size": 1, "warmup_steps": 1}),
    (AXOLOTL, {"max_steps": 20, "warmup_ratio": 0.27, "lr_scheduler": "linear"}),
    (AXOLOTL, {"num_epochs": 3, "lr_scheduler": "constant"}),
    (AXOLOTL, {"micro_batch_size": 2, "lr_scheduler": "constant_with_warmup", "warmup_steps": 4}),
    (AXOLOTL, {"batch_size": 8, "micro_batch_size": 2, "cosine_min_lr_ratio": 0.1}),
    (FACTORY, {}),
    (FACTORY, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    (FACTORY, {"num_train_epochs": 1.0, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine"}),
    (FACTORY, {"num_train_epochs": 2, "finetuning_type": "lora", "lora_target": "all"}),
    (FACTORY, {"max_steps": 7, "warmup_steps": 0.3}),
    (FACTORY, {"train_on_prompt": True, "per_device_train_batch_size": 3}),
    (FACTORY, {"mask_history": True, "num_train_epochs": 0.5}),
    (TRL, {}),
    (TRL, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}),
    (TRL, {"assistant_only_loss": True, "num_train_epochs": 2}),
    (TRL, {"use_peft": True, "lora_r": 4, "max_steps": 9, "warmup_steps": 3}),
    (TRL, {"num_train_epochs": 0.3, "per_device_train_batch_size": 1}),
    (TRL, {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 20, "warmup_steps": 2,
           "lr_scheduler_kwargs": {"num_decay_steps": 5, "decay_type": "linear"}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    tiny.llama().save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    rows = "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(ROWS))
    (folder / "chats.jsonl").write_text(rows)
    return folder


def their_steps(theirs):
    """Optimizer steps, as Axolotl counts them for the whole run and transformers for an epoch."""
    if "max_steps" in theirs:
        return theirs["max_steps"]
    if "base_model" in theirs:
        micro = theirs.get("micro_batch_size", 1)
        passes = theirs.get("gradient_accumulation_steps", theirs.get("batch_size", micro) // micro)
        return math.ceil(ROWS * theirs.get("num_epochs", 1) / (micro * passes))
    batches = math.ceil(ROWS / theirs.get("per_device_train_batch_size", 8))
    updates = math.ceil(batches / theirs.get("gradient_accumulation_steps", 1))
    return math.ceil(theirs.get("num_train_epochs", 3) * updates)


def their_warmup(theirs, steps):
    if theirs.get("lr_scheduler") == "constant":
        return 0
    if "base_model" in theirs:
        warmup = theirs.get("warmup_steps", int(theirs.get("warmup_ratio", 0.0) * steps))
        warmup = 2 if warmup == 1 else warmup
        unsaid = not {"warmup_steps", "warmup_ratio"} & set(theirs)
        return math.ceil(0.03 * steps) if unsaid else warmup
    warmup = theirs.get("warmup_steps", theirs.get("warmup_ratio", 0))
    return math.ceil(warmup * steps) if warmup < 1 else warmup


def their_rates(theirs, steps):
    """Factors of the peak by transformers' schedules, one a step."""
    usual = "cosine" if "base_model" in theirs else "linear"
    name = theirs.get("lr_scheduler", theirs.get("lr_scheduler_type", usual))
    warmup = their_warmup(theirs, steps)
    further = theirs.get("lr_scheduler_kwargs")
    if "cosine_min_lr_ratio" in theirs:
        name, further = "cosine_with_min_lr", {"min_lr_rate": theirs["cosine_min_lr_ratio"]}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = transformers.get_scheduler(
        name, optimizer, warmup, steps, scheduler_specific_kwargs=further
    )
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def their_trained_tokens(theirs, place):
    """Tokens of the answers, with the token that ends them; or all tokens but the first."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "base")
    whole = theirs.get("train_on_prompt") or (
        "dataset_name" in theirs and not theirs.get("assistant_only_loss")
    )
    count = 0
    for row in tiny.chat_rows(ROWS):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        asked = tokenizer.apply_chat_template(
            row["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        assert text.startswith(asked)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = text.removeprefix(asked)
        if not theirs.get("assistant_only_loss"):
            answer = answer.rstrip("\n")
        trained = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
        count += len(ids) - 1 if whole else trained
    return count


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_recipe_runs_like_theirs(number, place, monkeypatch, caplog):
    base, changes = CASES[number]
    theirs = {**base, **changes}
    monkeypatch.chdir(place)
    (place / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    conversion = convert(place / "theirs.yaml")
    (place / "recipe.yaml").write_text(conversion.text())
    caplog.set_level("INFO")
    out = place / f"checked-{number}"
    with pytest.raises(SystemExit) as checked:
        main(["train", "recipe.yaml", "--check", "--cache-dir", "tokens", f"--output-dir={out}"])
    assert checked.value.code == 0, caplog.text
    steps = their_steps(theirs)
    assert f"training: {steps} step" in caplog.text
    config = Recipe.given(file=place / "recipe.yaml").config()
    ours = [rate_factor(config, step, steps) for step in range(steps)]
    assert ours == pytest.approx(their_rates(theirs, steps), abs=1e-6)
    report = json.loads((out / "train_dataset.json").read_text())
    share = 0.5 if theirs.get("num_train_epochs") == 0.5 else 1
    if "max_steps" in conversion.fields or share == 1:
        assert report["targets"] == their_trained_tokens(theirs, place)
