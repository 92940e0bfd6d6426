"""What is exported: a whole model in files as transformers writes them, whatever was given."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from chronicals.config import Recipe
from chronicals.data import Tokenizer, open_store, stop_token_ids
from chronicals.data.kinds.rows import CHATS
from chronicals.export.gguf_base import dequantised
from chronicals.export.merge import Merged, Sums, base_folder, check_kept, folder_of, summed
from chronicals.export.part_names import language_name, reads_images
from chronicals.export.proof import Proof, largest_error
from chronicals.export.weight_files import StoredTensor, files_of, tensors_in
from chronicals.models import load_config, load_model
from chronicals.models.base_format import BaseFormat, without_adapters
from chronicals.models.gguf_reader import gguf_of
from chronicals.quantization import packed_modules
from chronicals.saving import SavedModel
from chronicals.training.evaluation import evaluate_data
from chronicals.training.reference_record import with_reference

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b  # 12345 + 67 = 12412\n",
    "Naïve café, façade; £3.50 — «déjà vu» 漢字 🙂 it's we're I'LL",
    "  two  blanks,\ttabs,\n\nlines and 3.14159e-10",
)
"""Texts on which a client must give the tokenizer's ids."""

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
]


@dataclass(frozen=True)
class Source:
    """A model that is exported.

    Attributes:
        saved: what was given.
        folder: the whole model; where an adapter was given, with it in the base's weights, each sum
            in fp32.
        sums: these sums once more, from the files of base and adapter, where an adapter was given.
        merged: what the adapter changed.
        data: rows that show how much of the training survives, as ``chronicals evaluate`` takes
            them.
        importance: rows by which llama.cpp weighs the error of quantising.
        vllm_python: interpreter of an environment with vLLM.
    """

    saved: SavedModel
    folder: Path
    sums: Sums | None = None
    merged: Merged | None = None
    data: str | None = None
    importance: str | None = None
    vllm_python: str | None = None

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Where every weight is stored, by name."""
        return {
            stored.name: stored for file in files_of(self.folder) for stored in tensors_in(file)
        }

    @cached_property
    def config(self) -> Any:
        return load_config(self.folder)

    @cached_property
    def text_config(self) -> Any:
        """Of the language part; of a model of text, the whole."""
        if not reads_images(self.config):
            return self.config
        text = copy.deepcopy(self.config.get_text_config())
        text.tie_word_embeddings = self.config.tie_word_embeddings
        text.quantization_config = getattr(self.config, "quantization_config", None)
        return text

    @cached_property
    def language(self) -> dict[str, StoredTensor]:
        """The tensors of the language part by the names that they have in a model of text; of
        such a model, all.
        """
        if not reads_images(self.config):
            return self.tensors
        return _of_language(self.tensors)

    @cached_property
    def trained_tensors(self) -> dict[str, StoredTensor]:
        """Every weight as it was trained, by name, read from base and adapter apart, not from
        our files of sums.
        """
        return self.tensors if self.sums is None else self.sums.tensors()

    @cached_property
    def trained_language(self) -> dict[str, StoredTensor]:
        """The same of the language part, named as ``language``."""
        return (
            _of_language(self.trained_tensors)
            if reads_images(self.config)
            else self.trained_tensors
        )

    @property
    def beside_language(self) -> list[StoredTensor]:
        """The tensors that are not of the language part."""
        ours = {stored.name for stored in self.language.values()}
        return [stored for name, stored in self.tensors.items() if name not in ours]

    @property
    def run(self) -> Path | None:
        """The folder of the run that the model is of, where it has one."""
        folder = Path(self.saved.place)
        return next(
            (above for above in list(folder.parents)[:3] if (above / "metrics.jsonl").exists()),
            None,
        )

    @cached_property
    def licence(self) -> str | None:
        """As the base's card names it."""
        card = self.folder / "README.md"
        said = (
            re.search(r"^license:\s*(\S+)\s*$", card.read_text(), re.MULTILINE)
            if card.exists()
            else None
        )
        return said[1] if said else None

    @cached_property
    def tokenizer(self) -> Any:
        return self.saved.tokenizer()

    @cached_property
    def stops(self) -> list[int]:
        """Ids at which generation ends: those that were trained, and those that the model's
        settings name.
        """
        chats = any(kind in CHATS for kind in self.saved.about.get("kinds", ["chat"]))
        found = stop_token_ids(self.tokenizer, chats and self.tokenizer.chat_template is not None)
        file = self.folder / "generation_config.json"
        named = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        named = [] if named is None else [named] if isinstance(named, int) else named
        return [
            *found,
            *(stop for stop in named if stop not in found and stop < self.text_config.vocab_size),
        ]

    @cached_property
    def conversation(self) -> str | None:
        """A conversation as the template renders it, up to where the model answers; None without
        a template.
        """
        if self.tokenizer.chat_template is None:
            return None
        return str(
            self.tokenizer.apply_chat_template(
                CONVERSATION, tokenize=False, add_generation_prompt=True
            )
        )

    @cached_property
    def documents(self) -> list[list[int]]:
        """Token ids of the texts that a client is compared on."""
        return documents_of(self.tokenizer)

    def trained(self) -> Any:
        """The model as it was trained, base and adapter apart, in fp32 or as large models are on
        a card.
        """
        model = self.saved.model(self.dtype)
        form = BaseFormat.read(self.saved.about.get("base"))
        in_files = (
            self.sums is not None and self.sums.adapter.base_is_packed
        )  # whose values are summed as exact as they are
        if form is not None and not in_files:
            dequantise_as_multiplied(model, form)
        return on_device(model)

    @cached_property
    def trained_logits(self) -> list[torch.Tensor]:
        """Of ``documents``, by ``trained``."""
        return logits_of(self.trained(), self.documents)

    def prove_merged(self, proof: Proof) -> None:
        """Adds whether the sums of base and adapter, which artefacts are made of, are the
        trained model.
        """
        if self.saved.adapted:
            bound = self.at_least(MERGED)
            proof.bounded(
                "merged weights beside the trained model",
                "transformers",
                self._error_of_sums,
                bound,
            )

    @cached_property
    def _error_of_sums(self) -> float:
        return largest_error(logits_of(self.load(self.folder), self.documents), self.trained_logits)

    def check_kept(self, dtype: str) -> None:
        """Raises MergeError where rounding to a type of 16 bits, or to fewer, would make the
        adapted model its base again.
        """
        if self.merged is not None:
            check_kept(
                self.merged,
                dtype,
                "Export it in fp32 (--to merged-fp32), or by itself (--to adapter)",
            )

    @cached_property
    def losses(self) -> dict[str, float]:
        """On the data, of the trained model and of the one that it was trained from, where that
        is known.
        """
        found = {"trained": self.loss_of(self.trained())}
        if self.saved.base is not None:
            found["base"] = self.loss_of(on_device(self.saved.base_model(self.dtype)))
        return found

    def trained_whole(self) -> Any:
        """The same with whole weights, whose modules have the names of the files."""
        return self.load(self.folder)

    def rows_of(self, data: str) -> list[list[int]]:
        """Token ids of rows, as they were trained."""
        recipe = self._recipe(data)
        store = open_store(recipe.sources[0], self.tokenizer, recipe.config())
        return [store.whole_document(number)[0].tolist() for number in range(len(store))]

    def _recipe(self, data: str) -> Recipe:
        """Of evaluation, with the settings of data that the run had."""
        taught = self.saved.about.get("taught", {})
        place = str(self.saved.place)
        fields = {
            "max_seq_length": 2048,
            **taught,
            "data": [data],
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
        }
        return Recipe(model=place, **fields)

    def loss_of(self, model: Any) -> float:
        """Of a model on the data."""
        recipe = self._recipe(str(self.data))
        config = with_reference(
            recipe.config(), self.saved.about.get("reference"), base=self.saved.base
        )
        return evaluate_data(model, self.tokenizer, recipe.sources[0], config).loss

    def prove_survival(self, model: Any, proof: Proof) -> None:
        """Reports how much of the training an artefact's weights keep, where data are given."""
        if self.data is None:
            return
        own = self.loss_of(model)
        before = self.losses
        for name, loss in (*before.items(), ("exported", own)):
            proof.reported(f"loss on the data, {name}", "torch", loss)
        if "base" in before and before["base"] != before["trained"]:
            share = (before["base"] - own) / (before["base"] - before["trained"])
            proof.reported("ratio of the training's gain that is kept", "torch", share)

    @property
    def dtype(self) -> torch.dtype:
        """What models are compared in: fp32, unless only 16 bits fit."""
        size = (
            sum(stored.bytes for stored in self.tensors.values())
            if self.sums is None
            else self.sums.base_bytes
        )
        return torch.float32 if size < LARGE else torch.bfloat16

    def at_least(self, bound: float) -> float:
        """A bound on the error of logits, where torch's own are in 16 bits not less than what
        that rounds.
        """
        return bound if self.dtype == torch.float32 else max(bound, IN_16_BITS)

    def load(self, folder: Path) -> Any:
        """Load a whole model that was written, and compute in ``self.dtype``."""
        model = load_model(folder, self.dtype)
        if self.dtype == torch.float32:
            # transformers below 5.21 leaves unquantised weights that it renames (Mixtral's routers)
            # in the files' 16 bits.
            for parameter in model.parameters():
                if parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.data = parameter.data.float()
        return on_device(model)


