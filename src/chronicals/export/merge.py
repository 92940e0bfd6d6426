"""Merging an adapter into the files of its base: ``W + s · B A``, summed in fp32 and rounded once to the file's dtype.

The base is never loaded as a model: its files are read and written a tensor at a time, so a model of any size takes the memory
of its largest weight. What the sum loses by rounding is measured for each weight and reported.
"""

from __future__ import annotations

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

from chronicals.export.weight_files import INDEX, StoredTensor, files_of, tensors_in, write_file
from chronicals.lora.loading import describe_adapter
from chronicals.lora.peft_format import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from chronicals.saving import MANIFEST, SavedModel, write_folder
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

REPORT = "merge.json"

LARGEST_CHANGE = 3.0
"""Of a weight's norm: an adapter that changes a weight by more has diverged, or belongs to another base."""

MOST_LOST = 0.9
"""Of an adapter's change: where rounding takes more of it from every weight, the merged model is the base again."""

OWN_FILES = {CONFIG_FILE, WEIGHTS_FILE, MANIFEST, "README.md", "chronicals.json"}
"""Of an adapter's folder, those that a whole model does not have."""


class MergeError(ValueError):
    """The adapter cannot be merged; nothing was written."""


@dataclass(frozen=True)
class Change:
    """What merging did to a weight, as ratios of Frobenius norms.

    Attributes:
        change: of ``s B A`` to the weight's.
        error: of what rounding changed, to that of the exact sum.
        lost: of what rounding changed, to that of ``s B A``.
    """

    change: float
    error: float
    lost: float


@dataclass(frozen=True)
class Merged:
    """A merged model.

    Attributes:
        folder: where it is.
        adapter, base: what it was made of.
        changes: by the names of weights.
    """

    folder: Path
    adapter: str
    base: str
    changes: Mapping[str, Change] = field(default_factory=dict)


def merge(model: str | Path, output: str | Path, base_model: str | None = None) -> Merged:
    """Write a model with the adapter merged into its base, for programs that know no adapters.

    Args:
        model: an adapter's folder, a checkpoint, or the folder of a run.
        output: a folder that does not exist yet.
        base_model: the adapter's model, where the adapter does not say or it has moved.

    Raises:
        MergeError: there is no adapter, ``output`` exists, the disk is too full, the adapter does not fit the base, or changes
            nothing, or more than is plausible.
        CheckpointError: the files cannot be written; nothing stays.
    """
    output, saved = Path(output), SavedModel.find(model, base_model)
    if not saved.adapted:
        raise MergeError(f"{model}: holds no adapter; a model that was trained whole needs no merging, use it as it is")
    if output.exists():
        raise MergeError(f"output={str(output)!r}: exists; give a folder that does not (--output)")
    if not saved.base:
        raise MergeError(f"{saved.place}: an adapter that does not name its model; give base_model (--base-model)")
    base, adapter = _folder_of(saved.base), _Adapter(Path(saved.place))
    files = {file: list(tensors_in(file)) for file in files_of(base)}
    adapter.place_in([stored for tensors in files.values() for stored in tensors])
    _check_room(output, files)
    changes: dict[str, Change] = {}

    def fill(aside: Path) -> None:
        _copy_small_files(base, Path(saved.place), aside)
        for file, tensors in files.items():
            write_file(aside / file.name, tensors, lambda stored: adapter.merged(stored, changes), adapter.shapes)
        _check(changes)
        _write_rows(aside, adapter.shapes)
        report = {"adapter": str(saved.place), "base": saved.base, "weights": {n: asdict(c) for n, c in changes.items()}}
        (aside / REPORT).write_text(to_json(report, indent=1))

    write_folder(output, fill)
    return Merged(output, str(saved.place), saved.base, changes)


