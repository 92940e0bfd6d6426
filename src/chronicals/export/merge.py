"""Merging an adapter into the files of its base: ``W + s · B A``, summed in fp32 and rounded once
to the file's dtype.

The base is never loaded as a model: its files are read and written a tensor at a time, so a model
of any size takes the memory of its largest weight. What the sum loses by rounding is measured for
each weight and reported.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
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
from chronicals.export.packed_tensors import unpacked
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
"""Of a weight's norm: an adapter that changes a weight by more has diverged, or belongs to
another base.
"""

MOST_LOST = 0.9
"""Of an adapter's change: where rounding takes more of it from every weight, the merged model is
the base again.
"""

ROUNDED = 1e-6
"""Of a weight's norm: what rounding changes of it where a magnitude is the norm that its row has
already.
"""

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
        change: of what the adapter adds, ``s B A`` without DoRA, to that of the weight that it was
            trained over: of a weight that was quantised then, of the values that its codes stand
            for.
        error: of what rounding changed, to that of the exact sum.
        lost: of what rounding changed, to that of what the adapter adds.
        from_files: of what is written less what the base's file holds, to that of what the file
            holds.
        lost_in: what would be lost by rounding to a type of 16 bits, by its name in safetensors.
    """

    change: float
    error: float
    lost: float
    from_files: float
    lost_in: Mapping[str, float]

    @classmethod
    def of(
        cls,
        weight: Tensor,
        added: Tensor,
        total: Tensor,
        dtype: torch.dtype,
        norms: tuple[Tensor, Tensor],
        from_files: float,
    ) -> Change:
        """Return the ratios of a sum of a weight and what an adapter adds, all of them fp32.

        Args:
            dtype: that the sum is written in.
            norms: of the whole weight and of the whole sum, of which the others may be some rows.
            from_files: as the attribute says.
        """

        def rounded_off(dtype: torch.dtype) -> Tensor:
            return (total.to(dtype).float() - weight - added).norm()

        off = rounded_off(dtype)
        change = added.norm()
        lost_in = {
            name: _ratio(rounded_off(DTYPES_OF_FILES[name]), change) for name in ("BF16", "F16")
        }
        return cls(
            _ratio(change, norms[0]),
            _ratio(off, norms[1]),
            _ratio(off, change),
            from_files,
            lost_in,
        )


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
    if saved.is_scored():
        raise MergeError(of_a_reward_model(saved))
    if output.exists():
        raise MergeError(f"output={str(output)!r}: exists; give a folder that does not (--output)")
    with base_folder(saved, output) as base:
        return Sums(saved, base).write(output)


@contextmanager
def summed(saved: SavedModel, output: Path) -> Iterator[tuple[Sums, Merged]]:
    """An adapter in the weights of its base, each sum in fp32: written to ``output``, and as it is
    read from the two apart.

    Raises:
        MergeError: as ``merge``.
    """
    with base_folder(saved, output) as base:
        sums = Sums(saved, base, exact=True)
        yield sums, sums.write(output)


@contextmanager
def base_folder(saved: SavedModel, place: Path) -> Iterator[Path]:
    """The files of an adapter's base; those of a GGUF file are made beside ``place``, and are gone
    afterwards.

    Raises:
        MergeError: there is no such model, or it computes with several adapters.
    """
    if saved.others:
        raise MergeError(
            f"{saved.beside or saved.place}: the model computes with the sum of "
            f"{1 + len(saved.others)} adapters of PEFT; load "
            "it (chronicals.saving.SavedModel.find(…).model), call model.merge_and_unload(), and "
            "save that"
        )
    if not saved.base:
        raise MergeError(
            f"{saved.place}: an adapter that does not name its model; give base_model "
            "(--base-model)"
        )
    if (file := gguf_of(saved.base)) is None:
        yield folder_of(saved.base)
        return
    with dequantised(file, place) as folder:
        yield folder


def of_a_reward_model(saved: SavedModel) -> str:
    """Why it is neither merged nor exported, and what to do."""
    if not saved.adapted:
        return (
            f"{saved.place}: is a reward model, and what export writes are language models; take "
            "the folder as it is, "
            "transformers loads it by AutoModelForSequenceClassification"
        )
    return (
        f"{saved.place}: is the adapter of a reward model, and what merge and export write are "
        "language models; load it by "
        "peft's AutoPeftModelForSequenceClassification with num_labels=1, and call its "
        "merge_and_unload()"
    )


