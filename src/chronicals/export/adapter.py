"""An adapter by itself, in PEFT's files."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
from pathlib import Path

from chronicals.export import vllm
from chronicals.export.artefact import ArtefactFormat
from chronicals.export.proof import Proof, largest_error
from chronicals.export.source import SourceModel, logits_of, on_device, probe_ids
from chronicals.export.whole import make_compatible
from chronicals.lora.peft_format import CONFIG_FILE
from chronicals.models import load_model, load_tokenizer
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.saving import MANIFEST

PEFT_LOGIT_BOUND = 1e-4
"""Bound on the error of logits in fp32 beside the trained model's."""

SMALLEST_PEFT_CHANGE = 1e-6
"""An adapter that changes logits by less, relatively, was not applied."""

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""


class AdapterFolder(ArtefactFormat):
    """The folder of an adapter, which PEFT and servers load over its base."""

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the adapter's files."""
        folder = Path(source.saved.place)
        if not folder.is_dir():
            return 0
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())

    def write(self, source: SourceModel, aside: Path) -> None:
        """Copy the folder; raise ValueError if the model has no adapter."""
        if not source.saved.adapted:
            raise ValueError(
                f"{source.saved.place}: was trained whole and has no adapter; export it merged "
                "(--to merged)"
            )
        not_copied = shutil.ignore_patterns(MANIFEST, "chronicals.json")
        shutil.copytree(source.saved.place, aside, ignore=not_copied)
        save_tokenizer(source.tokenizer, aside, source.config)
        make_compatible(aside, [])
        (aside / "generation_config.json").unlink(missing_ok=True)

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Load the adapter by PEFT over its base, and compare logits with and without it."""
        tokenizer = load_tokenizer(aside)
        template = source.tokenizer.chat_template
        proof.equal("chat template", "transformers", template, tokenizer.chat_template)
        proof.equal("ids of texts", "transformers", source.documents, probe_ids(tokenizer))
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
        bound = source.at_least(PEFT_LOGIT_BOUND)
        proof.bounded("logits beside the trained model's", "PEFT", error, bound)
        change = largest_error(adapted, without)
        proof.equal("the adapter changes logits", "PEFT", True, change > SMALLEST_PEFT_CHANGE)
        rank = _rank_for_vllm(aside)
        if rank is None:
            reason = "it serves no DoRA and no saved modules; export it merged"
            proof.not_run("log-probabilities", vllm.VLLM, reason)
            return
        vllm.prove_log_probabilities(source, source.saved.base, source.trained, proof, aside, rank)

    def command(self, source: SourceModel, artefact: Path) -> str | None:
        """Return vLLM's command for the adapter over its base; None if it takes no such adapter."""
        rank = _rank_for_vllm(artefact)
        if rank is None:
            return None
        name = shlex.quote(artefact.name)
        return (
            f"vllm serve {shlex.quote(str(source.saved.base))} --enable-lora --max-lora-rank "
            f"{rank} --lora-modules {name}={shlex.quote(str(artefact))}"
        )


def _rank_for_vllm(folder: Path) -> int | None:
    """Return the largest rank that vLLM is told for an adapter.

    None if it takes no such adapter: DoRA, trained biases, modules that are saved whole.
    """
    described = json.loads((folder / CONFIG_FILE).read_text())
    rank = max([described["r"], *(described.get("rank_pattern") or {}).values()])
    unsupported = ("use_dora", "modules_to_save", "lora_bias")
    if rank > VLLM_RANKS[-1] or any(described.get(field) for field in unsupported):
        return None
    return next(size for size in VLLM_RANKS if size >= rank)
