"""What a name stands for: a model, an adapter with its model, a checkpoint, or the folder of a whole run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chronicals.lora.loading import load_adapter, stored_rows
from chronicals.lora.peft_format import CONFIG_FILE, OF_A_SCORE
from chronicals.models import (
    ModelShape,
    attach_score,
    is_reward_model,
    load_config,
    load_model,
    load_scored,
    load_tokenizer,
)
from chronicals.models.four_bits import Watch
from chronicals.models.gguf_loading import GGUF_FILE
from chronicals.models.gguf_reader import gguf_of
from chronicals.models.loading import DTYPES, without_field

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
    """

    place: Path | str
    adapted: bool = False
    base: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = OF_A_BASE

    @classmethod
    def find(cls, name: str | Path, base_model: str | None = None, remedy: str = OF_A_BASE) -> SavedModel:
        """What is at a folder or hub name; in the folder of a run its ``model``, else the newest checkpoint's.

        Args:
            base_model: the model of an adapter, where the adapter does not say.
            remedy: of the attributes, where there is no such argument to give.

        Raises:
            ValueError: ``base_model`` is given for what is no adapter, or a file is no JSON.
        """
        folder = _weights_of(Path(name))
        adapted = (folder / CONFIG_FILE).exists()
        if base_model is not None and not adapted:
            raise ValueError(f"base_model={base_model!r}: {name} is no adapter's folder, which alone needs it; leave it out")
        file = folder / "chronicals.json"
        about = _read(file) if file.exists() else {}
        base = base_model or _read(folder / CONFIG_FILE).get("base_model_name_or_path") if adapted else None
        return cls(folder if folder.is_dir() else name, adapted, base, about, remedy)

    def model(
        self, dtype: torch.dtype, trust_remote_code: bool = False, quantization: str | None = None, watch: Watch | None = None
    ) -> Any:  # fmt: skip
        """It, in host memory, with our adapters where it has any, over the base that they were trained on.

        Args:
            quantization: of the base, as ``load_model`` takes it; by default that which the adapter was trained on.
            watch: as there, of a base without adapters.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        if self.adapted:
            return load_adapter(self._base(dtype, trust_remote_code, quantization), self.place)
        there = isinstance(self.place, str) or (self.place / "config.json").exists() or gguf_of(self.place) is not None
        if not there:
            raise ValueError(f"{self.place}: holds neither a model, an adapter, nor a run of chronicals")
        return load_model(self.place, dtype, trust_remote_code, quantization, watch)

    def is_scored(self, trust_remote_code: bool = False) -> bool:
        """Whether it is a reward model, or the adapter of one.

        Raises:
            ValueError: its configuration cannot be loaded, with what to do.
        """
        if self.adapted:
            return bool(_read(Path(self.place) / CONFIG_FILE).get("task_type") == OF_A_SCORE)
        return is_reward_model(self.config(trust_remote_code))

    def scored_model(self, dtype: torch.dtype, trust_remote_code: bool = False, quantization: str | None = None) -> Any:
        """As ``model``, of a reward model: a language model with a score, to be scored with or trained further.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        if not self.adapted:
            return load_scored(self.place, dtype, trust_remote_code)
        base = self._base(dtype, trust_remote_code, quantization)
        padded = self.tokenizer(trust_remote_code).pad_token_id
        attach_score(base, padded or 0)
        return load_adapter(base, self.place)

    def _base(self, dtype: torch.dtype, trust_remote_code: bool, quantization: str | None) -> Any:
        """A base that was quantised is so again, of the weights as they were then."""
        trained_on = self.about.get("base")
        if quantization is not None or trained_on is None:
            return self._checked(self._of_base(load_model, dtype, trust_remote_code, quantization))
        then = DTYPES[trained_on["mixed_precision"]]
        return self._of_base(load_model, then, trust_remote_code, trained_on["quantization"]).to(dtype)

    def _checked(self, base: Any) -> Any:
        """``base``; raises ValueError where the adapter was trained over other bits of a GGUF file."""
        expected, found = self.about.get("gguf"), getattr(base, GGUF_FILE, None)
        if expected is not None and found is not None and found["sha256"] != expected["sha256"]:
            to_do = "give that file (--base-model)" if self.remedy == OF_A_BASE else f"it must be that file: {self.remedy}"
            raise ValueError(
                f"{self.place}: was trained over {expected['file']} with SHA-256 {expected['sha256'][:16]}…, {self.base} has "
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
            files = [file for file in sorted(self.place.iterdir()) if file.suffix in (".json", ".safetensors", ".bin", ".py")]
        own = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return [str(Path(self.place).resolve()), own, SavedModel.find(self.base).identity() if self.base else None]

    def embedding_rows(self, trust_remote_code: bool = False) -> int:
        """Of the embedding that is stored with the adapter, or else of the model.

        Raises:
            ValueError: the configuration cannot be loaded, with what to do.
        """
        stored = stored_rows(Path(self.place)) if self.adapted else None
        return stored or ModelShape.of(self.config(trust_remote_code)).vocabulary

    def has_tokenizer(self) -> bool:
        """Whether there is one with it, or with its model; of a hub's this is taken for granted."""
        if self.base is not None and not any(Path(self.place).glob("tokenizer*")):
            return SavedModel.find(self.base).has_tokenizer()
        files = ("tokenizer*", "vocab.*", "*.model", "merges.txt")
        there = isinstance(self.place, str) or any(any(Path(self.place).glob(name)) for name in files)
        return there or gguf_of(self.place) is not None

    def tokenizer(self, trust_remote_code: bool = False) -> Any:
        """Its own, or its model's: PEFT writes none beside an adapter.

        Raises:
            ValueError: it cannot be loaded, with what to do.
        """
        own = not self.adapted or any(Path(self.place).glob("tokenizer*"))
        return load_tokenizer(self.place, trust_remote_code) if own else self._of_base(load_tokenizer, trust_remote_code)

    def _of_base(self, load: Callable[..., Any], *options: Any) -> Any:
        """What ``load`` finds where the whole model is."""
        if not self.adapted:
            return load(self.place, *options)
        if not self.base:
            raise ValueError(f"{self.place}: an adapter that does not say which model it belongs to; {self.remedy}")
        try:
            return load(self.base, *options)
        except ValueError as error:
            named = "that is what the adapter names as its model; if it is elsewhere now"
            raise ValueError(f"{self.place}: its base {self.base}: {without_field(error)}; {named}, {self.remedy}") from error


def _commit_of(name: str) -> str | None:
    """Of the hub's repository, as it is read now; no code of it runs."""
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash

    return extract_commit_hash(cached_file(name, "config.json"), None)


def _weights_of(folder: Path) -> Path:
    """The folder itself, ``model`` in it, or in its newest checkpoint: the first that holds weights, else the first."""
    checkpoints = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    places = [folder, folder / "model", *(checkpoint / "model" for checkpoint in checkpoints)]
    return next((place for place in places if (place / "config.json").exists() or (place / CONFIG_FILE).exists()), folder)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: is no JSON ({error}); it was cut or changed, save the model again") from error
