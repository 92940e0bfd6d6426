"""Does every stage train mixtures of experts, and does the anchor hold routers where they began?

    python benchmarks/moe_stages.py OUTPUT.json [--seeds 3] [--steps 25] [--base-steps 60] [--family
    NAME]

A small native mixture and a Qwen3-MoE of the same sizes (8 experts, 2 of them for a token, 4
layers) are trained on the documentation of Python's standard library; that is the stage
``pretraining``. From each, with all weights and with adapters, over seeds: SFT on questions and
answers; DPO and ORPO on pairs of answers, the right one and its words the other way round;
distillation from a teacher that was trained longer. Every run has losses of the routers, and is
measured on held-out rows before and after by what it minimises: the cross-entropy, the margin of
rewards (DPO: 0 before), the log odds ratio, the distillation loss.

The anchor: SFT with ``router.anchor`` and without, from the same model. Drift is the KL of the
routers' distributions on held-out text from those before, the mean over layers and tokens. Bars:
each objective improves in every run; the anchor is 0 at the first step, and drift with it at most
half of that without, at a held-out cross-entropy no more than 2 % higher.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_small as small
import torch

from chronicals import ChronicalsTrainer
from chronicals.models import load_model, load_tokenizer
from chronicals.moe import router_losses as losses
from chronicals.moe.lookahead.recording import Recorded, record_data
from chronicals.training.run import report
from chronicals.training.run.evaluation import evaluate_data

FAMILIES: dict[str, Callable] = {"chronicals_moe": small.native, "qwen3_moe": small.qwen3_moe}
SIZES = {"num_hidden_layers": 4, "num_experts": 8}
ROUTER = {"balance": 0.01, "z": 0.001, "anchor": 0.05, "anchor_tokens": 256}
ANCHOR = 3.0
ADAPTERS = {
    "use_lora": True,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_target_modules": "q_proj,o_proj",
    "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
}
RATES = {"sft": (1e-3, 2e-3), "dpo": (3e-4, 1e-3), "orpo": (1e-3, 2e-3), "distill": (1e-3, 2e-3)}
"""Peak learning rates, of all weights and of adapters."""
MEASURED = {
    "sft": ("cross_entropy", -1),
    "dpo": ("rewards/margins", 1),
    "orpo": ("log_odds_chosen", 1),
    "distill": ("loss", -1),
}
"""What is measured of a stage on held-out rows, and which way is better."""
TRAINED = 300
HELD = 60


def pairs(rows: list[dict]) -> list[dict]:
    """Each question with its answer, and as the worse one its words the other way round."""
    found = []
    for row in rows:
        question, answer = row["messages"]
        wrong = {**answer, "content": " ".join(reversed(answer["content"].split()))}
        if wrong != answer:
            found.append({"prompt": [question], "chosen": [answer], "rejected": [wrong]})
    return found


def pretrained(family: str, folder: Path, seed: int, steps: int, tokenizer: Any) -> dict:
    """The base of the other stages, and the held-out cross-entropy before and after."""
    rows, held = (small.as_texts(some) for some in small.rows())
    held = held[:HELD]
    model = FAMILIES[family](tokenizer, seed, **SIZES)
    heads = {"layer_ahead": 0.3} if family == "chronicals_moe" else {}
    router = {"balance": 0.01, "z": 0.001, **heads}
    config = small.configuration(
        folder, objective="pretraining", router=router, max_steps=steps, seed=seed, batch_size=4
    )
    before = evaluate_data(model, tokenizer, held, config).loss
    ChronicalsTrainer(model, tokenizer, config).train(rows)
    after = evaluate_data(model, tokenizer, held, config).loss
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return {
        "stage": "pretraining",
        "family": family,
        "how": "full",
        "seed": seed,
        "before": before,
        "after": after,
    }


def stage(
    name: str, base: Path, folder: Path, seed: int, steps: int, adapters: bool, teacher: Path
) -> dict:
    """One run from the base, and what it minimises on held-out rows before and after."""
    rows, held = (some[:count] for some, count in zip(small.rows(), (TRAINED, HELD)))
    rows, held = (pairs(some) if name in ("dpo", "orpo") else some for some in (rows, held))
    changes = {
        "objective": name,
        "router": ROUTER,
        "max_steps": steps,
        "seed": seed,
        "batch_size": 2,
    }
    changes["learning_rate"] = RATES[name][adapters]
    if name == "distill":
        changes["distill"] = {"teacher": str(teacher), "teacher_precision": "fp32"}
    config = small.configuration(folder, **changes, **(ADAPTERS if adapters else {}))
    judge = config.replace(
        sections={key: value for key, value in config.sections.items() if key != "router"}
    )
    model = load_model(base, torch.float32)
    tokenizer = load_tokenizer(base)
    measure, better = MEASURED[name]
    before = (
        0.0 if name == "dpo" else _measured(evaluate_data(model, tokenizer, held, judge), measure)
    )
    result = ChronicalsTrainer(model, tokenizer, config).train(rows, held)
    after = _measured(result.evaluation, measure)
    lines = small.metrics(folder)
    return {
        "stage": name,
        "how": "lora" if adapters else "full",
        "seed": seed,
        "measure": measure,
        "before": before,
        "after": after,
        "improved": better * (after - before) > 0,
        "anchor_first": lines[0]["router/anchor"],
        "anchor_last": lines[-1]["router/anchor"],
        "dropped": max(abs(line["router/dropped"]) for line in lines),
        "busiest": [lines[0]["router/busiest"], lines[-1]["router/busiest"]],
    }


def _measured(evaluation: Any, name: str) -> float:
    return evaluation.loss if name in ("loss", "cross_entropy") else evaluation.others[name]


def anchored(base: Path, folder: Path, seed: int, steps: int, weight: float) -> dict:
    """SFT with an anchor of this weight: drift of the routers and cross-entropy on held-out
    rows.
    """
    rows, held = (some[:count] for some, count in zip(small.rows(), (TRAINED, HELD)))
    router = {"metrics": True, "anchor": weight, "anchor_tokens": 256}
    config = small.configuration(
        folder,
        router=router,
        max_steps=steps,
        seed=seed,
        batch_size=2,
        learning_rate=RATES["sft"][0],
    )
    model = load_model(base, torch.float32)
    tokenizer = load_tokenizer(base)
    began = list(record_data(model, tokenizer, held, config))
    ChronicalsTrainer(model, tokenizer, config).train(rows)
    drift = drifted(began, list(record_data(model, tokenizer, held, config)))
    loss = evaluate_data(model, tokenizer, held, config.replace(sections={})).loss
    first = small.metrics(folder)[0].get("router/anchor", 0.0)
    return {
        "seed": seed,
        "weight": weight,
        "drift": drift,
        "cross_entropy": loss,
        "anchor_first": first,
    }


def drifted(before: list[Recorded], after: list[Recorded]) -> float:
    total = 0.0
    count = 0
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.token_ids, new.token_ids)
        total += float(losses.anchor_losses(new.logits, old.logits).sum())
        count += old.logits[..., 0].numel()
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--base-steps", type=int, default=60)
    parser.add_argument(
        "--family", choices=FAMILIES, help="this one alone; others stay as OUTPUT.json has them"
    )
    given = parser.parse_args()
    began = time.perf_counter()
    stages = list[dict]()
    anchors = list[dict]()
    if given.family:
        kept = (
            json.loads(given.output.read_text())
            if given.output.exists()
            else {"stages": [], "anchor": []}
        )
        stages, anchors = (
            [run for run in kept[name] if run["family"] != given.family]
            for name in ("stages", "anchor")
        )
    tokenizer = small.tokenizer_of(small.rows()[0])
    report._figure = lambda _: b""  # plots that nobody looks at would take a third of the time
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in [given.family] if given.family else FAMILIES:
            place = folder / family
            for seed in range(given.seeds):
                found = pretrained(
                    family, place / f"base-{seed}", seed, given.base_steps, tokenizer
                )
                stages.append(
                    {
                        **found,
                        "measure": "cross_entropy",
                        "improved": found["after"] < found["before"],
                    }
                )
            teacher = place / "teacher"
            pretrained(family, teacher, given.seeds, 2 * given.base_steps, tokenizer)
            for seed in range(given.seeds):
                base = place / f"base-{seed}" / "base"
                for how in (False, True):
                    for stage_name in RATES:
                        run = place / f"{stage_name}-{how}-{seed}"
                        found = stage(
                            stage_name, base, run, seed, given.steps, how, teacher / "base"
                        )
                        stages.append({**found, "family": family})
                for weight in (0.0, ANCHOR):
                    run = place / f"anchor-{weight}-{seed}"
                    anchors.append(
                        {**anchored(base, run, seed, given.steps, weight), "family": family}
                    )
                about = small.about(
                    began,
                    router=ROUTER,
                    sizes=SIZES,
                    steps=given.steps,
                    base_steps=given.base_steps,
                )
                small.write(given.output, {"stages": stages, "anchor": anchors, "about": about})
    _show(stages, anchors)


def _show(stages: list[dict], anchors: list[dict]) -> None:
    lines = []
    for key in dict.fromkeys(
        (run["family"], run["how"], run["stage"], run["measure"]) for run in stages
    ):
        some = [
            run
            for run in stages
            if (run["family"], run["how"], run["stage"], run["measure"]) == key
        ]
        values = [" ".join(f"{run[side]:.3f}" for run in some) for side in ("before", "after")]
        lines.append([*key, *values, all(run["improved"] for run in some)])
    small.show(
        ["family", "trained", "stage", "held-out", "before, by seed", "after", "improves"], lines
    )
    lines = []
    for family in dict.fromkeys(run["family"] for run in anchors):
        of_family = [run for run in anchors if run["family"] == family]
        for free, held in zip(
            *([run for run in of_family if bool(run["weight"]) == on] for on in (False, True))
        ):
            ratio = held["drift"] / free["drift"]
            loss = held["cross_entropy"] / free["cross_entropy"]
            lines.append(
                [
                    family,
                    held["seed"],
                    free["drift"],
                    held["drift"],
                    ratio,
                    loss - 1,
                    ratio <= 0.5 and loss <= 1.02,
                ]
            )
    columns = [
        "family",
        "seed",
        "drift without",
        "with the anchor",
        "ratio (bar 0.5)",
        "cross-entropy more by",
        "passes",
    ]
    small.show(columns, lines)


if __name__ == "__main__":
    main()
