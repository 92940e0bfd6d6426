"""What a name stands for: a model, an adapter with its model, a checkpoint, or the folder of a
whole run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chronicals.lora.loading import load_adapter, stored_rows
from chronicals.lora.peft_format import CONFIG_FILE, SEQUENCE_CLASSIFICATION
from chronicals.lora.several import add_adapter, add_weighted_adapter, set_adapter
from chronicals.models import (
    ModelShape,
    attach_score,
    is_reward_model,
    load_config,
    load_model,
    load_scored,
    load_tokenizer,
)
from chronicals.models.base_format import BaseFormat
from chronicals.models.four_bits import Watch
from chronicals.models.gguf_loading import GGUF_FILE
from chronicals.models.gguf_reader import gguf_of
from chronicals.models.loading import load_base, without_field

DEFAULT = "default"
SUM = "sum"
"""PEFT's name of an adapter that was given none, and the name of the sum of several."""

GENERATION = "generation_config.json"

OF_A_BASE = "give base_model (--base-model)"
"""What to do where the model of an adapter is not known."""


@dataclass(frozen=True)
class SavedModel:
    """A model where it is stored; nothing of it is loaded yet.

    Attributes:
        place: folder of its weights, or of its adapter's, a GGUF file, or a hub name.
        adapted: whether that is an adapter's, which is loaded with its model.
        base: the adapter's model, a folder or hub name, where it is known.
        about: what chronicals wrote beside it; empty where it comes from elsewhere.
        remedy: what errors say to do where the model of an adapter is not known.
        beside: folder of the tokenizer and of what chronicals wrote, where that is another one.
        others: folders of further adapters of PEFT that the model computes with.
    """

    place: Path | str
    adapted: bool = False
    base: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = OF_A_BASE
    beside: Path | None = None
    others: tuple[Path, ...] = ()

    @classmethod
    def find(
        cls, name: str | Path, base_model: str | None = None, remedy: str = OF_A_BASE
    ) -> SavedModel:
        """What is at a folder or hub name; in the folder of a run its ``model``, else the newest
        checkpoint's.

        Args:
            base_model: the model of an adapter, where the adapter does not say.
            remedy: of the attributes, where there is no such argument to give.

        Raises:
            ValueError: ``base_model`` is given for what is no adapter, or a file is no JSON.
        """
        beside = _weights_of(Path(name))
        file = beside / "chronicals.json"
        about = _read(file) if file.exists() else {}
        folder, *others = _adapters_in(beside, about)
        adapted = (folder / CONFIG_FILE).exists()
        if base_model is not None and not adapted:
            raise ValueError(
                f"base_model={base_model!r}: {name} is no adapter's folder, which alone needs it; "
                "leave it out"
            )
        base = (
            base_model or _read(folder / CONFIG_FILE).get("base_model_name_or_path")
            if adapted
            else None
        )
        elsewhere = beside if beside != folder else None
        return cls(
            folder if folder.is_dir() else name,
            adapted,
            base,
            about,
            remedy,
            elsewhere,
            tuple(others),
        )

    def model(
        self,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        watch: Watch | None = None,
    ) -> Any:
        """It, in host memory, with our adapters where it has any, over the base that they were
        trained on.

        Args:
            quantization: of the base, as ``load_model`` takes it; an adapter that was trained over
                4 bits has those very ones for None and ``nf4``.
            watch: as there, of a base without adapters.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        if self.adapted:
            return self._with_adapters(self.base_model(dtype, trust_remote_code, quantization))
        there = (
            isinstance(self.place, str)
            or (self.place / "config.json").exists()
            or gguf_of(self.place) is not None
        )
        if not there:
            raise ValueError(
                f"{self.place}: holds neither a model, an adapter, nor a run of chronicals"
            )
        return load_model(self.place, dtype, trust_remote_code, quantization, watch)

    def _with_adapters(self, base: Any) -> Any:
        """The base with all adapters that it computes with, and the generation settings that are
        stored beside them.
        """
        from transformers import GenerationConfig

        if not self.others:
            model = load_adapter(base, self.place)
        else:
            names = [str(folder) for folder in (Path(self.place), *self.others)]
            for folder in names:
                add_adapter(base, folder, folder)
            add_weighted_adapter(base, names, [1.0] * len(names), SUM)
            model = set_adapter(base, SUM)
        if (self._beside / GENERATION).exists():
            model.generation_config = GenerationConfig.from_pretrained(self._beside)
        return model

    @property
    def _beside(self) -> Path:
        """The folder of the tokenizer and of what chronicals wrote."""
        return Path(self.place) if self.beside is None else self.beside

    def is_scored(self, trust_remote_code: bool = False) -> bool:
        """Whether it is a reward model, or the adapter of one.

        Raises:
            ValueError: its configuration cannot be loaded, with what to do.
        """
        if self.adapted:
            return bool(
                _read(Path(self.place) / CONFIG_FILE).get("task_type") == SEQUENCE_CLASSIFICATION
            )
        return is_reward_model(self.config(trust_remote_code))

    def scored_model(
        self, dtype: torch.dtype, trust_remote_code: bool = False, quantization: str | None = None
    ) -> Any:
        """As ``model``, of a reward model: a language model with a score, to be scored with or
        trained further.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        if not self.adapted:
            return load_scored(self.place, dtype, trust_remote_code)
        base = self.base_model(dtype, trust_remote_code, quantization)
        padded = self.tokenizer(trust_remote_code).pad_token_id
        attach_score(base, padded or 0)
        return load_adapter(base, self.place)

    def base_model(
        self, dtype: torch.dtype, trust_remote_code: bool = False, quantization: str | None = None
    ) -> Any:
        """The model of an adapter without it; one that was quantised is so again, of the weights as
        they were then.

        Args:
            quantization: as for ``model``.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        form = BaseFormat.read(self.about.get("base"))
        if form is None or quantization not in (None, "nf4"):
            return self._checked(self._of_base(load_model, dtype, trust_remote_code, quantization))
        return self._checked(self._of_base(load_base, dtype, trust_remote_code, form))

    def _checked(self, base: Any) -> Any:
        """``base``; raises ValueError where the adapter was trained over other bits of a GGUF
        file.
        """
        expected = self.about.get("gguf")
        found = getattr(base, GGUF_FILE, None)
        if expected is not None and found is not None and found["sha256"] != expected["sha256"]:
            to_do = (
                "give that file (--base-model)"
                if self.remedy == OF_A_BASE
                else f"it must be that file: {self.remedy}"
            )
            raise ValueError(
                f"{self.place}: was trained over {expected['file']} with SHA-256 "
                f"{expected['sha256'][:16]}…, {self.base} has "
                f"{found['sha256'][:16]}…; {to_do}"
            )
        return base

    def config(self, trust_remote_code: bool = False) -> Any:
        """Of transformers.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        return self._of_base(load_config, trust_remote_code)

    def identity(self) -> list[Any]:
        """Plain JSON that is the same while its files, or those of the hub's commit, are.

        Raises:
            OSError: there is no such model.
        """
        if (alone := gguf_of(self.place)) is not None:
            files = [alone]
        elif isinstance(self.place, str):
            return [self.place, _commit_of(self.place)]
        else:
            files = [
                file
                for file in sorted(self.place.iterdir())
                if file.suffix in (".json", ".safetensors", ".bin", ".py")
            ]
        own = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return [
            str(Path(self.place).resolve()),
            own,
            SavedModel.find(self.base).identity() if self.base else None,
        ]

    def embedding_rows(self, trust_remote_code: bool = False) -> int:
        """Of the embedding that is stored with the adapter, or else of the model.

        Raises:
            ValueError: the configuration cannot be loaded, with what to do.
        """
        stored = stored_rows(Path(self.place)) if self.adapted else None
        return stored or ModelShape.of(self.config(trust_remote_code)).vocabulary

    def has_tokenizer(self) -> bool:
        """Whether there is one with it, or with its model; of a hub's this is taken for granted."""
        if self.base is not None and not any(self._beside.glob("tokenizer*")):
            return SavedModel.find(self.base).has_tokenizer()
        files = ("tokenizer*", "vocab.*", "*.model", "merges.txt")
        there = isinstance(self.place, str) or any(any(self._beside.glob(name)) for name in files)
        return there or gguf_of(self.place) is not None

    def tokenizer(self, trust_remote_code: bool = False) -> Any:
        """Its own, or its model's: PEFT writes none beside an adapter.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        own = not self.adapted or any(self._beside.glob("tokenizer*"))
        place = self.place if self.beside is None else self.beside
        return (
            load_tokenizer(place, trust_remote_code)
            if own
            else self._of_base(load_tokenizer, trust_remote_code)
        )

    def _of_base(self, load: Callable[..., Any], *options: Any) -> Any:
        """What ``load`` finds where the whole model is."""
        if not self.adapted:
            return load(self.place, *options)
        if not self.base:
            raise ValueError(
                f"{self.place}: an adapter that does not say which model it belongs to; "
                f"{self.remedy}"
            )
        try:
            return load(self.base, *options)
        except ValueError as error:
            named = "that is what the adapter names as its model; if it is elsewhere now"
            raise ValueError(
                f"{self.place}: its base {self.base}: {without_field(error)}; {named}, "
                f"{self.remedy}"
            ) from error


def _commit_of(name: str) -> str | None:
    """Of the hub's repository, as it is read now; no code of it runs."""
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash

    return extract_commit_hash(cached_file(name, "config.json"), None)


def _weights_of(folder: Path) -> Path:
    """The folder itself, ``model`` in it, or in its newest checkpoint: the first that holds
    weights, or adapters in folders of their names, else the first."""
    checkpoints = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    places = [folder, folder / "model", *(checkpoint / "model" for checkpoint in checkpoints)]
    return next((place for place in places if _holds_weights(place)), folder)


def _holds_weights(folder: Path) -> bool:
    named = (folder / "chronicals.json").exists() and any(folder.glob(f"*/{CONFIG_FILE}"))
    return named or (folder / "config.json").exists() or (folder / CONFIG_FILE).exists()


def _adapters_in(folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """The folders of the adapters that a model computes with: PEFT writes those that are not
    ``default`` to folders of their names. Without adapters, the folder itself."""
    if active := about.get("active_adapters"):
        own = {name for name in active if (folder / name / CONFIG_FILE).exists()}
        return [folder / name if name in own else folder for name in active]
    named = sorted(file.parent for file in folder.glob(f"*/{CONFIG_FILE}")) if about else []
    alone = len(named) == 1 and not (folder / CONFIG_FILE).exists()
    return named if alone else [folder]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file}: is no JSON ({error}); it was cut or changed, save the model again"
        ) from error
