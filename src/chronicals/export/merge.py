"""Merging an adapter into the files of its base: ``W + s · B A``, summed in fp32 and rounded once to the file's dtype.

The base is never loaded as a model: its files are read and written a tensor at a time, so a model of any size takes the memory
of its largest weight. What the sum loses by rounding is measured for each weight and reported.
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
from safetensors import safe_open
from torch import Tensor

from chronicals.export.additions import Addition, Additions
from chronicals.export.compatible import OLD_TEMPLATE
from chronicals.export.dequantised_experts import DequantisedExperts
from chronicals.export.gguf_base import dequantised
from chronicals.export.packed_tensors import PackedTensor, unpacked
from chronicals.export.part_names import StoredNames
from chronicals.export.weight_files import DTYPES as DTYPES_OF_FILES
from chronicals.export.weight_files import INDEX, StoredTensor, files_of, tensors_in, write_file
from chronicals.lora.loading import describe_adapter, shape_of
from chronicals.lora.magnitude import SHORTEST
from chronicals.lora.peft_format import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from chronicals.lora.tokens import FILE_NAME
from chronicals.models.base_format import BaseFormat, FourBits
from chronicals.models.four_bits import linear_layers
from chronicals.models.gguf_reader import gguf_of
from chronicals.models.loading import load_without_weights
from chronicals.models.lookahead_heads import is_of_head
from chronicals.saving import MANIFEST, SavedModel, write_folder
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

REPORT = "merge.json"

LARGEST_CHANGE = 3.0
"""Of a weight's norm: an adapter that changes a weight by more has diverged, or belongs to another base."""

MOST_LOST = 0.9
"""Of an adapter's change: where rounding takes more of it from every weight, the merged model is the base again."""

ROUNDED = 1e-6
"""Of a weight's norm: what rounding changes of it where a magnitude is the norm that its row has already."""

KEPT = 4
"""Matrices that stay in memory: those of the experts of a layer change many tensors."""

OWN_FILES = {CONFIG_FILE, WEIGHTS_FILE, MANIFEST, "README.md", "chronicals.json"}
"""Of an adapter's folder, those that a whole model does not have."""


class MergeError(ValueError):
    """The adapter cannot be merged; nothing was written."""


@dataclass(frozen=True)
class Change:
    """What merging did to a weight, as ratios of Frobenius norms.

    Attributes:
        change: of what the adapter adds, ``s B A`` without DoRA, to that of the weight that it was trained over: of a weight
            that was quantised then, of the values that its codes stand for.
        error: of what rounding changed, to that of the exact sum.
        lost: of what rounding changed, to that of what the adapter adds.
        from_files: of what is written less what the base's file holds, to that of what the file holds.
    """

    change: float
    error: float
    lost: float
    from_files: float


@dataclass(frozen=True)
class Merged:
    """A merged model.

    Attributes:
        folder: where it is.
        adapter, base: what it was made of.
        changes: by the names of weights.
        summands: in words, what was added up.
    """

    folder: Path
    adapter: str
    base: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    summands: str = ""


def merge(model: str | Path, output: str | Path, base_model: str | None = None) -> Merged:
    """Write a model with the adapter merged into its base, for programs that know no adapters.

    Args:
        model: an adapter's folder, a checkpoint, or the folder of a run.
        output: a folder that does not exist yet.
        base_model: the adapter's model, where the adapter does not say or it has moved.

    Raises:
        MergeError: there is no adapter, or it is of a reward model, ``output`` exists, the disk is too full, the adapter does
            not fit the base, or changes nothing, or more than is plausible.
        CheckpointError: the files cannot be written; nothing stays.
    """
    output, saved = Path(output), SavedModel.find(model, base_model)
    if not saved.adapted:
        raise MergeError(f"{model}: holds no adapter; a model that was trained whole needs no merging, use it as it is")
    if saved.is_scored():
        raise MergeError(of_a_reward_model(saved))
    if saved.others:
        raise MergeError(
            f"{saved.beside or saved.place}: the model computes with the sum of {1 + len(saved.others)} adapters of PEFT; load "
            "it (chronicals.saving.SavedModel.find(…).model), call model.merge_and_unload(), and save that"
        )
    if output.exists():
        raise MergeError(f"output={str(output)!r}: exists; give a folder that does not (--output)")
    if not saved.base:
        raise MergeError(f"{saved.place}: an adapter that does not name its model; give base_model (--base-model)")
    if (file := gguf_of(saved.base)) is not None:
        with dequantised(file, output) as folder:
            return _merged(saved, folder, output, f"the values of {file}, dequantised to bf16,")
    return _merged(saved, folder_of(saved.base), output)


