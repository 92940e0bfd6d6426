"""An adapter's folder as changes to the tensors of its base's files.

Every changed tensor is computed in fp32 when it is asked for: ``W + s · B A``, with DoRA's
magnitudes, trained tokens and weights that the adapter stores whole. The share of the adapter's
change that rounding takes away is measured for each tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from chronicals.export.additions import AddedProduct, AddedProducts, DequantisedExperts
from chronicals.formats.tensor_names import StoredNames
from chronicals.formats.weight_files import FLOAT_DTYPES, StoredTensor
from chronicals.lora.loading import describe_adapter, described_config
from chronicals.lora.magnitude import SHORTEST
from chronicals.lora.peft_format import ADAPTER_PREFIX, WEIGHTS_FILE
from chronicals.lora.tokens import FILE_NAME
from chronicals.models.base_format import BaseFormat, FourBits
from chronicals.models.four_bits import linear_layers
from chronicals.models.routed_experts import is_of_head

MAGNITUDE_ROUNDING = 1e-6
"""Ratio of a weight's norm: a change below it is rounding alone, of rows whose norm is already the
magnitude that DoRA gives them.
"""

CACHED_MATRICES = 4
"""Matrices that stay in memory: those of a layer's experts change many tensors."""


class MergeError(ValueError):
    """The adapter cannot be merged; nothing was written."""


