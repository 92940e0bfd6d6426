"""How far generation is from a training step, and what ``generation_exact`` costs, on a card.

    python benchmarks/generation_exact.py OUT.json             # a 0.5B in bf16
    python benchmarks/generation_exact.py OUT.json --tiny      # tiny sizes; without a card, in fp32
    python benchmarks/generation_exact.py OUT.json --only usual --seeds 3

Answers are drawn with and without ``generation_exact``, and a packed pass computes the same texts:
that of a training step, over fused layers, and with it ``packed_log_probabilities``. Printed are
tokens a second, and how far the log-probabilities of generation are from those of the packed pass:
exactly 0 where both are exact, else at most as far as that pass is from fp32 (bar).

Further arms change one rounding of generation. ``rounded`` rounds the residual, and what is added to
it, in every layer, as training does; ``from layer 8`` does so in the first eight. ``whole keys`` gives
each sequence's keys to one program, whose running maximum is then that of training if their tiles are
equal. ``sums in fp32`` forbids cuBLAS to add the splits of a product in 16 bits
(``allow_bf16_reduced_precision_reduction``), which it may do for few rows. The first tokens of
answers are those of a pass over prompts: where their gap is 0 it has the bits of the packed pass.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generation_rows import Row, prompts_of
from generation_turns import peaks_of
from recipes_on_card import forked, machine, model_of

from chronicals.attention.backends import logged_choices
from chronicals.batch import IGNORED, Batch
from chronicals.generation import (
    Answer,
    Engine,
    EngineSettings,
    Request,
    Sampling,
    packed_log_probabilities,
)
from chronicals.generation.call import LOGIT_ROWS
from chronicals.kernels import paged_attention
from chronicals.models import in_evaluation
from chronicals.models.presenting import present
from chronicals.objectives.log_probabilities import score_tokens
from chronicals.patching import patch_parts, wide_residuals

ROW = Row("0.5b, 8 x 8", "0.5b", 8)
PROMPT, NEW = 256, 128


@contextmanager
def with_constant(module: Any, name: str, value: int) -> Iterator[None]:
    """Context manager in which a constant of a module has another value."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


@contextmanager
def sums_in_fp32() -> Iterator[None]:
    """Context manager in which cuBLAS adds the splits of products of bf16 in fp32."""
    matmul = torch.backends.cuda.matmul
    usual = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = usual


IN_ALL = 10_000
"""More layers than a model has."""

NEVER = 1 << 30
"""More keys than a sequence has."""

ARMS = {
    "usual": nullcontext,
    "rounded": partial(with_constant, wide_residuals, "ROUNDED_LAYERS", IN_ALL),
    "from layer 8": partial(with_constant, wide_residuals, "ROUNDED_LAYERS", 8),
    "whole keys": partial(with_constant, paged_attention, "KEYS_OF_A_SPLIT", NEVER),
    "sums in fp32": sums_in_fp32,
    "exact": nullcontext,
}
"""What generation runs in; the packed pass runs as usual."""


def packed(texts: list[list[int]], device: torch.device) -> Batch:
    """Return texts as a Batch of documents."""
    ids = torch.tensor([token for text in texts for token in text])
    lengths = torch.tensor([len(text) for text in texts])
    bounds = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    targets = ids.roll(-1)
    targets[bounds[1:].long() - 1] = IGNORED
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    longest = int(lengths.max())
    return Batch(ids, targets, positions, bounds, longest).to(device)


