"""vLLM as a client, in a Python environment of its own, for it needs another torch.

A program runs there with ``python -c``, without anything of ours: it loads the artefact and prints
the log-probability of every token of some documents.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.export.proof import Proof
from chronicals.export.source import Source, logits_of

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
given = json.load(sys.stdin)
llm = LLM(model=given["model"], enforce_eager=True, max_model_len=given["longest"], enable_lora=bool(given["adapter"]),
          **({"max_lora_rank": given["rank"], "max_num_seqs": 1} if given["adapter"] else {}))
more = {}  # with an adapter, vLLM 0.32 cannot give the log-probabilities of several prompts at a time
if given["adapter"]:
    from vllm.lora.request import LoRARequest
    more["lora_request"] = LoRARequest("adapter", 1, given["adapter"])
prompts = [{"prompt_token_ids": ids} for ids in given["documents"]]
outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), **more)
found = [[row[token].logprob for token, row in zip(ids[1:], out.prompt_logprobs[1:])]
         for ids, out in zip(given["documents"], outputs)]
print("chronicals:" + json.dumps(found))
"""

MARK = "chronicals:"

CAUSE = re.compile(r"\b\w*Error: (?!Engine core initialization failed)")
"""A line that says why; a process of vLLM's own that failed is only named by the one that waits
for it.
"""

TIME_LIMIT = 1800

CLIENT = "vLLM"

OF_ROUNDING = 4.0
LEAST = 0.02
"""The mean difference of log-probabilities, in nats, may be so many times what bf16 changes in
torch, and always this much.
"""


class NotRun(ValueError):
    """vLLM could not be asked; the message has its last words."""


def log_probabilities(
    python: str | Path,
    model: str | Path,
    documents: list[list[int]],
    adapter: Path | None = None,
    rank: int = 0,
) -> list[list[float]]:
    """Of each token of each document but the first.

    Args:
        python: the interpreter of an environment with vLLM.
        model: folder or hub name of a whole model.
        adapter: folder of an adapter over it, with the rank that is given to vLLM.

    Raises:
        NotRun: the interpreter is not there, or the program failed.
    """
    given = {
        "model": str(model),
        "adapter": None if adapter is None else str(adapter),
        "rank": rank,
        "documents": documents,
        "longest": max(map(len, documents)) + 1,
    }
    try:
        done = subprocess.run(
            [str(python), "-c", PROGRAM],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRun(f"vllm_python={str(python)!r}: {error}") from error
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if done.returncode or line is None:
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()] or ["nothing"]
        words = next(
            (line for line in said if CAUSE.search(line)), said[-1]
        )  # its processes go on to talk after the error
        raise NotRun(
            f"vllm_python={str(python)!r}: the program ended with {done.returncode} and said: "
            f"{words}"
        )
    found: list[list[float]] = json.loads(line.removeprefix(MARK))
    return found


def prove(
    source: Source,
    model: str | Path,
    made: Callable[[], Any],
    proof: Proof,
    adapter: Path | None = None,
    rank: int = 0,
) -> None:
    """Adds how far vLLM's log-probabilities are from those of a model in torch.

    Args:
        made: gives the model in torch whose weights the artefact has.

    Raises:
        NotRun: vLLM was asked for and cannot be run.
    """
    if source.vllm_python is None:
        proof.not_run(
            "log-probabilities",
            CLIENT,
            "give the interpreter of an environment with vLLM (--vllm-python)",
        )
        return
    theirs = log_probabilities(source.vllm_python, model, source.documents, adapter, rank)
    expected = made()
    ours = [
        _of_tokens(logits, ids)
        for logits, ids in zip(logits_of(expected, source.documents), source.documents)
    ]
    rounded = logits_of(expected.bfloat16(), source.documents)
    by_itself = _mean_difference(
        ours, [_of_tokens(logits, ids) for logits, ids in zip(rounded, source.documents)]
    )
    error = _mean_difference(ours, [torch.tensor(values) for values in theirs])
    proof.bounded("log-probabilities", CLIENT, error, max(LEAST, OF_ROUNDING * by_itself))


def _of_tokens(logits: Tensor, ids: list[int]) -> Tensor:
    return logits[:-1].float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def _mean_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return float(torch.cat([(a - b).abs() for a, b in zip(one, other, strict=True)]).mean())
