"""An adapter by itself, in PEFT's files."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from chronicals.export import vllm
from chronicals.export.compatible import make_compatible
from chronicals.export.proof import Proof, largest_error
from chronicals.export.serving import rank_for_vllm
from chronicals.export.source import Source, documents_of, logits_of, on_device
from chronicals.models import load_model, load_tokenizer
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.saving import MANIFEST

PEFT_LOGIT_BOUND = 1e-4
"""Bound on the error of logits in fp32 beside the trained model's."""

SMALLEST_PEFT_CHANGE = 1e-6
"""An adapter that changes logits by less, relatively, was not applied."""


def write(source: Source, aside: Path) -> None:
    """Write the folder; raises ValueError if the model has no adapter."""
    if not source.saved.adapted:
        raise ValueError(
            f"{source.saved.place}: was trained whole and has no adapter; export it merged (--to "
            "merged)"
        )
    shutil.copytree(
        source.saved.place, aside, ignore=shutil.ignore_patterns(MANIFEST, "chronicals.json")
    )
    save_tokenizer(source.tokenizer, aside, source.config)
    make_compatible(aside, [])
    (aside / "generation_config.json").unlink(missing_ok=True)


def size(source: Source) -> int:
    """Return the bytes of the adapter's files."""
    folder = Path(source.saved.place)
    if not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def prove(source: Source, aside: Path, proof: Proof) -> None:
    """Load the adapter by PEFT over its base, and compare logits with and without it."""
    tokenizer = load_tokenizer(aside)
    template = source.tokenizer.chat_template
    proof.equal("chat template", "transformers", template, tokenizer.chat_template)
    proof.equal("ids of texts", "transformers", source.documents, documents_of(tokenizer))
    if importlib.util.find_spec("peft") is None:
        proof.not_run("logits", "PEFT", "peft is not installed: pip install peft")
        return
    from peft import PeftModel

    assert source.saved.base is not None
    base = load_model(source.saved.base, source.dtype, quantization=None)
    if source.saved.about.get("base"):
        reason = "the base was in 4 bits; PEFT over it is compared by chronicals verify"
        proof.not_run("logits", "PEFT", reason)
        return
    rows = len(tokenizer)
    if rows > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(rows)
    theirs = on_device(PeftModel.from_pretrained(base, aside))
    adapted = logits_of(theirs, source.documents)
    expected = logits_of(source.trained(), source.documents)
    with theirs.disable_adapter():
        without = logits_of(theirs, source.documents)
    error = largest_error(adapted, expected)
    proof.bounded(
        "logits beside the trained model's", "PEFT", error, source.at_least(PEFT_LOGIT_BOUND)
    )
    change = largest_error(adapted, without)
    proof.equal("the adapter changes logits", "PEFT", True, change > SMALLEST_PEFT_CHANGE)
    rank = rank_for_vllm(aside)
    if rank is None:
        reason = "it serves no DoRA and no saved modules; export it merged"
        proof.not_run("log-probabilities", vllm.VLLM, reason)
    else:
        vllm.prove(source, source.saved.base, source.trained, proof, aside, rank)