@dataclass(frozen=True)
class WeightChange:
    """The change of a weight by merging, as ratios of Frobenius norms.

    Attributes:
        change: of what the adapter adds (``s B A`` without DoRA) to the weight that it was trained
            over; for a weight that was quantised then, to the values of its codes.
        error: of the rounding error to the exact sum.
        lost: of the rounding error to what the adapter adds.
        from_files: of the difference between the written weight and the base's file to that in the
            file.
        lost_in: ``lost`` if the sum were rounded to a type of 16 bits, by its name in safetensors.
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
    ) -> WeightChange:
        """Compute the ratios for the sum of a weight and what an adapter adds, all fp32.

        Args:
            weight: that the adapter was trained over.
            added: by the adapter.
            total: the exact sum.
            dtype: that the sum is written in.
            norms: of the whole weight and of the whole sum; the tensors may be some of their rows.
            from_files: the attribute.
        """
        error = (total.to(dtype).float() - weight - added).norm()
        change = added.norm()
        lost_in = {}
        for name in ("BF16", "F16"):
            lost = (total.to(FLOAT_DTYPES[name]).float() - weight - added).norm()
            lost_in[name] = _ratio(lost, change)
        return cls(
            _ratio(change, norms[0]),
            _ratio(error, norms[1]),
            _ratio(error, change),
            from_files,
            lost_in,
        )


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if part else 0.0


class AdapterChanges:
    """The matrices of an adapter's folder, by the tensors of its base's files that they change.

    Args:
        folder: of the adapter.
        quantised: the quantisation of the base that it was trained over; None if there was none.
        dtype_of: returns the dtype that a tensor is written in, in the names of safetensors.

    Attributes:
        tensors: of the base's files, by name.
        shapes: of tensors that the adapter stores whole, by the base's name.
        tokens: ids of trained tokens and the name of their rows, by the embedding's name.
        additions: products that are added, by the name of the tensor.
        dequantised: weights that were in 4 bits under the adapter and are not in the files: how,
            and whether they are transposed (Conv1D).
        experts: stacked experts that were in 4 bits.
        base_is_packed: the base's files hold weights in 4 bits, which are dequantised when read.
        recoded: names of all tensors that are replaced by the values of their 4 bits.
    """

    def __init__(
        self, folder: Path, quantised: BaseFormat | None, dtype_of: Callable[[StoredTensor], str]
    ):
        self._dtype_of = dtype_of
        self.folder = folder
        self.described = describe_adapter(folder)
        self.quantised = quantised
        self._read = functools.lru_cache(CACHED_MATRICES)(self._load)
        self.shape = described_config(self.described, self.described["target_modules"])
        whole = [name for name in self.shape.modules_to_save or () if not is_of_head(name)]
        if whole:
            raise MergeError(
                f"{folder}: modules_to_save={whole}: load it, and call its merge_and_unload()"
            )
        if self.shape.takes_from_weights:
            raise MergeError(
                f"{folder}: init_lora_weights={self.shape.init!r}: an adapter over changed "
                "weights; load it with chronicals.lora.load_adapter and merge_and_unload() that, "
                "or save it converted"
            )
        self._names: dict[str, str] = {}
        self.shapes: dict[str, torch.Size] = {}
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            stored = list(file.keys())
            for name in stored:
                path = name.removeprefix(ADAPTER_PREFIX)
                plain = path.replace(".token_adapter.base_layer.", ".")
                self._names[path] = name
                self._names[plain] = name
                if ".lora_" not in path and not path.endswith(FILE_NAME):
                    self.shapes[plain] = torch.Size(file.get_slice(name).get_shape())
        self.tokens: dict[str, tuple[list[int], str]] = {}
        self.additions: dict[str, AddedProduct] = {}
        self.base_names = StoredNames()
        self.tensors: dict[str, StoredTensor] = {}
        self.dequantised: dict[str, tuple[FourBits, bool]] = {}
        self.experts: DequantisedExperts | None = None
        self.recoded: set[str] = set()
        self.base_is_packed = False

    def place_in(self, tensors: list[StoredTensor], base: Path) -> None:
        """Find the weight of each layer and embedding.

        Args:
            tensors: of the base's files.
            base: their folder; the model's class says which weights are made of several tensors.

        Raises:
            MergeError: one is not there.
        """
        self.base_names = StoredNames(tensor.name for tensor in tensors)
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.base_is_packed = any(tensor.is_packed for tensor in tensors)
        paths = {path.rpartition(".lora_")[0] for path in self._names if ".lora_" in path}
        if not paths:
            raise MergeError(f"{self.folder}: holds no matrices of an adapter")
        products = AddedProducts(self.folder, self.described, self.shape, self._read, self._names)
        try:
            self.additions = products.by_weight(sorted(paths), self.base_names, base)
        except ValueError as error:
            raise MergeError(str(error)) from error
        indices = self.shape.trainable_token_indices
        absent = []
        for row_path in [path for path in self._names if path.endswith(FILE_NAME)]:
            path = row_path.removesuffix(f".{FILE_NAME}")
            named = indices if isinstance(indices, Mapping) else {path: indices or ()}
            fitting = [ids for name, ids in named.items() if f".{path}".endswith(f".{name}")]
            weight = self.base_names.find(f"{path}.weight")
            if not fitting or weight is None:
                absent.append(row_path)
            else:
                self.tokens[weight] = list(fitting[0]), self._names[row_path]
        # With a list of ids, PEFT may store the rows again for a tied head, which has no weight.
        if absent and (isinstance(indices, Mapping) or not self.tokens):
            raise MergeError(
                f"{self.folder}: {absent[0]} fits no trainable_token_indices, or no weight of the "
                "base"
            )
        for path in list(self.shapes):
            name = self.base_names.find(path.replace(".base_layer.", "."))
            if name is None:
                raise MergeError(
                    f"{self.folder}: {path} is stored with the adapter, and the base has no such "
                    "weight"
                )
            self._names[name] = self._names[path]
            self.shapes[name] = self.shapes.pop(path)

    def place_quantised(self, model: Any) -> None:
        """Find the weights that were in 4 bits under the adapter and are not in the files.

        They include those without adapters.

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
                "not in the base's files; load the adapter, call merge_and_unload() there, and "
                "save that"
            )
        try:
            self.experts = DequantisedExperts(model, self.base_names, self.tensors, self.quantised)
        except ValueError as error:
            raise MergeError(f"{self.folder}: {error}") from error
        modules = dict(model.named_modules())
        layers = self.quantised.layers
        for path in linear_layers(model) if layers is None else layers:
            name = self.base_names.find(f"{path}.weight")
            kind = self.quantised.kind_of(path)
            if name is None or kind is None or path not in modules:
                raise MergeError(
                    f"{self.folder}: the adapter was trained over a base in 4 bits, whose files "
                    f"have no weight {path}.weight: it is made of several; load the adapter, call "
                    "model.merge_and_unload(), and save that"
                )
            self.dequantised[name] = kind, type(modules[path]).__name__ == "Conv1D"
        self.recoded = self.dequantised.keys() | self.experts.owners.keys()

    def replaces(self, stored: StoredTensor) -> bool:
        """Return whether the merged model has another tensor than the base's files hold."""
        changed: list[Container[str]] = [self.shapes, self.tokens, self.additions, self.recoded]
        return stored.is_packed or any(stored.name in names for names in changed)

    def merged(self, stored: StoredTensor, changes: dict[str, WeightChange]) -> Tensor | None:
        """Return the tensor that replaces one of the base, fp32; None where that stays.

        Args:
            stored: tensor of the base's files.
            changes: gets the change of the weight by its name.
        """
        replaced = None
        if stored.name in self.shapes:
            replaced = self._read(self._names[stored.name]).float()
        if stored.name in self.tokens:
            embedding = stored.read().float() if replaced is None else replaced
            return self._with_tokens(stored, embedding, changes)
        addition = self.additions.get(stored.name)
        if addition is None and stored.name not in self.recoded:
            return replaced
        try:
            weight = stored.read()
        except ValueError as error:
            raise MergeError(
                f"{error}: the base is quantised; give base_model (--base-model) in 16 or 32 bits"
            ) from None
        # The weight as the adapter saw it: the values of its 4 bits, if it had any.
        if replaced is not None:
            exact = replaced
        elif stored.name in self.dequantised:
            kind, transposed = self.dequantised[stored.name]
            exact = (kind.values(weight.t()).t() if transposed else kind.values(weight)).float()
        elif self.experts is not None and stored.name in self.recoded:
            exact = self.experts.read(stored.name)
        else:
            exact = weight.float()
        if addition is None:
            nothing = torch.zeros_like(exact)
            changes[stored.name] = self._change(stored, weight, exact, nothing, exact)
            return exact
        update = addition.update()
        if update.shape != exact.shape:
            raise MergeError(
                f"{self.folder}: {addition.path} changes a weight {tuple(update.shape)}, that of "
                f"the base is {tuple(exact.shape)}; give the base that the adapter was trained on "
                "as base_model (--base-model)"
            )
        total = exact + update
        if self.described.get("use_dora"):
            # The rows, which lie along this dimension, get DoRA's magnitudes.
            along = 0 if self.described.get("fan_in_fan_out") else 1
            name = f"{ADAPTER_PREFIX}{addition.path}.lora_magnitude_vector"
            norms = torch.linalg.vector_norm(total, dim=along).clamp_(min=SHORTEST)
            total = total * (self._read(name).float() / norms).unsqueeze(along)
            update = total - exact
            if update.norm() <= MAGNITUDE_ROUNDING * exact.norm():
                update = torch.zeros_like(update)
        changes[stored.name] = self._change(stored, weight, exact, update, total)
        return total

    def _with_tokens(
        self, stored: StoredTensor, whole: Tensor, changes: dict[str, WeightChange]
    ) -> Tensor:
        """Return an embedding with the rows of the trained tokens, fp32."""
        ids, name = self.tokens[stored.name]
        rows = self._read(name).float()
        if rows.shape != (len(ids), whole.shape[1]) or max(ids) >= len(whole):
            raise MergeError(
                f"{self.folder}: has rows {tuple(rows.shape)} for {stored.name} "
                f"{tuple(whole.shape)}; give the base that the adapter was trained on as "
                "base_model (--base-model)"
            )
        total = whole.index_copy(0, torch.tensor(ids), rows)
        dtype = FLOAT_DTYPES.get(self._dtype_of(stored), torch.float32)
        from_files = _ratio((total.to(dtype).float() - whole).norm(), whole.norm())
        norms = whole.norm(), total.norm()
        changes[stored.name] = WeightChange.of(
            whole[ids], rows - whole[ids], rows, dtype, norms, from_files
        )
        return total

    def _change(
        self, stored: StoredTensor, weight: Tensor, exact: Tensor, update: Tensor, total: Tensor
    ) -> WeightChange:
        """Return the change of a weight.

        Args:
            stored: tensor of the base's files.
            weight: in the file.
            exact: that the adapter was trained over, fp32.
            update: that is added to it.
            total: their sum, which is rounded to the dtype that is written.
        """
        dtype = FLOAT_DTYPES.get(self._dtype_of(stored), torch.float32)
        from_files = 0.0
        written = total.to(dtype).float()
        original = weight.float()
        if written.shape == original.shape:  # else the adapter has an embedding of its own
            from_files = _ratio((written - original).norm(), original.norm())
        norms = exact.norm(), total.norm()
        return WeightChange.of(exact, update, total, dtype, norms, from_files)

    def _load(self, name: str) -> Tensor:
        with safe_open(self.folder / WEIGHTS_FILE, framework="pt") as file:
            return file.get_tensor(name)