def _of_language(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    named = {language_name(name): stored for name, stored in tensors.items()}
    return {name: stored for name, stored in named.items() if name is not None}


def dequantise_as_multiplied(model: Any, form: BaseFormat) -> None:
    """Layers and experts in 4 bits become plain ones of the values that a run's products read.

    Args:
        form: of the base, which says to which dtype values were rounded for these products.
    """
    for path, module in list(packed_modules(model)):
        if module.recipe is None:
            continue
        kind = form.kind_at(without_adapters(path))
        assert kind is not None, f"{path}: is in 4 bits, and the adapter's folder names it not"
        kept = module.dtype
        module.dtype = getattr(torch, kind.products)
        model.set_submodule(path, module.plain().to(kept))


def documents_of(tokenizer: Any) -> list[list[int]]:
    """Token ids of ``PROBES``, and of a conversation as it was trained, where there is a
    template.
    """
    found = [tokenizer(text)["input_ids"] for text in PROBES]
    if tokenizer.chat_template is not None:
        found.append(Tokenizer(tokenizer).render(CONVERSATION, generation=True))
    return found


MERGED = 1e-4
IN_16_BITS = 5e-2
"""Of logits of merged weights, which are fp32, beside those of weights and adapter apart,
computed in fp32 and in 16 bits.
"""

LARGE = 8 << 30
"""Bytes of a model's files from which models are compared in bf16."""


def on_device(model: Any) -> Any:
    """Ready to be asked, on a card where there is one."""
    return (model.to("cuda") if torch.cuda.is_available() else model).eval()


@torch.no_grad()
def logits_of(model: Any, documents: list[list[int]]) -> list[torch.Tensor]:
    """fp32 ``[length, V]`` of each document, in host memory."""
    device = next(model.parameters()).device
    return [model(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in documents]


@contextmanager
def opened(
    model: str | Path, base_model: str | None, place: Path, apart: bool = False, **given: Any
) -> Iterator[Source]:
    """The model of a name, as a source.

    Args:
        place: folder for the merged model, where an adapter is given.
        apart: an adapter is not merged; the folder is that of its base.
        given: further fields of ``Source``.

    Raises:
        ValueError: there is no such model, or its adapter cannot be merged.
    """
    saved = SavedModel.find(model, base_model)
    if saved.adapted and apart:
        with base_folder(saved, place / "base") as base:
            yield Source(saved, base, **given)
    elif saved.adapted:
        with summed(saved, place / "merged") as (sums, merged):
            yield Source(saved, merged.folder, sums, merged, **given)
    elif (file := gguf_of(saved.place)) is not None:
        with dequantised(file, place / "dequantised") as folder:
            yield Source(saved, folder, **given)
    else:
        yield Source(saved, folder_of(str(saved.place)), **given)
