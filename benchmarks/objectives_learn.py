"""Whether each objective lifts what it should, on a small task, over seeds.

    python benchmarks/objectives_learn.py OUTPUT.json [--seeds 3] [--steps 60] [--base-steps 400]
    [--only dpo,kto]

The task is brevity. A small model is trained to answer what functions of Python's standard library
do, each in the first sentence of its documentation. It then answers questions twice, by sampling,
and the shorter answer of the two is the better one: a scorer that is known. Every preference
objective is trained on such pairs from the same model and measured on held-out questions:

- accuracy: of held-out pairs, how often the log-probability of the shorter answer has risen by more
  than that of the longer one (of a reward model: how often its score is higher);
- win rate: how often a sampled answer is shorter than the untuned model's to the same question,
  ties counting half.

A control is DPO with the sides of all pairs exchanged, which must lose. Distillation trains a
smaller student from the first model and is measured by its held-out cross-entropy and its
divergence from the teacher, beside the same student trained as long on the tokens alone. A seed
decides the pairs that are held out, the order of the packs, and the student's weights.

OUTPUT.json holds every measurement; beside it is a plot of the same name.
"""

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plots import new_figure, save

from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.benchmark.record import current_commit, versions
from chronicals.data.tokens.tokenizer_training import questions_and_answers
from chronicals.models import load_model, load_tokenizer
from chronicals.training.quickstart import CPU, _write_model
from chronicals.training.run.evaluation import evaluate_data

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"learning_rate": 2e-4},
    "dpo, sides exchanged": {"objective": "dpo", "learning_rate": 2e-4},
    "ipo": {"learning_rate": 2e-4},
    "simpo": {"learning_rate": 2e-4, "simpo": {"beta": 2.0, "gamma": 0.5}},
    "cpo": {"learning_rate": 2e-4},
    "orpo": {"learning_rate": 1e-3},
    "kto": {"learning_rate": 2e-4},
    "reward": {"learning_rate": 1e-3},
}
"""What is trained on pairs, with its settings."""

CONTROL = "dpo, sides exchanged"
PROMPTS = 700
HELD_OUT = 200
BATCH = 50
LONGEST = 40
TEMPERATURE = 1.0
"""Questions that are answered, and how many of them are held out; answers sampled at once, their
most tokens, and how.
"""


def first_sentences() -> list[dict]:
    """The questions whose answer begins with a short sentence, with that alone."""
    found = []
    for row in questions_and_answers():
        question, documented = row["messages"]
        sentence = documented["content"].partition(". ")[0].rstrip(".") + "."
        if 3 <= len(sentence.split()) <= 16:
            found.append({"messages": [question, {"role": "assistant", "content": sentence}]})
    return found


def configuration(folder: Path, **changes: Any) -> ChronicalsConfig:
    usual = {
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_seq_length": 512,
        "mixed_precision": "fp32",
        "adam_beta2": 0.98,
        "save_steps": None,
        "trackers": [],
        "report_samples": 0,
        "keep": "last",
        "use_lora": False,
        "warmup_steps": 5,
        "output_dir": folder / "run",
        "cache_dir": folder / "tokens",
    }
    return ChronicalsConfig(**{**usual, **changes})


def answers(model: Any, tokenizer: Any, prompts: list[str], seed: int) -> list[str | None]:
    """A sampled answer to each question; None where it does not end, or is no text."""
    torch.manual_seed(seed)
    found: list[str | None] = []
    for first in range(0, len(prompts), BATCH):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False
            )
            for p in prompts[first : first + BATCH]
        ]
        given = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        with torch.no_grad():
            out = model.generate(
                **given,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                max_new_tokens=LONGEST,
                pad_token_id=tokenizer.pad_token_id,
            )
        for row in out[:, given["input_ids"].shape[1] :]:
            text = tokenizer.decode(row, skip_special_tokens=True).strip()
            ended = bool((row == tokenizer.eos_token_id).any())
            found.append(text if text and ended and "\ufffd" not in text else None)
    return found


def length(answer: str | None) -> float:
    """The scorer: words of an answer; one that does not end is longer than all."""
    return math.inf if answer is None else len(answer.split())