@dataclass(frozen=True)
class SummedTensor(StoredTensor):
    """A weight of a base with its adapter, summed from the two in fp32 whenever it is read; it is
    in no file.

    Attributes:
        total: makes the sum.
    """

    total: Callable[[], Tensor] = field(kw_only=True)

    def read(self) -> Tensor:
        return self.total()


class Sums:
    """The weights of a base with an adapter in them, each summed in fp32 from the files of both.

    Args:
        saved: the adapter.
        base: folder of its model's files.
        exact: sums are written in fp32 as they are, for what rounds them to another dtype; not in
            that of the base's files.

    Raises:
        MergeError: the adapter does not fit the base.
    """

    def __init__(self, saved: SavedModel, base: Path, exact: bool = False):
        self.saved = saved
        self.base = base
        self.exact = exact
        self.is_of_gguf = gguf_of(str(saved.base)) is not None
        self.adapter = _Adapter(
            Path(saved.place), BaseFormat.read(saved.about.get("base")), self.dtype_of
        )
        self.files = unpacked({file: list(tensors_in(file)) for file in files_of(base)})
        self.adapter.place_in(
            [stored for tensors in self.files.values() for stored in tensors], base
        )
        if self.adapter.quantised is not None:
            self.adapter.place_quantised(load_without_weights(base))

    @property
    def summands(self) -> str:
        """In words, what is added up."""
        file = gguf_of(str(self.saved.base))
        base = str(self.saved.base)
        values = (
            self.adapter.values_of(base)
            if file is None
            else f"the values of {file}, dequantised to fp32,"
        )
        return f"{values} and the adapter {self.saved.place}"

    def tensors(self) -> dict[str, StoredTensor]:
        """By name, every weight: summed when it is read, or that of the base where it stays."""
        found: dict[str, StoredTensor] = {}
        for tensors in self.files.values():
            for stored in tensors:
                found[stored.name] = self._summed(stored) if self._is_made(stored) else stored
        return found

    def _summed(self, stored: StoredTensor) -> SummedTensor:
        shape = tuple(self.adapter.shapes.get(stored.name, stored.shape))

        def total() -> Tensor:
            merged = self.adapter.merged(stored, {})
            return stored.read() if merged is None else merged

        return SummedTensor(
            stored.file, stored.name, "F32", shape, 0, 4 * torch.Size(shape).numel(), total=total
        )

    def _is_made(self, stored: StoredTensor) -> bool:
        """Whether a weight is none of the base's as its files hold it."""
        return stored.is_packed or self.adapter.replaces(stored.name)

    def dtype_of(self, stored: StoredTensor) -> str:
        """The dtype that a weight is written in: that of the base's files, or fp32 for what is
        not copied from them.
        """
        if self.exact:
            return "F32" if self._is_made(stored) else stored.dtype
        return (
            "BF16" if self.is_of_gguf and stored.dtype == "F32" else stored.dtype
        )  # a GGUF file's own are of many types

    @property
    def base_bytes(self) -> int:
        """The size of the base, its weights in 4 bits taken as dense."""
        return sum(stored.bytes for tensors in self.files.values() for stored in tensors)

    def _bytes(self) -> int:
        """The size of all that is written."""
        total = 0
        for tensors in self.files.values():
            for stored in tensors:
                dtype = self.dtype_of(stored)
                shape = self.adapter.shapes.get(stored.name, stored.shape)
                whole = torch.Size(shape).numel()
                total += (
                    whole * DTYPES_OF_FILES[dtype].itemsize
                    if dtype in DTYPES_OF_FILES
                    else stored.bytes
                )
        return total

    def write(self, output: Path) -> Merged:
        """Write the whole model.

        Raises:
            MergeError: the disk is too full, or the adapter changes nothing, or more than is
                plausible.
            CheckpointError: the files cannot be written; nothing stays.
        """
        _check_room(output, self._bytes())
        changes: dict[str, Change] = {}
        adapter = self.adapter

        def fill(aside: Path) -> None:
            _copy_small_files(self.base, self.saved.beside or Path(self.saved.place), aside)
            for file, tensors in self.files.items():
                made = functools.partial(adapter.merged, changes=changes)
                write_file(aside / file.name, tensors, made, adapter.shapes, self.dtype_of)
            _check(changes)
            _write_rows(aside, adapter.shapes)
            if self.is_of_gguf and not self.exact:
                _write_dtype(aside)
            if adapter.base_is_packed:
                _write_dense(aside, self.files)
            if self.exact or self.is_of_gguf or adapter.shapes:
                _write_index(aside)
            weights = {name: asdict(change) for name, change in changes.items()}
            made_of = {
                "adapter": str(self.saved.place),
                "base": self.saved.base,
                "sums_of": self.summands,
            }
            (aside / REPORT).write_text(to_json({**made_of, "weights": weights}, indent=1))

        write_folder(output, fill)
        return Merged(output, str(self.saved.place), str(self.saved.base), changes, self.summands)


