"""vLLM as a client, in a Python environment of its own, since it needs another torch.

A program runs there with ``python -c``, without this package: it loads the artefact and prints the
log-probability of every token of some documents.
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
from chronicals.export.source import SourceModel, logits_of

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
given = json.load(sys.stdin)
options = {"enforce_eager": True, "max_model_len": given["longest"]}
options["enable_lora"] = bool(given["adapter"])
more = {}
if given["adapter"]:
    # With an adapter, vLLM 0.32 cannot give the log-probabilities of several prompts at a time.
    options |= {"max_lora_rank": given["rank"], "max_num_seqs": 1}
llm = LLM(model=given["model"], **options)
if given["adapter"]:
    from vllm.lora.request import LoRARequest
    more["lora_request"] = LoRARequest("adapter", 1, given["adapter"])
prompts = [{"prompt_token_ids": ids} for ids in given["documents"]]
sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
outputs = llm.generate(prompts, sampling, **more)
found = [[row[token].logprob for token, row in zip(ids[1:], out.prompt_logprobs[1:])]
         for ids, out in zip(given["documents"], outputs)]
print("chronicals:" + json.dumps(found))
"""

RESULT_PREFIX = "chronicals:"
"""Beginning of the line with the program's result."""

_CAUSE = re.compile(r"\b\w*Error: (?!Engine core initialization failed)")
"""A log line with the cause of a failure, not one that only names a failed process of vLLM's."""

VLLM_TIME_LIMIT = 1800
"""Seconds."""

VLLM = "vLLM"
"""Name of the client in proofs."""

VLLM_ROUNDING_FACTOR = 4.0
"""Bound on the mean difference of log-probabilities: a multiple of the change by bf16 in torch."""

VLLM_LEAST_BOUND = 0.02
"""The bound is at least this, in nats."""


class VLLMNotRun(ValueError):
    """vLLM could not be run; the message has its last log line."""


def prove_log_probabilities(
    source: SourceModel,
    model: str | Path,
    made: Callable[[], Any],
    proof: Proof,
    adapter: Path | None = None,
    rank: int = 0,
) -> None:
    """Check vLLM's log-probabilities beside those of a model in torch.

    Args:
        source: the exported model, with the documents that are compared.
        model: folder or hub name of a whole model.
        made: returns the model in torch with the artefact's weights.
        proof: gets the check.
        adapter: folder of an adapter over the model.
        rank: of the adapter, as vLLM is told.

    Raises:
        VLLMNotRun: vLLM was asked for, and its interpreter is missing, or the program failed.
    """
    if source.vllm_python is None:
        reason = "give the interpreter of an environment with vLLM (--vllm-python)"
        proof.not_run("log-probabilities", VLLM, reason)
        return
    arguments = {
        "model": str(model),
        "adapter": None if adapter is None else str(adapter),
        "rank": rank,
        "documents": source.documents,
        "longest": max(map(len, source.documents)) + 1,
    }
    try:
        done = subprocess.run(
            [str(source.vllm_python), "-c", PROGRAM],
            input=json.dumps(arguments),
            capture_output=True,
            text=True,
            timeout=VLLM_TIME_LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise VLLMNotRun(f"vllm_python={str(source.vllm_python)!r}: {failure}") from failure
    results = [line for line in done.stdout.splitlines() if line.startswith(RESULT_PREFIX)]
    if done.returncode or not results:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()] or ["nothing"]
        # vLLM's processes go on to log after the error.
        cause = next((line for line in lines if _CAUSE.search(line)), lines[-1])
        raise VLLMNotRun(
            f"vllm_python={str(source.vllm_python)!r}: the program ended with {done.returncode} "
            f"and said: {cause}"
        )
    theirs: list[list[float]] = json.loads(results[0].removeprefix(RESULT_PREFIX))
    expected = made()
    ours = _log_probabilities(expected, source.documents)
    rounded = _log_probabilities(expected.bfloat16(), source.documents)
    change = float((ours - rounded).abs().mean())
    bound = max(VLLM_LEAST_BOUND, VLLM_ROUNDING_FACTOR * change)
    error = float((ours - torch.cat([torch.tensor(values) for values in theirs])).abs().mean())
    proof.bounded("log-probabilities", VLLM, error, bound)


def _log_probabilities(model: Any, documents: list[list[int]]) -> Tensor:
    """Return a model's log-probabilities ``[n]`` of the tokens after the first of documents."""
    values = []
    for logits, ids in zip(logits_of(model, documents), documents):
        targets = torch.tensor(ids[1:])[:, None]
        values.append(logits[:-1].float().log_softmax(-1).gather(1, targets)[:, 0])
    return torch.cat(values)