def pairs_of(prompts: list[str], first: list[str | None], second: list[str | None]) -> list[dict]:
    """Two answers to each question, the shorter one chosen; without those that do not differ in
    length or do not end.
    """
    found = []
    for prompt, a, b in zip(prompts, first, second):
        if a is None or b is None or length(a) == length(b):
            continue
        chosen, rejected = sorted((a, b), key=length)
        say = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
        found.append(
            {"prompt": [{"role": "user", "content": prompt}], "chosen": say[0], "rejected": say[1]}
        )
    return found


def judged(pairs: list[dict]) -> list[dict]:
    """KTO's rows: every answer by itself, called good or bad."""
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]


def exchanged(pairs: list[dict]) -> list[dict]:
    return [{**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]


def win_rate(new: list[str | None], old: list[str | None]) -> float:
    """How often the new answer is shorter; half for ties."""
    return statistics.mean(
        0.5 if length(a) == length(b) else float(length(a) < length(b))
        for a, b in zip(new, old, strict=True)
    )


def prefer(
    name: str, seed: int, base: Path, folder: Path, asked: dict[str, Any], steps: int
) -> dict:
    """One run of an objective: accuracy and win rate on held-out questions."""
    order = np.random.default_rng(seed).permutation(len(asked["prompts"]))
    held = order[:HELD_OUT]
    used = order[HELD_OUT:]

    def some(numbers: np.ndarray) -> list[dict]:
        return pairs_of(
            *([asked[key][n] for n in numbers] for key in ("prompts", "first", "second"))
        )

    trained = some(used)
    kept = some(held)
    rows = judged(trained) if name == "kto" else exchanged(trained) if name == CONTROL else trained
    settings = {"objective": name, **OBJECTIVES[name]}
    config = configuration(folder, max_steps=steps, seed=seed, **settings)
    model = load_model(base, torch.float32)
    tokenizer = load_tokenizer(base)
    began = time.perf_counter()
    result = ChronicalsTrainer(model, tokenizer, config).train(rows)
    found = {
        "seed": seed,
        "pairs": len(trained),
        "loss": result.loss,
        "seconds": time.perf_counter() - began,
    }
    if name == "reward":
        score = evaluate_data(model, tokenizer, kept, config)
        return {**found, "accuracy": score.others["rewards/accuracies"]}
    judge = configuration(folder, objective="dpo", dpo={"reference_model": str(base)})
    score = evaluate_data(model, tokenizer, kept, judge)
    questions = [asked["prompts"][n] for n in held]
    old = [asked["first"][n] for n in held]
    new = answers(model, tokenizer, questions, seed)
    ended = [length(text) for text in new if text is not None]
    return {
        **found,
        "accuracy": score.others["rewards/accuracies"],
        "margin": score.others["rewards/margins"],
        "win_rate": win_rate(new, old),
        "words": statistics.mean(ended),
        "ended": len(ended) / len(new),
    }


def distil(
    how: str, seed: int, base: Path, folder: Path, rows: tuple[list[dict], list[dict]], steps: int
) -> dict:
    """A student of half the width, from the teacher or from the tokens alone."""
    size = replace(CPU, width=64, layers=2)
    teacher = str(base)
    tokenizer = load_tokenizer(base)
    student = _student(base, folder, size, seed)
    beside = {"objective": "distill", "distill": {"teacher": teacher, "teacher_precision": "fp32"}}
    settings = {"objective": "sft"} if how == "tokens alone" else beside
    judge = configuration(folder, **beside)
    before = evaluate_data(student, tokenizer, rows[1], judge)
    config = configuration(
        folder, max_steps=steps, seed=seed, learning_rate=size.learning_rate, **settings
    )
    ChronicalsTrainer(student, tokenizer, config).train(rows[0])
    after = evaluate_data(student, tokenizer, rows[1], judge)
    sides = {"before": before, "after": after}
    return {"seed": seed} | {
        side: {
            name: score.others[name] for name in ("forward_kl", "cross_entropy", "token_agreement")
        }
        for side, score in sides.items()
    }


def _student(base: Path, folder: Path, size: Any, seed: int) -> Any:
    config = load_model(base, torch.float32).config
    for name, value in {
        "hidden_size": size.width,
        "intermediate_size": 3 * size.width,
        "num_hidden_layers": size.layers,
    }.items():
        setattr(config, name, value)
    config.num_attention_heads = config.num_key_value_heads = size.width // 32
    config.head_dim = 32
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder / "student")
    return load_model(folder / "student", torch.float32)


