"""Merging an adapter into the files of its base, rounded once to the files' dtype.

The base is never loaded as a model: its files are read and written one tensor at a time, so a model
of any size takes the memory of its largest weight.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.export.adapter_changes import AdapterChanges, MergeError, WeightChange
from chronicals.export.base_files import base_folder, unpacked
from chronicals.formats.gguf.reader import gguf_of
from chronicals.formats.weight_files import (
    FLOAT_DTYPES,
    INDEX_FILE,
    NewTensor,
    StoredTensor,
    files_of,
    tensors_in,
    write_tensors,
)
from chronicals.lora.peft_format import CONFIG_FILE, WEIGHTS_FILE
from chronicals.models.base_format import BaseFormat
from chronicals.models.loading import load_without_weights
from chronicals.models.routed_experts import is_of_head
from chronicals.saving import MANIFEST, SavedModel, write_folder
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

REPORT = "merge.json"

OLD_TEMPLATE = "chat_template.json"
"""File in which processors of images look for a template before the tokenizer's."""

LARGEST_CHANGE = 3.0
"""Ratio of a weight's norm: an adapter that changes a weight by more has diverged, or belongs to
another base.
"""

LARGEST_LOSS = 0.9
"""Ratio of an adapter's change: if rounding takes more of it from every weight, the merged model is
the base again.
"""

ADAPTER_FILES = {CONFIG_FILE, WEIGHTS_FILE, MANIFEST, "README.md", "chronicals.json"}
"""Files of an adapter's folder that a whole model does not have."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Ends of the names of files that hold weights."""


@dataclass(frozen=True)
class Merged:
    """A merged model.

    Attributes:
        folder: of its files.
        adapter: folder of the adapter.
        base: folder or hub name of the base.
        changes: by the names of weights.
        summands: the two values of the sums, in words.
    """

    folder: Path
    adapter: str
    base: str
    changes: Mapping[str, WeightChange] = field(default_factory=dict)
    summands: str = ""


def merge(model: str | Path, output: str | Path, base_model: str | None = None) -> Merged:
    """Write a model with the adapter merged into its base, for programs that know no adapters.

    Args:
        model: an adapter's folder, a checkpoint, or the folder of a run.
        output: a folder that does not exist yet.
        base_model: the adapter's model, where the adapter does not say or it has moved.

    Raises:
        MergeError: there is no adapter, or several, or it is of a reward model, ``output`` exists,
            the disk is too full, the adapter does not fit the base, or changes nothing, or more
            than is plausible.
        CheckpointError: the files cannot be written; nothing stays.
    """
    output = Path(output)
    saved = SavedModel.find(model, base_model)
    if not saved.adapted:
        raise MergeError(
            f"{model}: holds no adapter; a model that was trained whole needs no merging, use it "
            "as it is"
        )
    refusal = reward_model_refusal(saved)
    if refusal is not None:
        raise MergeError(refusal)
    if output.exists():
        raise MergeError(f"output={str(output)!r}: exists; give a folder that does not (--output)")
    with base_folder(saved, output) as base:
        return Sums(saved, base).write(output)


def reward_model_refusal(saved: SavedModel) -> str | None:
    """Return why a reward model is neither merged nor exported, and what to do instead.

    None for a model that predicts tokens.
    """
    if not saved.is_scored():
        return None
    if not saved.adapted:
        return (
            f"{saved.place}: is a reward model, and what export writes are language models; take "
            "the folder as it is, transformers loads it by AutoModelForSequenceClassification"
        )
    return (
        f"{saved.place}: is the adapter of a reward model, and what merge and export write are "
        "language models; load it by peft's AutoPeftModelForSequenceClassification with "
        "num_labels=1, and call its merge_and_unload()"
    )


@dataclass(frozen=True)
class SummedTensor(StoredTensor):
    """A weight of a base with its adapter, summed in fp32 whenever it is read; it is in no file.

    Attributes:
        adapter: the changes of the base by the adapter.
        original: the weight of the base.
    """

    adapter: AdapterChanges = field(kw_only=True)
    original: StoredTensor = field(kw_only=True)

    def read(self) -> Tensor:
        """Return the sum, fp32."""
        merged = self.adapter.merged(self.original, {})
        return self.original.read() if merged is None else merged


