"""Saved models by name: a model, an adapter with its base, a checkpoint, or the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chronicals.formats.gguf.reader import gguf_of
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
from chronicals.models.loading import load_base, without_field

DEFAULT_ADAPTER = "default"
"""PEFT's name of an adapter that was given none."""

SUM_OF_ADAPTERS = "sum"
"""Name of the sum of several adapters."""

GENERATION_FILE = "generation_config.json"

GIVE_BASE = "give base_model (--base-model)"
"""Remedy in errors about an adapter whose base is not known."""


@dataclass(frozen=True)
class SavedModel:
    """A model that is stored; none of it is loaded yet.

    Attributes:
        place: folder of its weights or of its adapter, a GGUF file, or a hub name.
        adapted: ``place`` is an adapter's folder, which is loaded with its base.
        base: folder or hub name of the adapter's base, if it is known.
        about: content of ``chronicals.json``; empty if other programs wrote the model.
        remedy: remedy in errors about an adapter whose base is not known.
        beside: folder of the tokenizer and of ``chronicals.json``, if it is not ``place``.
        others: folders of further adapters of PEFT that the model computes with.
    """

    place: Path | str
    adapted: bool = False
    base: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = GIVE_BASE
    beside: Path | None = None
    others: tuple[Path, ...] = ()

    @classmethod
    def find(
        cls, name: str | Path, base_model: str | None = None, remedy: str = GIVE_BASE
    ) -> SavedModel:
        """Find the model of a folder or hub name.

        In the folder of a run it is ``model``, or else the newest checkpoint's.

        Args:
            name: of the folder, or on the hub.
            base_model: base of an adapter that does not name it.
            remedy: the attribute, for callers that have no argument ``base_model``.

        Raises:
            ValueError: ``base_model`` is given for a model that is no adapter, or a file is not
                JSON.
        """
        # The folder of weights or adapters: itself, ``model`` in it, or that of the newest checkpoint
        # that has one; itself if none holds any.
        beside = Path(name)
        checkpoints = sorted((beside / "checkpoints").glob("step-*"), reverse=True)
        places = [beside, beside / "model", *(folder / "model" for folder in checkpoints)]
        for place in places:
            has_config = any((place / own).exists() for own in ("config.json", CONFIG_FILE))
            # PEFT writes adapters that are not ``default`` to folders of their names.
            has_named = (place / "chronicals.json").exists() and any(place.glob(f"*/{CONFIG_FILE}"))
            if has_config or has_named:
                beside = place
                break
        file = beside / "chronicals.json"
        about = _read(file) if file.exists() else {}
        # The folders of the adapters that it computes with.
        folders = [beside]
        active = about.get("active_adapters")
        if active:
            named = {name for name in active if (beside / name / CONFIG_FILE).exists()}
            folders = [beside / name if name in named else beside for name in active]
        elif about and not (beside / CONFIG_FILE).exists():
            there = [file.parent for file in beside.glob(f"*/{CONFIG_FILE}")]
            folders = there if len(there) == 1 else folders
        folder, *others = folders
        adapted = (folder / CONFIG_FILE).exists()
        if base_model is not None and not adapted:
            raise ValueError(
                f"base_model={base_model!r}: {name} is no adapter's folder, which alone needs it; "
                "leave it out"
            )
        base = None
        if adapted:
            base = base_model or _read(folder / CONFIG_FILE).get("base_model_name_or_path")
        return cls(
            place=folder if folder.is_dir() else name,
            adapted=adapted,
            base=base,
            about=about,
            remedy=remedy,
            beside=beside if beside != folder else None,
            others=tuple(others),
        )

    def model(
        self,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        watch: Watch | None = None,
    ) -> Any:
        """Load the model into host memory, with its adapters over the base they were trained on.

        Args:
            dtype: of the weights.
            trust_remote_code: run the model's own code.
            quantization: of the base, as in ``load_model``; with None and ``nf4`` an adapter that
                was trained over 4 bits gets the same values again.
            watch: as in ``load_model``, for a model without adapters.

        Raises:
            ValueError: it cannot be loaded; the message says what to do.
        """
        if self.adapted:
            from transformers import GenerationConfig

            base = self.base_model(dtype, trust_remote_code, quantization)
            if not self.others:
                model = load_adapter(base, self.place)
            else:
                names = [str(folder) for folder in (Path(self.place), *self.others)]
                for folder in names:
                    add_adapter(base, folder, folder)
                add_weighted_adapter(base, names, [1.0] * len(names), SUM_OF_ADAPTERS)
                model = set_adapter(base, SUM_OF_ADAPTERS)
            if (self._beside / GENERATION_FILE).exists():
                model.generation_config = GenerationConfig.from_pretrained(self._beside)
            return model
        on_hub = isinstance(self.place, str)
        has_config = on_hub or (Path(self.place) / "config.json").exists()
        if not has_config and gguf_of(self.place) is None:
            raise ValueError(
                f"{self.place}: holds neither a model, an adapter, nor a run of chronicals"
            )
        return load_model(self.place, dtype, trust_remote_code, quantization, watch)

    @property
    def _beside(self) -> Path:
        """The folder of the tokenizer and of ``chronicals.json``."""
        return Path(self.place) if self.beside is None else self.beside

    def is_scored(self, trust_remote_code: bool = False) -> bool:
        """Return whether it is a reward model, or the adapter of one.

        Raises:
            ValueError: its configuration cannot be loaded; the message says what to do.
        """
        if self.adapted:
            return bool(
                _read(Path(self.place) / CONFIG_FILE).get("task_type") == SEQUENCE_CLASSIFICATION
            )
        return is_reward_model(self.config(trust_remote_code))

    def scored_model(
        self, dtype: torch.dtype, trust_remote_code: bool = False, quantization: str | None = None
    ) -> Any:
        """Load a reward model as ``model`` loads others: a language model with a score.

        Raises:
            ValueError: it cannot be loaded; the message says what to do.
        """
        if not self.adapted:
            return load_scored(self.place, dtype, trust_remote_code)
        base = self.base_model(dtype, trust_remote_code, quantization)
        padding = self.tokenizer(trust_remote_code).pad_token_id
        attach_score(base, padding or 0)
        return load_adapter(base, self.place)

    def base_model(
        self, dtype: torch.dtype, trust_remote_code: bool = False, quantization: str | None = None
    ) -> Any:
        """Load the base of an adapter, quantised as it was when the adapter was trained.

        Args:
            dtype: of the weights.
            trust_remote_code: run the model's own code.
            quantization: see ``model``.

        Raises:
            ValueError: it cannot be loaded, or the adapter was trained over another GGUF file; the
                message says what to do.
        """
        form = BaseFormat.read(self.about.get("base"))
        if form is None or quantization not in (None, "nf4"):
            base = self._of_base(load_model, dtype, trust_remote_code, quantization)
        else:
            base = self._of_base(load_base, dtype, trust_remote_code, form)
        expected = self.about.get("gguf")
        loaded = getattr(base, GGUF_FILE, None)
        if expected is not None and loaded is not None and loaded["sha256"] != expected["sha256"]:
            remedy = "give that file (--base-model)"
            if self.remedy != GIVE_BASE:
                remedy = f"it must be that file: {self.remedy}"
            raise ValueError(
                f"{self.place}: was trained over {expected['file']} with SHA-256 "
                f"{expected['sha256'][:16]}…, {self.base} has {loaded['sha256'][:16]}…; {remedy}"
            )
        return base

    def config(self, trust_remote_code: bool = False) -> Any:
        """Load the configuration (transformers') of the whole model.

        Raises:
            ValueError: it cannot be loaded; the message says what to do.
        """
        return self._of_base(load_config, trust_remote_code)

    def identity(self) -> list[Any]:
        """Return plain JSON that stays the same while its files, or the hub's commit, do.

        Raises:
            OSError: there is no such model.
        """
        gguf_file = gguf_of(self.place)
        if gguf_file is not None:
            files = [gguf_file]
        elif isinstance(self.place, str):
            from transformers.utils import cached_file
            from transformers.utils.hub import extract_commit_hash

            # The commit that is read now; no code of it runs.
            return [self.place, extract_commit_hash(cached_file(self.place, "config.json"), None)]
        else:
            suffixes = (".json", ".safetensors", ".bin", ".py")
            files = [file for file in sorted(self.place.iterdir()) if file.suffix in suffixes]
        states = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        base = SavedModel.find(self.base).identity() if self.base else None
        return [str(Path(self.place).resolve()), states, base]

    def embedding_rows(self, trust_remote_code: bool = False) -> int:
        """Return the rows of the embedding that is stored with the adapter, or of the model's.

        Raises:
            ValueError: the configuration cannot be loaded; the message says what to do.
        """
        stored = stored_rows(Path(self.place)) if self.adapted else None
        return stored or ModelShape.of(self.config(trust_remote_code)).vocabulary

    def has_tokenizer(self) -> bool:
        """Return whether a tokenizer is stored with it or its base; True for names on the hub."""
        if self.base is not None and not any(self._beside.glob("tokenizer*")):
            return SavedModel.find(self.base).has_tokenizer()
        files = ("tokenizer*", "vocab.*", "*.model", "merges.txt")
        if isinstance(self.place, str):
            return True
        stored = any(any(self._beside.glob(name)) for name in files)
        return stored or gguf_of(self.place) is not None

    def tokenizer(self, trust_remote_code: bool = False) -> Any:
        """Load its tokenizer, or its base's, since PEFT writes none beside an adapter.

        Raises:
            ValueError: it cannot be loaded; the message says what to do.
        """
        if self.adapted and not any(self._beside.glob("tokenizer*")):
            return self._of_base(load_tokenizer, trust_remote_code)
        place = self.place if self.beside is None else self.beside
        return load_tokenizer(place, trust_remote_code)

    def _of_base(self, load: Callable[..., Any], *options: Any) -> Any:
        """Call ``load`` with the name of the whole model: the base of an adapter, or itself."""
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
            raise ValueError(
                f"{self.place}: its base {self.base}: {without_field(error)}; that is what the "
                f"adapter names as its model; if it is elsewhere now, {self.remedy}"
            ) from error


def _read(file: Path) -> Any:
    """Read JSON; raises ValueError if it is none."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file}: is no JSON ({error}); it was cut or changed, save the model again"
        ) from error
