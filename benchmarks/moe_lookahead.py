"""Do heads predict which experts will be chosen? Of a native mixture that trains with them, and of
a frozen Qwen3-MoE.

    python benchmarks/moe_lookahead.py OUTPUT.json [--steps 200] [--head-steps 250] [--base-steps
    200] [--only frozen]

Text is the documentation of Python's standard library, every tenth entry held out. The native model
(16 experts, 2 of them for a token, 8 layers) is trained on it with the losses of its heads
(``router: {layer_ahead, token_ahead}``), then its heads alone. A Qwen3-MoE of the same sizes is
trained without any, then frozen and traced once; heads learn from the trace.

Recall: of the experts that a token's router chose, the share among as many that were predicted, on
held-out text. Beside it is gate reuse: a later layer's router, applied to the input of an earlier
one.

Bars. Native, one layer ahead, in every layer: at least 0.80, and 5 points above gate reuse; the
loss of the heads falls by 30 %. Frozen: mean recall of the same layer (d=0) at least 0.90, of the
next (d=1) 0.80, among 2k predicted experts 0.95; the model's checksum is the same.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import moe_small as small
import torch

from chronicals import ChronicalsTrainer
from chronicals.moe.lookahead.distil_heads import HeadDistillation
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes, measure_recalls
from chronicals.moe.lookahead.recording import record_data
from chronicals.moe.lookahead.trace import checksum, record_trace
from chronicals.moe.lookahead.train_predictor import train_from_trace

ROUTER = {"balance": 0.01, "layer_ahead": 1.0, "token_ahead": 0.3, "lookahead_temperature": 0.2}
HEADS = HeadSizes(furthest=3, tokens=2, rank=256)
HOW = HeadDistillation(learning_rate=5e-3, rows=1024, temperature=0.2)


def own(folder: Path, seed: int, steps: int, head_steps: int) -> dict:
    """The native model with its heads, then the heads alone."""
    rows, held = small.rows()
    tokenizer = small.tokenizer_of(rows)
    model = small.native(tokenizer, seed)
    together, alone = (folder / name for name in ("together", "alone"))
    config = small.configuration(
        together, objective="pretraining", router=ROUTER, max_steps=steps, seed=seed
    )
    texts = small.as_texts(rows)
    unseen = small.as_texts(held)
    before = measure_recalls(
        ExpertPredictor.within(model), record_data(model, tokenizer, unseen, config, True), small.K
    )
    ChronicalsTrainer(model, tokenizer, config).train(texts)
    middle = measure_recalls(
        ExpertPredictor.within(model), record_data(model, tokenizer, unseen, config, True), small.K
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("_ahead." in name)
    backbone = {
        name: value.clone() for name, value in model.state_dict().items() if "_ahead." not in name
    }
    changes = {"learning_rate": 5e-3, "max_steps": head_steps, "output_dir": alone / "run"}
    ChronicalsTrainer(model, tokenizer, config.replace(**changes)).train(texts)
    after = measure_recalls(
        ExpertPredictor.within(model), record_data(model, tokenizer, unseen, config, True), small.K
    )
    lines = [*small.metrics(together), *small.metrics(alone)]
    losses = [line["router/layer_ahead"] for line in lines]
    last = sum(losses[-20:]) / 20
    same = all(torch.equal(value, model.state_dict()[name]) for name, value in backbone.items())
    gains = [a - b for a, b in zip(after.at(1), after.at(1, "gate_reuse"))]
    return {
        "seed": seed,
        "before": dict(vars(before)),
        "trained_together": dict(vars(middle)),
        "after": dict(vars(after)),
        "steps": steps,
        "head_steps": head_steps,
        "cross_entropy": [lines[0]["cross_entropy"], lines[-1]["cross_entropy"]],
        "loss_of_heads": losses,
        "loss_first": losses[0],
        "loss_last": last,
        "least_recall_d1": min(after.at(1)),
        "least_gain_d1": min(gains),
        "rest_is_unchanged_by_heads": same,
        "passed": min(after.at(1)) >= 0.80
        and min(gains) >= 0.05
        and last <= 0.7 * losses[0]
        and same,
    }


def gradients(seed: int) -> dict:
    """Which parameters the losses of heads reach, of the native model: the heads alone."""
    tokenizer = small.tokenizer_of(small.rows()[0])
    model = small.native(tokenizer, seed)
    torch.nn.init.normal_(model.model.layer_ahead.up, std=0.02)
    ids = torch.randint(3, small.VOCABULARY, (1, 40))
    found = model(ids, output_lookahead=True).lookahead
    (sum(x.square().sum() for x in found.layers) + found.tokens.square().sum()).backward()
    reached = sorted(
        name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())
    )
    return {"reached": reached, "passed": all("_ahead." in name for name in reached)}


def frozen(folder: Path, seed: int, base_steps: int, passes: int) -> dict:
    """Heads beside a Qwen3-MoE that was trained without any."""
    rows, held = small.rows()
    tokenizer = small.tokenizer_of(rows)
    model = small.qwen3_moe(tokenizer, seed)
    config = small.configuration(
        folder, objective="pretraining", router={"balance": 0.01}, max_steps=base_steps, seed=seed
    )
    texts = small.as_texts(rows)
    unseen = small.as_texts(held)
    ChronicalsTrainer(model, tokenizer, config).train(texts)
    before = checksum(model)
    began = time.perf_counter()
    for name, source in (("trace", texts), ("held-out", unseen)):
        record_trace(model, tokenizer, source, config, folder / name, features=True)
    recorded = time.perf_counter() - began
    how = replace(HOW, passes=passes, seed=seed)
    found = train_from_trace(model, folder / "trace", folder / "held-out", HEADS, how, 10**9, 10**9)
    recalls = found.recalls
    d0 = recalls.mean(0)
    d1 = recalls.mean(1)
    d1_2k = recalls.mean(1, "layer_ahead_2k")
    return {
        "seed": seed,
        "recalls": dict(vars(recalls)),
        "tokens": found.tokens,
        "seconds_of_recording": recorded,
        "seconds": time.perf_counter() - began,
        "losses": found.losses,
        "d0": d0,
        "d1": d1,
        "d1_among_2k": d1_2k,
        "d1_gate_reuse": recalls.mean(1, "gate_reuse"),
        "checksum_before": before,
        "checksum_after": checksum(model),
        "passed": d0 >= 0.90 and d1 >= 0.80 and d1_2k >= 0.95 and checksum(model) == before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="of the native model with its heads")
    parser.add_argument(
        "--head-steps", type=int, default=250, help="of its heads alone, after that"
    )
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument(
        "--passes", type=int, default=4, help="over the text, of the heads beside a frozen model"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--only",
        choices=["native", "frozen"],
        help="of the two; the other stays as OUTPUT.json has it",
    )
    given = parser.parse_args()
    result = json.loads(given.output.read_text()) if given.only else {}
    for part in [given.only] if given.only else ["native", "frozen"]:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if part == "native":
                result[part] = [
                    own(folder / f"{n}", n, given.steps, given.head_steps)
                    for n in range(given.seeds)
                ]
                result["gradients"] = gradients(0)
            else:
                result[part] = [
                    frozen(folder / f"{n}", n, given.base_steps, given.passes)
                    for n in range(given.seeds)
                ]
        how = vars(replace(HOW, passes=given.passes))
        settings = (
            {"router": ROUTER} if part == "native" else {"heads": vars(HEADS), "distillation": how}
        )
        result.setdefault("about", {})[part] = small.about(began, **settings)
        small.write(given.output, result)
    lines = []
    for run in result["native"]:
        reuse = run["after"]["gate_reuse"]
        for layer, row in enumerate(run["after"]["layer_ahead"]):
            cells = [f"{a:.3f} ({b:.3f})" for a, b in zip(row, reuse[layer])]
            lines.append(
                [f"native, seed {run['seed']}, layer {layer}", *cells, *[""] * (4 - len(cells))]
            )
    small.show(["recall (gate reuse)", "d=0", "d=1", "d=2", "d=3"], lines)
    table = [
        [
            "native: least recall one layer ahead",
            "0.80",
            min(run["least_recall_d1"] for run in result["native"]),
        ],
        [
            "native: least gain on gate reuse, points",
            "5",
            100 * min(run["least_gain_d1"] for run in result["native"]),
        ],
        [
            "native: loss of heads falls by, %",
            "30",
            100 * min(1 - r["loss_last"] / r["loss_first"] for r in result["native"]),
        ],
        ["native: losses of heads reach heads alone", "yes", result["gradients"]["passed"]],
        [
            "native: heads alone leave the rest",
            "yes",
            all(r["rest_is_unchanged_by_heads"] for r in result["native"]),
        ],
        ["frozen: recall of the same layer", "0.90", min(run["d0"] for run in result["frozen"])],
        ["frozen: one layer ahead", "0.80", min(run["d1"] for run in result["frozen"])],
        ["frozen: among 2k predicted", "0.95", min(run["d1_among_2k"] for run in result["frozen"])],
        [
            "frozen: checksum the same",
            "yes",
            all(r["checksum_before"] == r["checksum_after"] for r in result["frozen"]),
        ],
    ]
    small.show(["what", "bar", "found"], table)


if __name__ == "__main__":
    main()