class _Adapter:
    """The matrices of an adapter's folder, read when they are needed, by the weights of the base
    that they change.

    Args:
        quantised: how the base was quantised under it; None where it was not.
        dtype_of: the dtype that a weight is written in, as safetensors names it.
    """

    def __init__(
        self, folder: Path, quantised: BaseFormat | None, dtype_of: Callable[[StoredTensor], str]
    ):
        self._dtype_of = dtype_of
        self.folder = folder
        self.described = describe_adapter(folder)
        self.quantised = quantised
        self._read = functools.lru_cache(KEPT)(self._load)
        self.shape = shape_of(self.described, self.described["target_modules"])
        if whole := [name for name in self.shape.modules_to_save or () if not is_of_head(name)]:
            raise MergeError(
                f"{folder}: modules_to_save={whole}: load it, and call its merge_and_unload()"
            )
        if self.shape.takes_from_weights:
            raise MergeError(
                f"{folder}: init_lora_weights={self.shape.init!r}: an adapter over changed "
                "weights; load it with "
                "chronicals.lora.load_adapter and merge_and_unload() that, or save it converted"
            )
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            self.names = {name.removeprefix(PREFIX): name for name in file.keys()}  # noqa: SIM118  # it is no dictionary
            self.shapes = {
                own.replace(".token_adapter.base_layer.", "."): torch.Size(
                    file.get_slice(name).get_shape()
                )
                for own, name in self.names.items()
                if ".lora_" not in own and not own.endswith(FILE_NAME)
            }
        self.names |= {
            own.replace(".token_adapter.base_layer.", "."): name for own, name in self.names.items()
        }
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
                raise MergeError(
                    f"{self.folder}: {own} is stored with the adapter, and the base has no such "
                    "weight"
                )
            self.names[found], self.shapes[found] = self.names[own], self.shapes.pop(own)

    def _place_tokens(self) -> None:
        """Find the weights with rows of trained tokens."""
        asked = self.shape.trainable_token_indices
        absent = []
        for own in [own for own in self.names if own.endswith(FILE_NAME)]:
            path = own.removesuffix(f".{FILE_NAME}")
            named = asked if isinstance(asked, Mapping) else {path: asked or ()}
            ids = next(
                (list(ids) for name, ids in named.items() if f".{path}".endswith(f".{name}")), None
            )
            found = self.there.find(f"{path}.weight")
            if ids is None or found is None:
                absent.append(own)
            else:
                self.tokens[found] = ids, self.names[own]
        if absent and (
            isinstance(asked, Mapping) or not self.tokens
        ):  # PEFT may store a list's again for a tied head
            raise MergeError(
                f"{self.folder}: {absent[0]} fits no trainable_token_indices, or no weight of the "
                "base"
            )

    def replaces(self, name: str) -> bool:
        """Whether a weight of the base becomes another."""
        places: tuple[Container[str], ...] = (self.shapes, self.tokens, self.changed)
        return any(name in place for place in places) or self._is_dequantised(name)

    def _with_tokens(
        self, stored: StoredTensor, whole: Tensor, changes: dict[str, Change]
    ) -> Tensor:
        """An embedding, fp32, with the rows of the trained tokens."""
        ids, name = self.tokens[stored.name]
        rows = self._read(name).float()
        if rows.shape != (len(ids), whole.shape[1]) or max(ids) >= len(whole):
            raise MergeError(
                f"{self.folder}: has rows {tuple(rows.shape)} for {stored.name} "
                f"{tuple(whole.shape)}; give the base that the "
                "adapter was trained on as base_model (--base-model)"
            )
        total = whole.index_copy(0, torch.tensor(ids), rows)
        dtype = self._written(stored)
        moved = _ratio((total.to(dtype).float() - whole).norm(), whole.norm())
        norms = whole.norm(), total.norm()
        changes[stored.name] = Change.of(whole[ids], rows - whole[ids], rows, dtype, norms, moved)
        return total

    def place_quantised(self, model: Any) -> None:
        """Find the weights that were in 4 bits under the adapter and are not in the files, those
        without adapters too.

        Args:
            model: the base, on the meta device.

        Raises:
            MergeError: one is not there, or was quantised otherwise than to 4 bits.
        """
        assert self.quantised is not None
        if self.base_is_packed:
            return
        if self.quantised.by_transformers is not None:
            raise MergeError(
                f"{self.folder}: the adapter was trained over {self.quantised}, whose values are "
                "not in the base's files; "
                "load the adapter, call merge_and_unload() there, and save that"
            )
        try:
            self.experts = DequantisedExperts.of(model, self.there, self.stored, self.quantised)
        except ValueError as error:
            raise MergeError(f"{self.folder}: {error}") from error
        modules = dict(model.named_modules())
        for path in (
            self.quantised.layers if self.quantised.layers is not None else linear_layers(model)
        ):
            found = self.there.find(f"{path}.weight")
            kind = self.quantised.kind_of(path)
            if found is None or kind is None or path not in modules:
                raise MergeError(
                    f"{self.folder}: the adapter was trained over a base in 4 bits, whose files "
                    f"have no weight {path}.weight: "
                    "it is made of several; load the adapter, call model.merge_and_unload(), and "
                    "save that"
                )
            self.dequantised[found] = kind, type(modules[path]).__name__ == "Conv1D"

    @property
    def base_is_packed(self) -> bool:
        """Whether the base's files hold weights in 4 bits, which are dequantised as they are
        read.
        """
        return any(tensor.is_packed for tensor in self.stored.values())

    def values_of(self, base: str) -> str:
        """In words, what the adapter is added to."""
        if self.base_is_packed:
            return f"the dequantised values of {base}, which is in 4 bits,"
        return (
            base
            if self.quantised is None
            else f"the dequantised {self.quantised.code} values of {base}"
        )

    def _is_dequantised(self, name: str) -> bool:
        """Whether what a weight's codes stood for takes its place."""
        return name in self.dequantised or (self.experts is not None and name in self.experts)

    def _as_trained(self, weight: Tensor, name: str) -> Tensor:
        """A weight of the base as the adapter saw it: what its 4 bits stand for, where it had
        those.
        """
        if self.experts is not None and name in self.experts:
            return self.experts.read(name)
        if name not in self.dequantised:
            return weight
        kind, transposed = self.dequantised[name]
        return kind.values(weight.t()).t() if transposed else kind.values(weight)

    def _written(self, stored: StoredTensor) -> torch.dtype:
        """The dtype to which the sum is rounded when it is written."""
        return DTYPES_OF_FILES.get(self._dtype_of(stored), torch.float32)

    def merged(self, stored: StoredTensor, changes: dict[str, Change]) -> Tensor | None:
        """The weight that takes the place of one of the base, fp32; None where that stays.
        ``changes`` gets what it does.
        """
        replaced = (
            self._read(self.names[stored.name]).float() if stored.name in self.shapes else None
        )
        if stored.name in self.tokens:
            return self._with_tokens(
                stored, stored.read().float() if replaced is None else replaced, changes
            )
        addition = self.changed.get(stored.name)
        if addition is None and not self._is_dequantised(stored.name):
            return replaced
        try:
            weight = stored.read()
        except ValueError as error:
            raise MergeError(
                f"{error}: the base is quantised; give base_model (--base-model) in 16 or 32 bits"
            ) from None
        exact = self._as_trained(weight, stored.name).float() if replaced is None else replaced
        if addition is None:
            changes[stored.name] = self._change(
                stored, weight, exact, torch.zeros_like(exact), exact
            )
            return exact
        update = addition.update()
        if update.shape != exact.shape:
            raise MergeError(
                f"{self.folder}: {addition.path} changes a weight {tuple(update.shape)}, that of "
                "the base is "
                f"{tuple(exact.shape)}; give the base that the adapter was trained on as "
                "base_model (--base-model)"
            )
        total = exact + update
        if self.described.get("use_dora"):
            total = self._with_magnitudes(
                addition.path, total, 0 if self.described.get("fan_in_fan_out") else 1
            )
            update = total - exact
            if (
                update.norm() <= ROUNDED * exact.norm()
            ):  # the norms of an adapter that was not trained
                update = torch.zeros_like(update)
        changes[stored.name] = self._change(stored, weight, exact, update, total)
        return total

    def _change(
        self, stored: StoredTensor, weight: Tensor, exact: Tensor, update: Tensor, total: Tensor
    ) -> Change:
        """Return how a weight of a file is changed.

        Args:
            weight: what the file holds.
            exact: what the adapter was trained over, fp32.
            update: what is added to it.
            total: their sum, which is rounded to the dtype that is written.
        """
        dtype = self._written(stored)
        moved = 0.0
        written = total.to(dtype).float()
        there = weight.float()
        if written.shape == there.shape:  # else the adapter has an embedding of its own
            moved = _ratio((written - there).norm(), there.norm())
        return Change.of(exact, update, total, dtype, (exact.norm(), total.norm()), moved)

    def _with_magnitudes(self, path: str, weight: Tensor, along: int) -> Tensor:
        """DoRA: each row of ``weight``, whose elements are along this dimension, as long as the
        adapter says.
        """
        magnitude = self._read(f"{PREFIX}{path}.lora_magnitude_vector").float()
        norms = torch.linalg.vector_norm(weight, dim=along).clamp_(min=SHORTEST)
        return weight * (magnitude / norms).unsqueeze(along)

    def _load(self, name: str) -> Tensor:
        with safe_open(self.folder / WEIGHTS_FILE, framework="pt") as file:
            return file.get_tensor(name)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if part else 0.0