class Sums:
    """The weights of a base with an adapter in them, each summed in fp32 from the files of both.

    Args:
        saved: the adapter.
        base: folder of its model's files.
        exact: sums are written in fp32, for a later rounding to another dtype, not in that of the
            base's files.

    Attributes:
        stored: tensors of all files of the base.
        summands: the two values of the sums, in words.

    Raises:
        MergeError: the adapter does not fit the base.
    """

    def __init__(self, saved: SavedModel, base: Path, exact: bool = False):
        self.saved = saved
        self.base = base
        self.exact = exact
        gguf = gguf_of(str(saved.base))
        self.is_of_gguf = gguf is not None
        quantised = BaseFormat.read(saved.about.get("base"))
        self.adapter = AdapterChanges(Path(saved.place), quantised, self.dtype_of)
        self.files = unpacked({file: list(tensors_in(file)) for file in files_of(base)})
        self.stored = [stored for tensors in self.files.values() for stored in tensors]
        self.adapter.place_in(self.stored, base)
        values = str(saved.base)
        if gguf is not None:
            values = f"the values of {gguf}, dequantised to fp32,"
        elif self.adapter.base_is_packed:
            values = f"the dequantised values of {values}, which is in 4 bits,"
        elif self.adapter.quantised is not None:
            values = f"the dequantised {self.adapter.quantised.code} values of {values}"
        self.summands = f"{values} and the adapter {saved.place}"
        if self.adapter.quantised is not None:
            self.adapter.place_quantised(load_without_weights(base))

    def tensors(self) -> dict[str, StoredTensor]:
        """Return every weight by name: summed when it is read, or that of the base if unchanged."""
        weights: dict[str, StoredTensor] = {}
        for stored in self.stored:
            weights[stored.name] = stored
            if self.adapter.replaces(stored):
                shape = tuple(self.adapter.shapes.get(stored.name, stored.shape))
                size = 4 * torch.Size(shape).numel()
                weights[stored.name] = SummedTensor(
                    stored.file,
                    stored.name,
                    "F32",
                    shape,
                    0,
                    size,
                    adapter=self.adapter,
                    original=stored,
                )
        return weights

    def dtype_of(self, stored: StoredTensor) -> str:
        """Return the dtype that a weight is written in, in the names of safetensors.

        It is that of the base's files; fp32 for exact sums; and BF16 for the values of a GGUF file,
        which has many types.
        """
        if self.exact:
            return "F32" if self.adapter.replaces(stored) else stored.dtype
        return "BF16" if self.is_of_gguf and stored.dtype == "F32" else stored.dtype

    def write(self, output: Path) -> Merged:
        """Write the whole model.

        Raises:
            MergeError: the disk is too full, or the adapter changes nothing, or more than is
                plausible.
            CheckpointError: the files cannot be written; nothing stays.
        """
        self._check_disk(output)
        changes: dict[str, WeightChange] = {}

        def fill(aside: Path) -> None:
            self._copy_other_files(aside)
            self._write_weights(aside, changes)
            _check_changes(changes)
            self._write_settings(aside)
            report = {
                "adapter": str(self.saved.place),
                "base": self.saved.base,
                "sums_of": self.summands,
                "weights": {name: asdict(change) for name, change in changes.items()},
            }
            (aside / REPORT).write_text(to_json(report, indent=1))

        write_folder(output, fill)
        return Merged(output, str(self.saved.place), str(self.saved.base), changes, self.summands)

    def _check_disk(self, output: Path) -> None:
        """Check that the disk of a folder has room for the weights.

        Raises:
            MergeError: it has not.
        """
        needed = 0
        for stored in self.stored:
            dtype = self.dtype_of(stored)
            shape = torch.Size(self.adapter.shapes.get(stored.name, stored.shape))
            if dtype in FLOAT_DTYPES:
                needed += shape.numel() * FLOAT_DTYPES[dtype].itemsize
            else:
                needed += stored.bytes
        place = next(folder for folder in output.absolute().parents if folder.exists())
        free = shutil.disk_usage(place).free
        if free < needed:
            raise MergeError(
                f"output={str(output)!r}: the merged model takes {needed / 2**30:.2f} GiB, the "
                f"disk has {free / 2**30:.2f}; free some, or give a folder on another one "
                "(--output)"
            )

    def _copy_other_files(self, folder: Path) -> None:
        """Copy the files without weights; the adapter's tokenizer overwrites that of the base."""
        adapter = self.saved.beside or Path(self.saved.place)
        not_of_base = {REPORT, MANIFEST}
        if (adapter / "chat_template.jinja").exists():
            not_of_base.add(OLD_TEMPLATE)  # programs that read it would not see the trained one
        for source, left_out in ((self.base, not_of_base), (adapter, ADAPTER_FILES)):
            for small in sorted(source.iterdir()):
                is_weights = small.suffix in WEIGHT_SUFFIXES
                if small.is_file() and not is_weights and small.name not in left_out:
                    shutil.copyfile(small, folder / small.name)

    def _write_weights(self, folder: Path, changes: dict[str, WeightChange]) -> None:
        """Write the files of weights; ``changes`` gets the change of each one that is adapted."""

        def sum_of(stored: StoredTensor) -> Tensor | StoredTensor:
            merged = self.adapter.merged(stored, changes)
            if merged is not None:
                return merged
            return stored if self.dtype_of(stored) == stored.dtype else stored.read()

        for file, tensors in self.files.items():
            sums = []
            for stored in tensors:
                shape = tuple(self.adapter.shapes.get(stored.name, stored.shape))
                made = functools.partial(sum_of, stored)
                sums.append(NewTensor(stored.name, self.dtype_of(stored), shape, made))
            write_tensors(folder / file.name, sums)

    def _write_settings(self, folder: Path) -> None:
        """Make config.json and the index say what the written files hold.

        The adapter may have an embedding of its own, with another number of tokens; a base in GGUF,
        dequantised to fp32, is written in bf16; and a base in 4 bits is written dense.
        """
        rows = {shape[0] for name, shape in self.adapter.shapes.items() if not is_of_head(name)}
        in_bf16 = self.is_of_gguf and not self.exact
        is_dense = self.adapter.base_is_packed
        if rows or in_bf16 or is_dense:
            file = folder / "config.json"
            config: dict[str, Any] = json.loads(file.read_text())
            if rows:
                text = config.get("text_config", {})
                holder = text if "vocab_size" in text else config
                holder["vocab_size"] = max(rows)
            if in_bf16:
                config["dtype"] = "bfloat16"
            if is_dense:
                config.pop("quantization_config", None)
            file.write_text(json.dumps(config, indent=2))
        index = folder / INDEX_FILE
        is_changed = self.exact or self.is_of_gguf or is_dense or bool(self.adapter.shapes)
        if not is_changed or not index.exists():
            return
        described = json.loads(index.read_text())
        if is_dense:
            described["weight_map"] = {}
            for written, tensors in self.files.items():
                described["weight_map"] |= {stored.name: written.name for stored in tensors}
        total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        described["metadata"] = {"total_size": total}
        index.write_text(json.dumps(described, indent=2))


def _check_changes(changes: Mapping[str, WeightChange]) -> None:
    """Raise MergeError if the adapter changes weights too much, not at all, or below rounding."""
    # A NaN is not below the limit either.
    too_large = [name for name, x in changes.items() if not x.change <= LARGEST_CHANGE]
    if too_large:
        raise MergeError(
            f"{too_large[0]} would be changed by {changes[too_large[0]].change:.3g} times its own "
            f"norm, with {len(too_large) - 1} more like it: the adapter has diverged or belongs to "
            "another base; nothing was written"
        )
    if not any(x.change for x in changes.values()):
        raise MergeError(
            "the adapter changes nothing: all of its B matrices are zero, it was not trained; "
            "nothing was written"
        )
    if all(x.lost >= LARGEST_LOSS for x in changes.values() if x.change):
        raise MergeError(
            "the adapter is lost: nearly all of its changes are less than the spacing of the "
            "base's dtype; nothing was written. Keep the adapter beside its base, or give a base "
            "in float32 as base_model (--base-model)"
        )