def make_base(folder: Path, rows: list[dict], steps: int) -> Path:
    size = replace(CPU, width=128, layers=3, vocab_size=1024)
    _write_model(folder / "untrained", rows, size, seed=0)
    model = load_model(folder / "untrained", torch.float32)
    tokenizer = load_tokenizer(folder / "untrained")
    config = configuration(
        folder / "base",
        max_steps=steps,
        learning_rate=size.learning_rate,
        batch_size=4,
        weight_decay=0.1,
    )
    return ChronicalsTrainer(model, tokenizer, config).train(rows).model_dir


def asked_twice(base: Path, rows: list[dict]) -> dict[str, Any]:
    """Questions with two sampled answers each."""
    model = load_model(base, torch.float32)
    tokenizer = load_tokenizer(base)
    prompts = [row["messages"][0]["content"] for row in rows]
    return {
        "prompts": prompts,
        "first": answers(model, tokenizer, prompts, 1),
        "second": answers(model, tokenizer, prompts, 2),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy, win rate, and the students, a point a seed."""
    figure = new_figure(12, 3.6)
    accuracy, wins, students = figure.subplots(1, 3)
    for axes, measure in ((accuracy, "accuracy"), (wins, "win_rate")):
        shown = {name: runs for name, runs in result["preference"].items() if measure in runs[0]}
        for place, runs in enumerate(shown.values()):
            axes.plot(
                [run[measure] for run in runs],
                [place] * len(runs),
                "o",
                color="tab:blue",
                alpha=0.7,
            )
        axes.set_yticks(range(len(shown)), list(shown))
        axes.axvline(0.5, color="0.7", zorder=0)
        axes.set(
            xlim=(0, 1),
            xlabel={
                "accuracy": "held-out pairs ordered rightly",
                "win_rate": "shorter than before",
            }[measure],
        )
        axes.invert_yaxis()
    for place, runs in enumerate(result["distillation"].values()):
        students.plot(
            [run["after"]["forward_kl"] for run in runs],
            [place] * len(runs),
            "o",
            color="tab:blue",
            alpha=0.7,
        )
    students.set_yticks(range(len(result["distillation"])), list(result["distillation"]))
    students.set(xlabel="held-out KL from the teacher", ylim=(-0.5, 1.5))
    save(figure, path)


def runs_of(
    result: dict[str, Any], args: argparse.Namespace, base: Path, folder: Path, rows: list[dict]
) -> Iterator[str]:
    """Fills the result, a line of text for each run."""
    rows = [rows[n] for n in np.random.default_rng(0).permutation(len(rows))]
    asked = asked_twice(base, rows[:PROMPTS])
    ended = [text for text in (*asked["first"], *asked["second"]) if text is not None]
    result["untuned"] = {
        "ended": len(ended) / 2 / PROMPTS,
        "words": statistics.mean(map(length, ended)),
    }
    chosen = args.only.split(",") if args.only else [*OBJECTIVES, "distill"]
    for number, (name, seed) in enumerate(
        (name, seed) for name in chosen for seed in range(1, args.seeds + 1)
    ):
        place = folder / str(number)
        if name == "distill":
            for how in ("teacher", "tokens alone"):
                data = rows[HELD_OUT:], rows[:HELD_OUT]
                found = distil(how, seed, base, place / how, data, args.steps)
                result["distillation"].setdefault(how, []).append(found)
                yield f"distill, {how}: {found}"
        else:
            found = prefer(name, seed, base, place, asked, args.steps)
            result["preference"].setdefault(name, []).append(found)
            yield f"{name}: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of every run")
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--only", help="names, with commas")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "steps": args.steps,
        "base_steps": args.base_steps,
        "seeds": args.seeds,
        "settings": OBJECTIVES,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": current_commit(),
        "preference": {},
        "distillation": {},
    }
    with tempfile.TemporaryDirectory() as place:
        rows = first_sentences()
        base = make_base(Path(place), rows, args.base_steps)
        for line in runs_of(result, args, base, Path(place), rows):
            print(line, flush=True)
            args.output.write_text(json.dumps(result, indent=1))
    if not args.only:
        draw(result, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