def of_a_reward_model(saved: SavedModel) -> str:
    """Why it is neither merged nor exported, and what to do."""
    if not saved.adapted:
        return (
            f"{saved.place}: is a reward model, and what export writes are language models; take the folder as it is, "
            "transformers loads it by AutoModelForSequenceClassification"
        )
    return (
        f"{saved.place}: is the adapter of a reward model, and what merge and export write are language models; load it by "
        "peft's AutoPeftModelForSequenceClassification with num_labels=1, and call its merge_and_unload()"
    )


def _merged(saved: SavedModel, base: Path, output: Path, values: str | None = None) -> Merged:
    """Write the sums; ``values`` says what the adapter is added to, where the files of ``base`` hold just that."""
    adapter = _Adapter(Path(saved.place), BaseFormat.read(saved.about.get("base")))
    files = unpacked({file: list(tensors_in(file)) for file in files_of(base)})
    adapter.place_in([stored for tensors in files.values() for stored in tensors], base)
    if adapter.quantised is not None:
        adapter.place_quantised(load_without_weights(base))
    summands = f"{values or adapter.values_of(str(saved.base))} and the adapter {saved.place}"
    _check_room(output, files)
    changes: dict[str, Change] = {}

    def fill(aside: Path) -> None:
        _copy_small_files(base, saved.beside or Path(saved.place), aside)
        for file, tensors in files.items():
            write_file(aside / file.name, tensors, lambda stored: adapter.merged(stored, changes), adapter.shapes)
        _check(changes)
        _write_rows(aside, adapter.shapes)
        if any(isinstance(stored, PackedTensor) for tensors in files.values() for stored in tensors):
            _write_dense(aside, files)
        weights = {name: asdict(change) for name, change in changes.items()}
        report = {"adapter": str(saved.place), "base": saved.base, "sums_of": summands, "weights": weights}
        (aside / REPORT).write_text(to_json(report, indent=1))

    write_folder(output, fill)
    return Merged(output, str(saved.place), str(saved.base), changes, summands)


