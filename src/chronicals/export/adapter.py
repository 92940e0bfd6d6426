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

BOUND = 1e-4
"""Of logits in fp32 beside those of the trained model."""

LEAST = 1e-6
"""An adapter that changes logits by less is not there."""


def write(source: Source, aside: Path) -> None:
    """Raises ValueError where the model is no adapter."""
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
    folder = Path(source.saved.place)
    return (
        sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        if folder.is_dir()
        else 0
    )


def prove(source: Source, aside: Path, proof: Proof) -> None:
    """Load it by PEFT over its base, and compare, with the adapter and without."""
    tokenizer = load_tokenizer(aside)
    proof.equal(
        "chat template", "transformers", source.tokenizer.chat_template, tokenizer.chat_template
    )
    proof.equal("ids of texts", "transformers", source.documents, documents_of(tokenizer))
    if importlib.util.find_spec("peft") is None:
        proof.not_run("logits", "PEFT", "peft is not installed: pip install peft")
        return
    from peft import PeftModel

    assert source.saved.base is not None
    base = load_model(source.saved.base, source.dtype, quantization=None)
    if source.saved.about.get("base"):
        proof.not_run(
            "logits",
            "PEFT",
            "the base was in 4 bits; PEFT over it is compared by chronicals verify",
        )
        return
    rows = len(tokenizer)
    if rows > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(rows)
    theirs = on_device(PeftModel.from_pretrained(base, aside))
    found = logits_of(theirs, source.documents)
    expected = logits_of(source.trained(), source.documents)
    with theirs.disable_adapter():
        without = logits_of(theirs, source.documents)
    error = largest_error(found, expected)
    proof.bounded("logits beside the trained model's", "PEFT", error, source.at_least(BOUND))
    change = largest_error(found, without)
    proof.equal("the adapter changes logits", "PEFT", True, change > LEAST)
    if (rank := rank_for_vllm(aside)) is None:
        proof.not_run(
            "log-probabilities",
            vllm.CLIENT,
            "it serves no DoRA and no saved modules; export it merged",
        )
    else:
        vllm.prove(source, source.saved.base, source.trained, proof, aside, rank)