def check_kept(merged: Merged, dtype: str, remedy: str) -> None:
    """Raises MergeError where rounding to a type of 16 bits takes nearly all that the adapter adds
    from every weight.

    Args:
        dtype: as safetensors names it.
        remedy: ends the message.
    """
    if all(made.lost_in[dtype] >= MOST_LOST for made in merged.changes.values() if made.change):
        spacing = str(DTYPES_OF_FILES[dtype]).removeprefix("torch.")
        raise MergeError(
            "the adapter is lost: nearly all of its changes are less than the spacing of "
            f"{spacing}; nothing was written. "
            f"{remedy}"
        )


def _check(changes: Mapping[str, Change]) -> None:
    """Raises MergeError where merging makes no sense."""
    too_much = [name for name, made in changes.items() if not made.change <= LARGEST_CHANGE]
    if too_much:
        raise MergeError(
            f"{too_much[0]} would be changed by {changes[too_much[0]].change:.3g} times its own "
            f"norm, with {len(too_much) - 1} "
            "more like it: the adapter has diverged or belongs to another base; nothing was written"
        )
    if not any(made.change for made in changes.values()):
        raise MergeError(
            "the adapter changes nothing: all of its B matrices are zero, it was not trained; "
            "nothing was written"
        )
    if all(made.lost >= MOST_LOST for made in changes.values() if made.change):
        raise MergeError(
            "the adapter is lost: nearly all of its changes are less than the spacing of the "
            "base's dtype; nothing was "
            "written. Keep the adapter beside its base, or give a base in float32 as base_model "
            "(--base-model)"
        )


