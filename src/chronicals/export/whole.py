"""The whole model in 16 or 32 bits, in files of transformers that older programs read, too."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chronicals.export import vllm
from chronicals.export.artefact import ArtefactFormat
from chronicals.export.merge import OLD_TEMPLATE, REPORT
from chronicals.export.proof import (
    ROUNDED_ONCE,
    SUMMED,
    Proof,
    largest_error,
    relative_error,
)
from chronicals.export.source import SourceModel, logits_of, probe_ids
from chronicals.formats.weight_files import (
    FLOAT_DTYPES,
    INDEX_FILE,
    NewTensor,
    StoredTensor,
    tensors_in,
    write_tensors,
)
from chronicals.models import load_config, load_tokenizer
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.saving import MANIFEST

FLOAT_KINDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Kinds of folders, and their dtype in the names of safetensors."""

WHOLE_LOGIT_BOUNDS = {"bf16": 5e-2, "fp16": 1e-2, "fp32": 1e-4}
"""Bounds on the error of logits beside the trained model's, from rounding its weights."""

TRANSFORMERS = "transformers"
SAFETENSORS = "safetensors"
"""Names of clients in proofs."""

ROUNDED = "weights beside the trained ones rounded once"
"""Name of the check that tells whether weights were rounded twice."""

OWN_FILES = {MANIFEST, REPORT, INDEX_FILE, "chronicals.json"}
"""Files of our folders that others have no use for, or that are written anew."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Two names of the number of experts."""


class WholeModel(ArtefactFormat):
    """A folder with the whole model, its ``kind`` a key of ``FLOAT_KINDS``."""

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the weights."""
        width = FLOAT_DTYPES[FLOAT_KINDS[self.kind]].itemsize
        return width * sum(math.prod(stored.shape) for stored in source.tensors.values())

    def write(self, source: SourceModel, aside: Path) -> None:
        """Write the folder, one tensor at a time.

        Raises:
            ValueError: a weight is too large for float16.
        """
        if self.kind != "fp32":
            source.check_kept(FLOAT_KINDS[self.kind])
        aside.mkdir(parents=True)
        write_files(source, aside, lambda stored: [in_dtype(stored, FLOAT_KINDS[self.kind])])
        write_beside(source, aside)
        name_dtype(aside, self.kind)

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Read the weights of the folder, load it by transformers, and compare both."""
        dtype = FLOAT_KINDS[self.kind]
        prove_rounded(source, aside, lambda stored: [in_dtype(stored, dtype)], proof)
        model = prove_beside(source, aside, proof)
        source.prove_survival(model, proof)
        if self.kind != "fp32":
            vllm.prove_log_probabilities(source, aside, source.trained, proof)
        error = largest_error(logits_of(model, source.documents), source.trained_logits)
        bound = source.at_least(WHOLE_LOGIT_BOUNDS[self.kind])
        proof.bounded("logits beside the trained model's", TRANSFORMERS, error, bound)
        source.prove_texts(model, bound, TRANSFORMERS, proof)

    def command(self, source: SourceModel, artefact: Path) -> str | None:
        """Return vLLM's command; None in fp32, in which nobody serves."""
        return None if self.kind == "fp32" else super().command(source, artefact)


def in_dtype(stored: StoredTensor, dtype: str) -> NewTensor:
    """Return a tensor to be written in another dtype (safetensors' name); integers stay so."""
    if stored.dtype == dtype or stored.dtype not in FLOAT_DTYPES:
        return NewTensor(stored.name, stored.dtype, stored.shape, lambda: stored)
    return NewTensor(stored.name, dtype, stored.shape, stored.read)


def write_files(
    source: SourceModel, aside: Path, made: Callable[[StoredTensor], list[NewTensor]]
) -> None:
    """Write files of the same names; ``made`` returns the tensors that replace one."""
    by_file = defaultdict(list)
    for stored in source.tensors.values():
        by_file[stored.file].extend(made(stored))
    for file, tensors in by_file.items():
        write_tensors(aside / file.name, tensors)
    index = source.folder / INDEX_FILE
    if index.exists():
        names = {tensor.name: file.name for file, tensors in by_file.items() for tensor in tensors}
        total = sum(tensor.bytes for tensors in by_file.values() for tensor in tensors)
        described = {"metadata": {"total_size": total}, "weight_map": names}
        (aside / INDEX_FILE).write_text(json.dumps(described, indent=2))


def write_beside(source: SourceModel, aside: Path) -> None:
    """Write everything but the weights: settings, tokenizer, licence, for older programs too."""
    for file in sorted(source.folder.iterdir()):
        is_text = file.suffix in (".json", ".jinja", ".txt", ".model", ".md", "")
        if file.is_file() and is_text and file.name not in OWN_FILES:
            shutil.copyfile(file, aside / file.name)
    save_tokenizer(source.tokenizer, aside, source.config)
    make_compatible(aside, source.stops)


def name_dtype(folder: Path, kind: str, **more: Any) -> None:
    """Write the dtype of the weights, and further fields, to a folder's config.json."""
    file = folder / "config.json"
    dtype = str(FLOAT_DTYPES[FLOAT_KINDS[kind]]).removeprefix("torch.")
    config = json.loads(file.read_text())
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
    file.write_text(json.dumps({**config, "dtype": dtype, **more}, indent=2))