class _Adapter:
    """The matrices of an adapter's folder, read when they are needed, by the weights of the base that they change.

    Args:
        quantised: how the base was quantised under it; None where it was not.
    """

    def __init__(self, folder: Path, quantised: BaseFormat | None = None):
        self.folder, self.described, self.quantised = folder, describe_adapter(folder), quantised
        self._read = functools.lru_cache(KEPT)(self._load)
        self.shape = shape_of(self.described, self.described["target_modules"])
        if whole := [name for name in self.shape.modules_to_save or () if not is_of_head(name)]:
            raise MergeError(f"{folder}: modules_to_save={whole}: load it, and call its merge_and_unload()")
        if self.shape.takes_from_weights:
            raise MergeError(
                f"{folder}: init_lora_weights={self.shape.init!r}: an adapter over changed weights; load it with "
                "chronicals.lora.load_adapter and merge_and_unload() that, or save it converted"
            )
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            self.names = {name.removeprefix(PREFIX): name for name in file.keys()}  # noqa: SIM118  # it is no dictionary
            self.shapes = {
                own.replace(".token_adapter.base_layer.", "."): torch.Size(file.get_slice(name).get_shape())
                for own, name in self.names.items()
                if ".lora_" not in own and not own.endswith(FILE_NAME)
            }
        self.names |= {own.replace(".token_adapter.base_layer.", "."): name for own, name in self.names.items()}
        self.tokens: dict[str, tuple[list[int], str]] = {}
        self.changed: dict[str, Addition] = {}
        self.there = StoredNames()
        self.stored: dict[str, StoredTensor] = {}
        self.dequantised: dict[str, tuple[FourBits, bool]] = {}
        self.experts: DequantisedExperts | None = None

    def place_in(self, stored: list[StoredTensor], base: Path) -> None:
        """Find the weight of each layer and embedding.

        Args:
            base: the folder of what is stored, whose class says what is made of several tensors.

        Raises:
            MergeError: one is not there.
        """
        self.there = StoredNames(tensor.name for tensor in stored)
        self.stored = {tensor.name: tensor for tensor in stored}
        paths = {own.rpartition(".lora_")[0] for own in self.names if ".lora_" in own}
        if not paths:
            raise MergeError(f"{self.folder}: holds no matrices of an adapter")
        additions = Additions(self.folder, self.described, self.shape, self._read, self.names)
        try:
            self.changed = additions.by_weight(sorted(paths), self.there, base)
        except ValueError as error:
            raise MergeError(str(error)) from error
        self._place_tokens()
        for own in list(self.shapes):
            plain = own.replace(".base_layer.", ".")
            found = self.there.find(plain)
            if found is None:
                raise MergeError(f"{self.folder}: {own} is stored with the adapter, and the base has no such weight")
            self.names[found], self.shapes[found] = self.names[own], self.shapes.pop(own)

    def _place_tokens(self) -> None:
        """Find the weights with rows of trained tokens."""
        asked = self.shape.trainable_token_indices
        absent = []
        for own in [own for own in self.names if own.endswith(FILE_NAME)]:
            path = own.removesuffix(f".{FILE_NAME}")
            named = asked if isinstance(asked, Mapping) else {path: asked or ()}
            ids = next((list(ids) for name, ids in named.items() if f".{path}".endswith(f".{name}")), None)
            found = self.there.find(f"{path}.weight")
            if ids is None or found is None:
                absent.append(own)
            else:
                self.tokens[found] = ids, self.names[own]
        if absent and (isinstance(asked, Mapping) or not self.tokens):  # PEFT may store a list's again for a tied head
            raise MergeError(f"{self.folder}: {absent[0]} fits no trainable_token_indices, or no weight of the base")

    def _with_tokens(self, stored: StoredTensor, whole: Tensor, changes: dict[str, Change]) -> Tensor:
        """An embedding, fp32, with the rows of the trained tokens."""
        ids, name = self.tokens[stored.name]
        rows = self._read(name).float()
        if rows.shape != (len(ids), whole.shape[1]) or max(ids) >= len(whole):
            raise MergeError(
                f"{self.folder}: has rows {tuple(rows.shape)} for {stored.name} {tuple(whole.shape)}; give the base that the "
                "adapter was trained on as base_model (--base-model)"
            )
        total = whole.index_copy(0, torch.tensor(ids), rows)
        kind = DTYPES_OF_FILES.get(stored.dtype, torch.float32)
        written = total.to(kind).float()
        changed, off = (rows - whole[ids]).norm(), (written - total)[ids].norm()
        moved = _ratio((written - whole).norm(), whole.norm())
        changes[stored.name] = Change(_ratio(changed, whole.norm()), _ratio(off, total.norm()), _ratio(off, changed), moved)
        return total

    def place_quantised(self, model: Any) -> None:
        """Find the weights that were in 4 bits under the adapter and are not in the files, those without adapters too.

        Args:
            model: the base, on the meta device.

        Raises:
            MergeError: one is not there, or was quantised otherwise than to 4 bits.
        """
        assert self.quantised is not None
        if self.in_4_bits:
            return
        if self.quantised.by_transformers is not None:
            raise MergeError(
                f"{self.folder}: the adapter was trained over {self.quantised}, whose values are not in the base's files; "
                "load the adapter, call merge_and_unload() there, and save that"
            )
        try:
            self.experts = DequantisedExperts.of(model, self.there, self.stored, self.quantised)
        except ValueError as error:
            raise MergeError(f"{self.folder}: {error}") from error
        modules = dict(model.named_modules())
        for path in self.quantised.layers if self.quantised.layers is not None else linear_layers(model):
            found, kind = self.there.find(f"{path}.weight"), self.quantised.kind_of(path)
            if found is None or kind is None or path not in modules:
                raise MergeError(
                    f"{self.folder}: the adapter was trained over a base in 4 bits, whose files have no weight {path}.weight: "
                    "it is made of several; load the adapter, call model.merge_and_unload(), and save that"
                )
            self.dequantised[found] = kind, type(modules[path]).__name__ == "Conv1D"

    @property
    def in_4_bits(self) -> bool:
        """Whether the base's files hold weights in 4 bits, which are dequantised as they are read."""
        return any(isinstance(tensor, PackedTensor) for tensor in self.stored.values())

    def values_of(self, base: str) -> str:
        """In words, what the adapter is added to."""
        if self.in_4_bits:
            return f"the dequantised values of {base}, which is in 4 bits,"
        return base if self.quantised is None else f"the dequantised {self.quantised.code} values of {base}"

    def _is_dequantised(self, name: str) -> bool:
        """Whether what a weight's codes stood for takes its place."""
        return name in self.dequantised or (self.experts is not None and name in self.experts)

    def _as_trained(self, weight: Tensor, name: str) -> Tensor:
        """A weight of the base as the adapter saw it: what its 4 bits stand for, where it had those."""
        if self.experts is not None and name in self.experts:
            return self.experts.read(name)
        if name not in self.dequantised:
            return weight
        kind, transposed = self.dequantised[name]
        return kind.values(weight.t()).t() if transposed else kind.values(weight)

    def merged(self, stored: StoredTensor, changes: dict[str, Change]) -> Tensor | None:
        """What takes the place of a weight of the base, fp32; None where it stays."""
        replaced = self._read(self.names[stored.name]).float() if stored.name in self.shapes else None
        if stored.name in self.tokens:
            return self._with_tokens(stored, stored.read().float() if replaced is None else replaced, changes)
        addition = self.changed.get(stored.name)
        if addition is None and not self._is_dequantised(stored.name):
            return replaced
        try:
            weight = stored.read()
        except ValueError as error:
            raise MergeError(f"{error}: the base is quantised; give base_model (--base-model) in 16 or 32 bits") from None
        exact = self._as_trained(weight, stored.name).float() if replaced is None else replaced
        if addition is None:
            changes[stored.name] = self._change(weight, exact, torch.zeros_like(exact), exact)
            return exact
        update = addition.update()
        if update.shape != exact.shape:
            raise MergeError(
                f"{self.folder}: {addition.path} changes a weight {tuple(update.shape)}, that of the base is "
                f"{tuple(exact.shape)}; give the base that the adapter was trained on as base_model (--base-model)"
            )
        total = exact + update
        if self.described.get("use_dora"):
            total = self._with_magnitudes(addition.path, total, 0 if self.described.get("fan_in_fan_out") else 1)
            update = total - exact
            if update.norm() <= ROUNDED * exact.norm():  # the norms of an adapter that was not trained
                update = torch.zeros_like(update)
        changes[stored.name] = self._change(weight, exact, update, total)
        return total

    def _change(self, weight: Tensor, exact: Tensor, update: Tensor, total: Tensor) -> Change:
        """Return how a weight of a file is changed.

        Args:
            exact: what the adapter was trained over, fp32.
            update: what is added to it.
            total: their sum, which is rounded to the dtype of the file.
        """
        written, there = total.to(weight.dtype).float(), weight.float()
        off, changed, moved = (written - exact - update).norm(), update.norm(), 0.0
        if written.shape == there.shape:  # else the adapter has an embedding of its own
            moved = _ratio((written - there).norm(), there.norm())
        return Change(_ratio(changed, exact.norm()), _ratio(off, total.norm()), _ratio(off, changed), moved)

    def _with_magnitudes(self, path: str, weight: Tensor, along: int) -> Tensor:
        """DoRA: each row of ``weight``, whose elements are along this dimension, as long as the adapter says."""
        magnitude = self._read(f"{PREFIX}{path}.lora_magnitude_vector").float()
        norms = torch.linalg.vector_norm(weight, dim=along).clamp_(min=SHORTEST)
        return weight * (magnitude / norms).unsqueeze(along)

    def _load(self, name: str) -> Tensor:
        with safe_open(self.folder / WEIGHTS_FILE, framework="pt") as file:
            return file.get_tensor(name)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if part else 0.0


