"""Whether GRPO raises the held-out accuracy of our own model on arithmetic, beside TRL's trainer.

    python benchmarks/grpo_learns.py OUTPUT.json [--seeds 3] [--steps 75] [--only dense]
    python benchmarks/grpo_learns.py OUTPUT.json --page      # write docs/grpo.md and the plot again

A small model is trained on sums of two numbers (SFT), and then with rewards for right answers: by
ours and by TRL's ``GRPOTrainer`` at the same settings, over seeds, which decide the order of the
questions and what is drawn. Accuracy is that of greedy answers to held-out sums, measured on both
in the same way, every few steps.

A small native mixture goes the same way, with ``router.anchor`` and without. Drift is the KL of the
routers' distributions on held-out sums from those before, the mean over layers and tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_small as small
import numpy as np
import torch
import transformers
from moe_stages import drifted
from page_text import laid_out
from plots import OURS, PEERS, new_figure, save

from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.benchmark.shapes import byte_tokenizer
from chronicals.models import load_model
from chronicals.moe.lookahead.recording import record_data
from chronicals.rewards.built_in import BUILT_IN
from chronicals.training.run import report
from chronicals.training.run.evaluation import evaluate_data

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "grpo.md"
BEGIN, END = "<!-- learns -->", "<!-- /learns -->"

NUMBERS = range(10, 60)
HELD_OUT = 300
"""Numbers of the sums, and how many of the 2500 sums are held out."""

SFT_STEPS = {"dense": 180, "native mixture": 250}
"""Steps after which many of the held-out sums are answered wrongly: there is much to gain."""

PROMPTS, ANSWERS, NEW_TOKENS = 16, 8, 4
LEARNING_RATE = 3e-4
WARM_UP = 5
EVERY = 15
"""Steps between two measurements."""

ANCHOR = 3.0
"""Weight of the anchor, as in ``moe_stages.py``."""

MIXTURE_SHARE = 0.4
"""Share of the steps that the mixture takes, which learns sooner."""

MIXTURE = {"num_hidden_layers": 4, "num_experts": 8}


def sums() -> tuple[list[dict], list[dict]]:
    """Return the sums with their answers: to train on, and held out."""
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in NUMBERS for b in NUMBERS]
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[n] for n in order[HELD_OUT:]], [rows[n] for n in order[:HELD_OUT]]


def asked(rows: list[dict]) -> list[dict]:
    """Return the questions alone."""
    return [{"prompt": row["prompt"]} for row in rows]


def dense(tokenizer: Any, seed: int) -> Any:
    """Return a Llama of half a million parameters."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=len(tokenizer),
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def mixture(tokenizer: Any, seed: int) -> Any:
    """Return a small native mixture."""
    return small.native(tokenizer, seed, **MIXTURE)


MODELS: dict[str, Callable] = {"dense": dense, "native mixture": mixture}


def configuration(folder: Path, **changes: Any) -> ChronicalsConfig:
    """Return what all runs of ours share."""
    usual = {
        "batch_size": 2,
        "max_seq_length": 256,
        "mixed_precision": "fp32",
        "lr_scheduler": "constant",
        "warmup_steps": WARM_UP,
        "weight_decay": 0.0,
        "save_steps": None,
        "trackers": [],
        "report_samples": 0,
        "keep": "last",
        "output_dir": folder / "run",
        "cache_dir": folder.parent / "tokens",
    }
    return ChronicalsConfig(**{**usual, **changes})


def drawing(folder: Path, **changes: Any) -> ChronicalsConfig:
    """Return the configuration of training with rewards."""
    return configuration(
        folder,
        objective="grpo",
        grpo={"answers": ANSWERS, "prompts": PROMPTS, "max_new_tokens": NEW_TOKENS},
        rewards=["arithmetic"],
        learning_rate=LEARNING_RATE,
        **changes,
    )


def accuracy(model: Any, tokenizer: Any, folder: Path) -> float:
    """Return the share of held-out sums to which the greedy answer is right."""
    held_out = asked(sums()[1])
    found = evaluate_data(model, tokenizer, held_out, drawing(folder))
    return found.others["reward"]