def folder_of(base: str) -> Path:
    """The base's files; those of a hub name are downloaded, unless the cache has them."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                base, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).partition("\n")[0]
        raise MergeError(
            f"{base}: the adapter's model is no folder, nor downloaded ({reason}); give base_model"
        ) from None


def _check_room(output: Path, needed: int) -> None:
    """Raises MergeError where the disk has less than these bytes."""
    place = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise MergeError(
            f"output={str(output)!r}: the merged model takes {needed / 2**30:.2f} GiB, the disk "
            f"has {free / 2**30:.2f}; free "
            "some, or give a folder on another one (--output)"
        )


def _copy_small_files(base: Path, adapter: Path, target: Path) -> None:
    """Whatever is no weight, of the base and then of the adapter, whose tokenizer counts where
    it has one.
    """
    older = (
        {OLD_TEMPLATE} if (adapter / "chat_template.jinja").exists() else set()
    )  # which would hide the trained one
    for folder, left_out in ((base, {REPORT, MANIFEST, *older}), (adapter, OWN_FILES)):
        for file in sorted(folder.iterdir()):
            weights = file.suffix in (
                ".safetensors",
                ".bin",
                ".pt",
                ".pth",
                ".gguf",
                ".h5",
                ".msgpack",
                ".onnx",
            )
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


def _write_dtype(folder: Path) -> None:
    """That the weights of a base in GGUF, dequantised in fp32, are written in bf16."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))


def _write_dense(folder: Path, files: Mapping[Path, list[StoredTensor]]) -> None:
    """That no weight is in 4 bits, where the base's were."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config, indent=2))
    _write_index(
        folder, {stored.name: file.name for file, tensors in files.items() for stored in tensors}
    )


def _write_index(folder: Path, names: Mapping[str, str] | None = None) -> None:
    """The size of all files, and which tensors are in which, where there is an index and that
    has changed.
    """
    index = folder / INDEX
    if index.exists():
        described = json.loads(index.read_text()) | (
            {} if names is None else {"weight_map": dict(names)}
        )
        total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        index.write_text(json.dumps({**described, "metadata": {"total_size": total}}, indent=2))