def _check(changes: Mapping[str, Change]) -> None:
    """Raises MergeError where merging makes no sense."""
    too_much = [name for name, made in changes.items() if not made.change <= LARGEST_CHANGE]
    if too_much:
        raise MergeError(
            f"{too_much[0]} would be changed by {changes[too_much[0]].change:.3g} times its own norm, with {len(too_much) - 1} "
            "more like it: the adapter has diverged or belongs to another base; nothing was written"
        )
    if not any(made.change for made in changes.values()):
        raise MergeError("the adapter changes nothing: all of its B matrices are zero, it was not trained; nothing was written")
    if all(made.lost >= MOST_LOST for made in changes.values() if made.change):
        raise MergeError(
            "the adapter is lost: nearly all of its changes are less than the spacing of the base's dtype; nothing was "
            "written. Keep the adapter beside its base, or give a base in float32 as base_model (--base-model)"
        )


def folder_of(base: str) -> Path:
    """The base's files; those of a hub name are downloaded, unless the cache has them."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(base, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).partition("\n")[0]
        raise MergeError(f"{base}: the adapter's model is no folder, nor downloaded ({reason}); give base_model") from None


def _check_room(output: Path, files: Mapping[Path, list[StoredTensor]]) -> None:
    """Raises MergeError where the disk has too little."""
    needed = sum(stored.end - stored.begin for tensors in files.values() for stored in tensors)
    place = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise MergeError(
            f"output={str(output)!r}: the merged model takes {needed / 2**30:.2f} GiB, the disk has {free / 2**30:.2f}; free "
            "some, or give a folder on another one (--output)"
        )


def _copy_small_files(base: Path, adapter: Path, target: Path) -> None:
    """Whatever is no weight, of the base and then of the adapter, whose tokenizer counts where it has one."""
    older = {OLD_TEMPLATE} if (adapter / "chat_template.jinja").exists() else set()  # which would hide the trained one
    for folder, left_out in ((base, {REPORT, MANIFEST, *older}), (adapter, OWN_FILES)):
        for file in sorted(folder.iterdir()):
            weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
            if file.is_file() and not weights and file.name not in left_out:
                shutil.copyfile(file, target / file.name)


def _write_rows(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """The number of tokens, where the adapter has an embedding of its own."""
    rows = {shape[0] for name, shape in shapes.items() if not is_of_head(name)}
    if not rows:
        return
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    text = config["text_config"] if "vocab_size" in config.get("text_config", {}) else config
    text["vocab_size"] = max(rows)
    file.write_text(json.dumps(config, indent=2))
    _write_index(folder)


def _write_dense(folder: Path, files: Mapping[Path, list[StoredTensor]]) -> None:
    """That no weight is in 4 bits, where the base's were."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config, indent=2))
    _write_index(folder, {stored.name: file.name for file, tensors in files.items() for stored in tensors})


def _write_index(folder: Path, names: Mapping[str, str] | None = None) -> None:
    """The size of all files, and which tensors are in which, where there is an index and that has changed."""
    index = folder / INDEX
    if index.exists():
        described = json.loads(index.read_text()) | ({} if names is None else {"weight_map": dict(names)})
        total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        index.write_text(json.dumps({**described, "metadata": {"total_size": total}}, indent=2))