def prove_rounded(
    source: SourceModel,
    aside: Path,
    made: Callable[[StoredTensor], list[NewTensor]],
    proof: Proof,
) -> None:
    """Compare all tensors of a folder's files with the trained weights, rounded once.

    Args:
        source: the model that was written.
        aside: the folder.
        made: see ``write_files``.
        proof: gets the checks.
    """
    written = {
        stored.name: stored
        for file in sorted(aside.glob("*.safetensors"))
        for stored in tensors_in(file)
    }
    worst: dict[str, tuple[float, float, str]] = {}
    for stored in source.trained_tensors.values():
        for new in made(stored):
            if new.name not in written or written[new.name].dtype != new.dtype:
                proof.equal(
                    "every weight is there", SAFETENSORS, f"{new.name} in {new.dtype}", None
                )
                return
            expected = new.cast(new.made())
            read = written[new.name].content().view(expected.dtype).view(expected.shape)
            if expected.is_floating_point() and expected.element_size() > 1:
                error = relative_error(read, expected)
                bound = SUMMED if expected.element_size() > 2 else ROUNDED_ONCE
            else:  # the ratio of bytes of codes that differ
                codes, others = (
                    x.contiguous().view(-1).view(torch.uint8) for x in (read, expected)
                )
                error = float((codes != others).float().mean()) if len(codes) else 0.0
                bound = ROUNDED_ONCE
            worst[new.dtype] = max(worst.get(new.dtype, (-1.0, 0.0, "")), (error, bound, new.name))
    for dtype, (error, bound, name) in worst.items():
        proof.bounded(f"{ROUNDED}, {dtype}", SAFETENSORS, error, bound, name)


def prove_beside(source: SourceModel, aside: Path, proof: Proof) -> Any:
    """Compare everything but the weights, and return the model that transformers loads."""
    ours = source.config.to_dict()
    theirs = load_config(aside).to_dict()
    may_differ = {
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "transformers_version",
        "quantization_config",
        *(set(theirs) - set(ours)),
    }
    for config in (ours, theirs):
        for name, value in list(config.items()):
            if name in may_differ or isinstance(value, dict):
                config.pop(name)
    proof.equal("settings", TRANSFORMERS, ours, theirs)
    tokenizer = load_tokenizer(aside)
    template = source.tokenizer.chat_template
    proof.equal("chat template", TRANSFORMERS, template, tokenizer.chat_template)
    proof.equal("ids of texts", TRANSFORMERS, source.documents, probe_ids(tokenizer))
    model = source.load(aside)
    stops = model.generation_config.eos_token_id
    if not isinstance(stops, list):
        stops = [stops]
    proof.equal("where generation ends", TRANSFORMERS, source.stops, stops)
    return model


def make_compatible(folder: Path, stops: list[int]) -> None:
    """Add older names to the JSON files of a model's folder.

    transformers 5 writes some settings only under new names, which programs for version 4 ignore
    silently: they compute positions with another base, and have no chat template. Both names are
    written here; transformers 5 reads the same as before.

    Args:
        folder: of the model; files that it lacks are not made, except for generation settings.
        stops: ids at which generation ends, all of which the generation settings name afterwards.
    """
    template = folder / "chat_template.jinja"
    for name in ("config.json", "tokenizer_config.json", OLD_TEMPLATE, "generation_config.json"):
        file = folder / name
        before = json.loads(file.read_text()) if file.exists() else None
        after = dict(before or {})
        if name == "generation_config.json" and stops:
            after["eos_token_id"] = stops
        elif before is None:
            continue
        elif name == "config.json":
            after |= older_names(before)
            for part in ("text_config", "vision_config"):
                if isinstance(before.get(part), dict):
                    after[part] = {**before[part], **older_names(before[part])}
        elif name == "tokenizer_config.json":
            if before.get("tokenizer_class") == "TokenizersBackend":
                after["tokenizer_class"] = "PreTrainedTokenizerFast"
            if template.exists() and "chat_template" not in before:
                after["chat_template"] = template.read_text()
        elif name == OLD_TEMPLATE and template.exists():
            after = {"chat_template": template.read_text()}
        if after != before:
            file.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n")


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a configuration under version 4's names, without those that it has.

    They are the rotation, the pattern of layers with a window, and the number of experts.
    """
    found: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    local = rope.get("sliding_attention")
    if "rope_theta" in whole:
        found["rope_theta"] = whole["rope_theta"]
        others = ("rope_theta", "partial_rotary_factor")
        scaling = {key: value for key, value in whole.items() if key not in others}
        is_scaled = scaling.get("rope_type", "default") != "default"
        found["rope_scaling"] = scaling if is_scaled else None
    if "partial_rotary_factor" in whole:
        found["partial_rotary_factor"] = whole["partial_rotary_factor"]
    if local:
        found["rope_local_base_freq"] = local["rope_theta"]
    layers = config.get("layer_types") or []
    if "sliding_attention" in layers and "full_attention" in layers:
        # The old name holds n if every n-th layer attends to all tokens, the others in a window.
        period = layers.index("full_attention") + 1
        is_full = [kind == "full_attention" for kind in layers]
        if is_full == [number % period == 0 for number in range(1, len(layers) + 1)]:
            found["sliding_window_pattern"] = period
    count = next((config[name] for name in EXPERT_COUNTS if name in config), None)
    if count is not None:
        found |= dict.fromkeys(EXPERT_COUNTS, count)
    return {key: value for key, value in found.items() if key not in config}