def taught(kind: str, folder: Path, tokenizer: Any) -> Path:
    """Train a model on sums with their answers; return where it is saved."""
    model = MODELS[kind](tokenizer, 0)
    config = configuration(
        folder,
        max_steps=SFT_STEPS[kind],
        learning_rate=2e-3,
        max_seq_length=512,
        gradient_accumulation_steps=1,
    )
    ChronicalsTrainer(model, tokenizer, config).train(sums()[0])
    model.save_pretrained(folder / "base")
    return folder / "base"


def ours(base: Path, folder: Path, tokenizer: Any, seed: int, steps: int, **changes: Any) -> Any:
    """Train with rewards; return the accuracy by step, and the model."""
    train, held_out = map(asked, sums())
    model = load_model(base, torch.float32)
    config = drawing(folder, max_steps=steps, eval_steps=EVERY, seed=seed, **changes)
    ChronicalsTrainer(model, tokenizer, config).train(train, held_out)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    curve = [
        (line["step"], line["eval_reward"])
        for line in map(json.loads, lines)
        if "eval_reward" in line
    ]
    return curve, model


def trl(base: Path, folder: Path, tokenizer: Any, seed: int, steps: int) -> list[tuple[int, float]]:
    """Train with TRL's trainer at the same settings; return the accuracy by step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = load_model(base, torch.float32)
    reward, _ = BUILT_IN["arithmetic"](None)
    curve = list[tuple[int, float]]()

    class Measured(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step % EVERY == 0:
                copy = load_model(base, torch.float32)
                copy.load_state_dict(model.state_dict())
                curve.append((state.global_step, accuracy(copy, tokenizer, folder)))

    args = GRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=NEW_TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARM_UP,
        weight_decay=0.0,
        max_steps=steps,
        seed=seed,
        logging_steps=steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    GRPOTrainer(
        model,
        reward,
        args,
        train_dataset=Dataset.from_list(asked(sums()[0])),
        processing_class=tokenizer,
        callbacks=[Measured()],
    ).train()
    return curve


def compared(folder: Path, tokenizer: Any, seeds: int, steps: int) -> dict[str, Any]:
    """Return the curves of ours and of TRL's trainer."""
    base = taught("dense", folder / "sft", tokenizer)
    start = accuracy(load_model(base, torch.float32), tokenizer, folder / "start")
    found: dict[str, Any] = {"before": start, "ours": [], "trl": []}
    for seed in range(seeds):
        began = time.perf_counter()
        curve, _ = ours(base, folder / f"ours-{seed}", tokenizer, seed, steps)
        middle = time.perf_counter()
        theirs = trl(base, folder / f"trl-{seed}", tokenizer, seed, steps)
        ended = time.perf_counter()
        found["ours"].append({"seed": seed, "curve": curve, "seconds": middle - began})
        found["trl"].append({"seed": seed, "curve": theirs, "seconds": ended - middle})
    return found