class _Adapter:
    """The matrices of an adapter's folder, read when they are needed, by the weights of the base that they change."""

    def __init__(self, folder: Path):
        self.folder, self.described = folder, describe_adapter(folder)
        rank, alpha = self.described["r"], self.described["lora_alpha"]
        self.scale = alpha / (rank**0.5 if self.described.get("use_rslora") else rank)
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            self.names = {name.removeprefix(PREFIX): name for name in file.keys()}  # noqa: SIM118  # it is no dictionary
            self.shapes = {
                own: torch.Size(file.get_slice(name).get_shape()) for own, name in self.names.items() if ".lora_" not in own
            }
        self.layers: dict[str, str] = {}

    def place_in(self, stored: list[StoredTensor]) -> None:
        """Find the weight of each layer and embedding.

        Raises:
            MergeError: one is not there.
        """
        there = {tensor.name for tensor in stored}
        paths = {own.rpartition(".lora_")[0] for own in self.names if ".lora_" in own}
        if not paths:
            raise MergeError(f"{self.folder}: holds no matrices of an adapter")
        for path in sorted(paths):
            names = [f"{path}.weight", f"{path.partition('.')[2]}.weight"]  # files of some classes leave the first part out
            found = next((name for name in names if name in there), None)
            if found is None:
                raise MergeError(
                    f"{self.folder}: the base has no weight {names[0]} in its files; a head that is tied to the embedding, or "
                    "a layer that the class makes of several tensors, is merged by model.merge_and_unload() once it is loaded"
                )
            self.layers[found] = path
        for own in list(self.shapes):
            names = [own, own.partition(".")[2]]
            found = next((name for name in names if name in there), None)
            if found is None:
                raise MergeError(f"{self.folder}: {own} is stored with the adapter, and the base has no such weight")
            self.names[found], self.shapes[found] = self.names[own], self.shapes.pop(own)

    def merged(self, stored: StoredTensor, changes: dict[str, Change]) -> Tensor | None:
        """What takes the place of a weight of the base, fp32; None where it stays."""
        replaced = self._read(self.names[stored.name]).float() if stored.name in self.shapes else None
        if stored.name not in self.layers:
            return replaced
        try:
            weight = stored.read()
        except ValueError as error:
            raise MergeError(f"{error}: the base is quantised; give base_model (--base-model) in 16 or 32 bits") from None
        path, exact = self.layers[stored.name], weight.float() if replaced is None else replaced
        up, down = (self._read(f"{PREFIX}{path}.lora_{side}.weight").float() for side in "BA")
        update = self.scale * (up @ down)
        update = update.t() if self.described.get("fan_in_fan_out") else update
        if update.shape != exact.shape:
            raise MergeError(
                f"{self.folder}: {path} changes a weight {tuple(update.shape)}, that of the base is {tuple(exact.shape)}; give "
                "the base that the adapter was trained on as base_model (--base-model)"
            )
        total = exact + update
        off, changed = (total.to(weight.dtype).float() - exact - update).norm(), update.norm()
        changes[stored.name] = Change(_ratio(changed, exact.norm()), _ratio(off, total.norm()), _ratio(off, changed))
        return total

    def _read(self, name: str) -> Tensor:
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


def _folder_of(base: str) -> Path:
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
    needed = sum(file.stat().st_size for file in files)
    place = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise MergeError(
            f"output={str(output)!r}: the merged model takes {needed / 2**30:.2f} GiB, the disk has {free / 2**30:.2f}; free "
            "some, or give a folder on another one (--output)"
        )


def _copy_small_files(base: Path, adapter: Path, target: Path) -> None:
    """Whatever is no weight, of the base and then of the adapter, whose tokenizer counts where it has one."""
    for folder, left_out in ((base, {REPORT, MANIFEST}), (adapter, OWN_FILES)):
        for file in sorted(folder.iterdir()):
            weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
            if file.is_file() and not weights and file.name not in left_out:
                shutil.copyfile(file, target / file.name)


def _write_rows(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """The number of tokens, where the adapter has an embedding of its own."""
    rows = {shape[0] for shape in shapes.values()}
    if not rows:
        return
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    text = config["text_config"] if "vocab_size" in config.get("text_config", {}) else config
    text["vocab_size"] = max(rows)
    file.write_text(json.dumps(config, indent=2))
    index = folder / INDEX
    if index.exists():
        total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        described = json.loads(index.read_text())
        index.write_text(json.dumps({**described, "metadata": {"total_size": total}}, indent=2))
