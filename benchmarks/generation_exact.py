"""What ``generation_exact`` costs and gives, on a card.

    python benchmarks/generation_exact.py OUT.json             # a 0.5B in bf16
    python benchmarks/generation_exact.py OUT.json --tiny      # tiny sizes; without a card, in fp32

Answers are drawn with and without ``generation_exact``, and a packed pass computes the same texts:
that of a training step, over fused layers, and with it ``packed_log_probabilities``. Printed are
tokens a second, and how far the log-probabilities of generation are from those of the packed pass:
exactly 0 where both are exact, else about as far as that pass is from fp32.
"""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generation_rows import Row, prompts_of
from generation_turns import peaks_of
from recipes_on_card import forked, machine, model_of

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
from chronicals.models import in_evaluation
from chronicals.models.presenting import present
from chronicals.objectives.log_probabilities import score_tokens
from chronicals.patching import patch_parts

ROW = Row("0.5b, 8 x 8", "0.5b", 8)
PROMPT, NEW = 256, 128


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


def measured(exact: bool, tiny: bool) -> dict[str, Any]:
    """Generate with or without ``generation_exact``; return the rate and the gap."""
    prompt, new = (16, 8) if tiny else (PROMPT, NEW)
    on_card = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_card else torch.float32
    model = model_of(ROW.model, prompt + new, tiny, dtype).eval()
    prompts = prompts_of(ROW, model.config.vocab_size, prompt)
    if not exact:
        patch_parts(model, whole_layers=True)
    engine = Engine(model, EngineSettings(slots=ROW.sequences, generation_exact=exact))
    answers = list[list[Answer]]()

    def requests_of(count: int) -> list[Request]:
        return [
            Request(ids, count, Sampling(1.0), ROW.answers, number)
            for number, ids in enumerate(prompts)
        ]

    def generate(count: int) -> None:
        answers[:] = engine.generate(requests_of(count))

    generate(new)
    taken = peaks_of(partial(generate, new))
    made = sum(len(one.tokens) for group in answers for one in group)
    gap = gap_of(model, requests_of(new), answers, exact)
    return {"tokens_per_second": made / taken["seconds"], **taken, **gap}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=float, default=200, help="seconds of an arm")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    results: dict[str, Any] = {"machine": forked(machine, 60)}
    for name, exact in (("usual", False), ("exact", True)):
        result = forked(partial(measured, exact, given.tiny), given.each)
        results[name] = result
        given.out.write_text(json.dumps(results))
        if "error" in result:
            print(f"{name}: {result['error'][:300]}", flush=True)
            continue
        print(
            f"{name}: {result['tokens_per_second']:,.0f} tokens/s, log-probabilities off by "
            f"{result['mean']:.2e} in the mean, {result['largest']:.2e} at most; the packed pass is "
            f"off from fp32 by {result['packed_from_fp32']:.2e}",
            flush=True,
        )
    if all("error" not in results[name] for name in ("usual", "exact")):
        rates = [results[name]["tokens_per_second"] for name in ("usual", "exact")]
        print(f"generation_exact takes {rates[0] / rates[1]:.2f} times as long")


if __name__ == "__main__":
    main()