def anchored(folder: Path, tokenizer: Any, seeds: int, steps: int) -> list[dict[str, Any]]:
    """Return accuracy and drift of the routers of a native mixture, with the anchor and without."""
    base = taught("native mixture", folder / "mixture", tokenizer)
    held_out = sums()[1]
    plain = configuration(folder / "recorded")

    def recorded(model: Any) -> list[Any]:
        return list(record_data(model, tokenizer, held_out, plain))

    first = load_model(base, torch.float32)
    began = recorded(first)
    start = accuracy(first, tokenizer, folder / "start")
    found = []
    for seed in range(seeds):
        for weight in (0.0, ANCHOR):
            router = {"metrics": True, "anchor": weight, "anchor_tokens": 256}
            run = folder / f"mixture-{weight}-{seed}"
            few = round(MIXTURE_SHARE * steps)
            curve, model = ours(base, run, tokenizer, seed, few, router=router)
            found.append(
                {
                    "seed": seed,
                    "weight": weight,
                    "before": start,
                    "curve": curve,
                    "drift": drifted(began, recorded(model)),
                }
            )
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the accuracy by step, a line a run."""
    figure = new_figure(8, 3.4)
    left, right = figure.subplots(1, 2, sharey=True)
    dense_runs = result["dense"]
    for name, colour in (("trl", PEERS), ("ours", OURS)):
        for run in dense_runs[name]:
            steps, values = zip((0, dense_runs["before"]), *run["curve"])
            left.plot(steps, values, color=colour, label=name if not run["seed"] else None)
    left.set(title="a small Llama", xlabel="steps", ylabel="held-out accuracy")
    for run in result.get("mixture", []):
        steps, values = zip((0, run["before"]), *run["curve"])
        label = "with the anchor" if run["weight"] else "without"
        right.plot(
            steps,
            values,
            color=OURS if run["weight"] else PEERS,
            label=label if not run["seed"] else None,
        )
    right.set(title="a small native mixture", xlabel="steps")
    for axes in (left, right):
        axes.legend()
    save(figure, path)


def percents(values: list[float]) -> str:
    """Return the values of the seeds as percentages."""
    return ", ".join(f"{value:.0%}" for value in values)


def text_of(result: dict[str, Any], file: str) -> str:
    """Return what a page says of a result."""
    dense_runs = result["dense"]
    about = result["about"]
    ends = {name: [run["curve"][-1][1] for run in dense_runs[name]] for name in ("ours", "trl")}
    lines = [
        f"`benchmarks/grpo_learns.py`, {about['steps']} steps of {PROMPTS} x {ANSWERS} answers on "
        f"one CPU core, {len(ends['ours'])} seeds: a small Llama that SFT has taught sums of two "
        f"numbers answers {dense_runs['before']:.0%} of {HELD_OUT} held-out ones rightly. After "
        f"GRPO it answers {percents(ends['ours'])}; TRL's `GRPOTrainer` at the same settings ends "
        f"at {percents(ends['trl'])}; so few seeds do not tell the two apart.",
    ]
    runs = result.get("mixture", [])
    if runs:
        sides = {on: [run for run in runs if bool(run["weight"]) == on] for on in (False, True)}
        drift = {on: statistics.mean(run["drift"] for run in sides[on]) for on in sides}
        shares = [held["drift"] / free["drift"] for free, held in zip(sides[False], sides[True])]
        reached = {on: percents([run["curve"][-1][1] for run in sides[on]]) for on in sides}
        lines += [
            "",
            f"A small native mixture rises from {runs[0]['before']:.0%} to {reached[True]} with "
            f"`router.anchor: {ANCHOR:g}`, and to {reached[False]} without it; its routers drift by "
            f"{drift[True]:.2g} with the anchor and by {drift[False]:.2g} without (mean KL on "
            f"held-out sums), {' and '.join(f'{share:.2f}' for share in (min(shares), max(shares)))} "
            "of it in the seeds that differ most.",
        ]
    lines += ["", f"![held-out accuracy by step, a line a seed](../benchmarks/results/{file})"]
    return "\n".join(lines)


def write_page(result: dict[str, Any], file: str) -> None:
    """Write the text between the marks of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    text = text_of(result, file)
    PAGE.write_text(laid_out(f"{before}{BEGIN}\n{text}\n{END}{after}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--only", choices=("dense", "mixture"), help="others stay as they are")
    parser.add_argument("--page", action="store_true", help="run nothing")
    given = parser.parse_args()
    began = time.perf_counter()
    result = json.loads(given.output.read_text()) if given.output.exists() else {}
    if not given.page:
        tokenizer = byte_tokenizer()
        report._figure = lambda _: b""  # plots that nobody looks at
        sides = {"dense": compared, "mixture": anchored}
        for name, run in sides.items():
            if given.only in (None, name):
                with tempfile.TemporaryDirectory() as folder:
                    result[name] = run(Path(folder), tokenizer, given.seeds, given.steps)
                about = {"steps": given.steps, "learning_rate": LEARNING_RATE}
                result["about"] = small.about(began, **about)
                small.write(given.output, result)
    picture = given.output.with_suffix(".png")
    draw(result, picture)
    write_page(result, picture.name)


if __name__ == "__main__":
    main()