def of_a_step(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities that a training step computes."""
    with in_evaluation(model):
        return score_tokens(present(model), batch, LOGIT_ROWS, temperature=1.0).log_p


def gap_of(
    model: Any, requests: list[Request], answers: list[list[Answer]], exact: bool
) -> dict[str, float]:
    """Return how far log-probabilities of the first answers are from those of the packed pass.

    Beside it stands how far that pass is from transformers' own in fp32.
    """
    texts = [[*one.prompt, *group[0].tokens] for one, group in zip(requests, answers)]
    batch = packed(texts, model.device)
    found: dict[str, float] = {}
    with torch.no_grad():

        def score() -> None:
            scores = packed_log_probabilities if exact else of_a_step
            found["values"] = scores(model, batch)  # type: ignore[assignment]

        seconds = peaks_of(score)["seconds"]
    rows: Any = found.pop("values")
    with torch.no_grad():
        true_rows = in_fp32(model, texts)
    lengths = [len(text) for text in texts]
    gaps, own = list[torch.Tensor](), list[torch.Tensor]()
    for chosen, true, one, group in zip(
        rows.split(lengths), true_rows.split(lengths), requests, answers
    ):
        of_answer = slice(len(one.prompt) - 1, -1)
        ours = torch.tensor(group[0].full_log_probabilities)
        gaps.append((chosen[of_answer].cpu() - ours).abs())
        own.append((chosen[of_answer] - true[of_answer]).abs().cpu())
    every = torch.cat(gaps)
    return {
        "mean": float(every.mean()),
        "largest": float(every.max()),
        "first_tokens": float(torch.stack([one[0] for one in gaps]).mean()),
        "packed_from_fp32": float(torch.cat(own).mean()),
        "packed_seconds": seconds,
    }


def in_fp32(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """Return the log-probability of each token's successor by the model's class in fp32, a text at a
    time; 0 behind a text's last token.
    """
    wide = copy.deepcopy(model).float()
    found = list[torch.Tensor]()
    for text in texts:
        ids = torch.tensor([text], device=model.device)
        scores = wide(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        chosen = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
        found.append(torch.cat((chosen, chosen.new_zeros(1))))
    return torch.cat(found)


def measured(arm: str, seeds: int, tiny: bool) -> dict[str, Any]:
    """Generate by an arm; return the rate, and the gap in the mean over seeds of the draws."""
    exact = arm == "exact"
    prompt, new = (16, 8) if tiny else (PROMPT, NEW)
    on_card = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_card else torch.float32
    model = model_of(ROW.model, prompt + new, tiny, dtype).eval()
    prompts = prompts_of(ROW, model.config.vocab_size, prompt)
    if not exact:
        patch_parts(model, whole_layers=True)
    engine = Engine(model, EngineSettings(slots=ROW.sequences, generation_exact=exact))
    answers = list[list[Answer]]()

    def requests_of(seed: int) -> list[Request]:
        return [
            Request(ids, new, Sampling(1.0, seed), ROW.answers, number)
            for number, ids in enumerate(prompts)
        ]

    def generate(seed: int) -> None:
        with ARMS[arm]():
            answers[:] = engine.generate(requests_of(seed))

    generate(0)
    gaps = list[dict[str, float]]()
    for seed in range(seeds):
        taken = peaks_of(partial(generate, seed))
        gaps.append(gap_of(model, requests_of(seed), answers, exact))
    made = sum(len(one.tokens) for group in answers for one in group)
    means = {name: statistics.mean(one[name] for one in gaps) for name in gaps[0]}
    means["largest"] = max(one["largest"] for one in gaps)
    attention = sorted({name for name, _, _ in logged_choices})
    rate = made / taken["seconds"]
    return {"tokens_per_second": rate, **taken, **means, "attention": attention, "seeds": gaps}


def share_of(result: dict[str, Any]) -> str:
    """Return in words the gap as a share of what the packed pass is off from fp32, its bar."""
    own = result["packed_from_fp32"]
    return f", of which that is {result['mean'] / own:.2f} (bar 1)" if own else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=float, default=200, help="seconds of an arm")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seeds", type=int, default=1, help="draws whose gaps are averaged")
    parser.add_argument("--only", nargs="+", choices=ARMS, help="others stay as OUT.json has them")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.only and given.out.exists():
        results = json.loads(given.out.read_text())
    results["machine"] = forked(machine, 60)
    for name in given.only or ARMS:
        result = forked(partial(measured, name, given.seeds, given.tiny), given.each)
        results[name] = result
        given.out.write_text(json.dumps(results))
        if "error" in result:
            print(f"{name}: {result['error'][:300]}", flush=True)
            continue
        print(
            f"{name}: {result['tokens_per_second']:,.0f} tokens/s, log-probabilities off by "
            f"{result['mean']:.2e} in the mean, {result['largest']:.2e} at most, of first tokens "
            f"{result['first_tokens']:.2e}; the packed pass, by {', '.join(result['attention'])}, is "
            f"off from fp32 by {result['packed_from_fp32']:.2e}{share_of(result)}",
            flush=True,
        )
    if all("error" not in results.get(name, {"error": ""}) for name in ("usual", "exact")):
        rates = [results[name]["tokens_per_second"] for name in ("usual", "exact")]
        print(f"generation_exact takes {rates[0] / rates[1]:.2f} times as long")


if __name__ == "__main__":
    main()
