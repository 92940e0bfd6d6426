"""The model that is exported: whole, in files as transformers writes them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from chronicals.config import Recipe
from chronicals.data import Tokenizer, open_store, stop_token_ids
from chronicals.data.kinds.rows import CHAT_KINDS
from chronicals.export.base_files import base_folder, dequantised, folder_of
from chronicals.export.merge import LARGEST_LOSS, Merged, MergeError, Sums
from chronicals.export.proof import Proof, largest_error
from chronicals.export.texts import GreedyText, greedy_texts, prove_texts
from chronicals.formats.gguf.reader import gguf_of
from chronicals.formats.tensor_names import language_name, reads_images
from chronicals.formats.weight_files import FLOAT_DTYPES, StoredTensor, files_of, tensors_in
from chronicals.models import load_config, load_model
from chronicals.models.base_format import BaseFormat, path_without_adapters
from chronicals.objectives.reference import with_reference
from chronicals.quantization import packed_modules
from chronicals.saving import SavedModel
from chronicals.training.run.evaluation import evaluate_data

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b  # 12345 + 67 = 12412\n",
    "Naïve café, façade; £3.50 — «déjà vu» 漢字 🙂 it's we're I'LL",
    "  two  blanks,\ttabs,\n\nlines and 3.14159e-10",
)
"""Texts for which a client must give the tokenizer's ids."""

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
]


@dataclass(frozen=True)
class SourceModel:
    """A model that is exported.

    Attributes:
        saved: the model as it was given.
        folder: of the whole model; with an adapter it holds the sums of base and adapter in fp32.
        sums: the same sums, computed anew from the files of base and adapter; None without one.
        merged: the changes by the adapter.
        data: rows on which the loss of trained and exported model is compared, as ``chronicals
            evaluate`` takes them.
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
        """Every weight as it is stored, by name."""
        return {
            stored.name: stored for file in files_of(self.folder) for stored in tensors_in(file)
        }

    @cached_property
    def config(self) -> Any:
        """The configuration (transformers') of the whole model."""
        return load_config(self.folder)

    @cached_property
    def text_config(self) -> Any:
        """The configuration of the language part; of a model of text, the whole."""
        if not reads_images(self.config):
            return self.config
        text = copy.deepcopy(self.config.get_text_config())
        text.tie_word_embeddings = self.config.tie_word_embeddings
        text.quantization_config = getattr(self.config, "quantization_config", None)
        return text

    @cached_property
    def language(self) -> dict[str, StoredTensor]:
        """The tensors of the language part, by their names in a model of text alone."""
        return self.language_part(self.tensors)

    @cached_property
    def trained_tensors(self) -> dict[str, StoredTensor]:
        """Every trained weight by name, read from base and adapter, not from files of sums."""
        return self.tensors if self.sums is None else self.sums.tensors()

    def language_part(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return those of some tensors that are of the language part, named as ``language``."""
        if not reads_images(self.config):
            return tensors
        named = {language_name(name): stored for name, stored in tensors.items()}
        return {name: stored for name, stored in named.items() if name is not None}

    @property
    def beside_language(self) -> list[StoredTensor]:
        """The tensors that are not of the language part."""
        language = {stored.name for stored in self.language.values()}
        return [stored for name, stored in self.tensors.items() if name not in language]

    @cached_property
    def licence(self) -> str | None:
        """The licence that the base's card names."""
        card = self.folder / "README.md"
        if not card.exists():
            return None
        match = re.search(r"^license:\s*(\S+)\s*$", card.read_text(), re.MULTILINE)
        return match[1] if match else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model as it was given."""
        return self.saved.tokenizer()

    @cached_property
    def stops(self) -> list[int]:
        """Ids at which generation ends: those that were trained, then those of the settings."""
        has_chats = any(kind in CHAT_KINDS for kind in self.saved.about.get("kinds", ["chat"]))
        has_template = self.tokenizer.chat_template is not None
        stops = list(stop_token_ids(self.tokenizer, has_chats and has_template))
        file = self.folder / "generation_config.json"
        configured = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if configured is None:
            configured = []
        elif isinstance(configured, int):
            configured = [configured]
        rows = self.text_config.vocab_size
        return stops + [stop for stop in configured if stop not in stops and stop < rows]

    @cached_property
    def conversation(self) -> str | None:
        """A conversation in the chat template, up to the model's answer; None without one."""
        if self.tokenizer.chat_template is None:
            return None
        rendered = self.tokenizer.apply_chat_template(
            CONVERSATION, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    @cached_property
    def documents(self) -> list[list[int]]:
        """Token ids of the texts on which a client is compared."""
        return probe_ids(self.tokenizer)

    def trained(self) -> Any:
        """Load the model as it was trained, with its adapter beside the base, in ``dtype``."""
        model = self.saved.model(self.dtype)
        form = BaseFormat.read(self.saved.about.get("base"))
        # Values of 4 bits in the base's files are summed exactly, not as a run rounds them.
        in_files = self.sums is not None and self.sums.adapter.base_is_packed
        if form is None or in_files:
            return on_device(model)
        # Layers and experts in 4 bits become plain ones with the values that the run multiplied:
        # the form of the base names the dtype to which these were rounded for products.
        for path, module in list(packed_modules(model)):
            if module.recipe is None:
                continue
            kind = form.kind_of(path_without_adapters(path))
            assert kind is not None, f"{path}: is in 4 bits, and the adapter's folder names it not"
            kept = module.dtype
            module.dtype = getattr(torch, kind.products)
            model.set_submodule(path, module.plain().to(kept))
        return on_device(model)

    @cached_property
    def _by_trained(self) -> tuple[list[torch.Tensor], list[GreedyText]]:
        """Logits of ``documents`` and greedy texts by the trained model, which is loaded once."""
        model = self.trained()
        return logits_of(model, self.documents), greedy_texts(model, self.documents)

    @property
    def trained_logits(self) -> list[torch.Tensor]:
        """Logits of ``documents`` by the trained model."""
        return self._by_trained[0]

    def prove_texts(self, model: Any, bound: float, client: str, proof: Proof) -> None:
        """Compare greedy text of an exported model with the trained model's.

        Args:
            model: the exported model.
            bound: on the relative error of logits.
            client: the program that read the artefact.
            proof: gets the check.
        """
        logits, texts = self._by_trained
        size = float(torch.cat(logits).square().mean().sqrt())
        found = greedy_texts(model, self.documents)
        prove_texts(found, texts, bound * size, client, proof)

    def prove_merged(self, proof: Proof) -> None:
        """Check that the sums of base and adapter, of which artefacts are made, are the model."""
        if self.saved.adapted:
            bound = self.at_least(MERGED_LOGIT_BOUND)
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
        """Raise MergeError if rounding would make the adapted model its base again.

        Args:
            dtype: of 16 bits, in the names of safetensors.
        """
        if self.merged is None:
            return
        changes = self.merged.changes.values()
        # Rounding takes nearly all of the adapter from every weight.
        if all(change.lost_in[dtype] >= LARGEST_LOSS for change in changes if change.change):
            name = str(FLOAT_DTYPES[dtype]).removeprefix("torch.")
            raise MergeError(
                "the adapter is lost: nearly all of its changes are less than the spacing of "
                f"{name}; nothing was written. Export it in fp32 (--to merged-fp32), or by itself "
                "(--to adapter)"
            )

    @cached_property
    def losses(self) -> dict[str, float]:
        """Losses on the data of the trained model and, if it is known, of its base."""
        losses = {"trained": self.loss_of(self.trained())}
        if self.saved.base is not None:
            losses["base"] = self.loss_of(on_device(self.saved.base_model(self.dtype)))
        return losses

    def rows_of(self, data: str) -> list[list[int]]:
        """Return the token ids of rows, made as for training."""
        recipe = self._recipe(data)
        store = open_store(recipe.sources[0], self.tokenizer, recipe.config())
        return [store.whole_document(number)[0].tolist() for number in range(len(store))]

    def _recipe(self, data: str) -> Recipe:
        """Return a recipe of evaluation with the settings of data that the run had."""
        fields = {
            "max_seq_length": 2048,
            **self.saved.about.get("taught", {}),
            "data": [data],
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
        }
        return Recipe(model=str(self.saved.place), **fields)

    def loss_of(self, model: Any) -> float:
        """Return the loss of a model on the data."""
        recipe = self._recipe(str(self.data))
        reference = self.saved.about.get("reference")
        config = with_reference(recipe.config(), reference, base=self.saved.base)
        return evaluate_data(model, self.tokenizer, recipe.sources[0], config).loss

    def prove_survival(self, model: Any, proof: Proof) -> None:
        """Report how much of the training's gain an artefact's weights keep, if data are given."""
        if self.data is None:
            return
        losses = {**self.losses, "exported": self.loss_of(model)}
        for name, loss in losses.items():
            proof.reported(f"loss on the data, {name}", "torch", loss)
        if "base" in losses and losses["base"] != losses["trained"]:
            gain = losses["base"] - losses["trained"]
            ratio = (losses["base"] - losses["exported"]) / gain
            proof.reported("ratio of the training's gain that is kept", "torch", ratio)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which models are compared: fp32, or bf16 for large ones."""
        stored_bytes = sum(stored.bytes for stored in self.tensors.values())
        if self.sums is not None:  # weights of the base in 4 bits count as dense
            stored_bytes = sum(stored.bytes for stored in self.sums.stored)
        return torch.float32 if stored_bytes < LARGE_MODEL_BYTES else torch.bfloat16

    def at_least(self, bound: float) -> float:
        """Return a bound on the error of logits; in bf16 it is at least torch's own rounding."""
        return bound if self.dtype == torch.float32 else max(bound, BF16_LOGIT_BOUND)

    def load(self, folder: Path) -> Any:
        """Load a whole model that was written, in ``dtype``."""
        model = load_model(folder, self.dtype)
        if self.dtype == torch.float32:
            # transformers below 5.21 leaves unquantised weights that it renames (Mixtral's routers)
            # in the files' 16 bits.
            for parameter in model.parameters():
                if parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.data = parameter.data.float()
        return on_device(model)


def probe_ids(tokenizer: Any) -> list[list[int]]:
    """Return the token ids of ``PROBES`` and, with a template, of a conversation."""
    documents = [tokenizer(text)["input_ids"] for text in PROBES]
    if tokenizer.chat_template is not None:
        documents.append(Tokenizer(tokenizer).render(CONVERSATION, generation=True))
    return documents


MERGED_LOGIT_BOUND = 1e-4
"""Bound on the error of logits of weights merged in fp32, beside base and adapter, in fp32."""

BF16_LOGIT_BOUND = 5e-2
"""The same bound where models compute in bf16."""

LARGE_MODEL_BYTES = 8 << 30
"""Size of a model's files from which models are compared in bf16."""


def on_device(model: Any) -> Any:
    """Move a model to the GPU, if there is one, in evaluation mode."""
    return (model.to("cuda") if torch.cuda.is_available() else model).eval()


@torch.no_grad()
def logits_of(model: Any, documents: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of each document, fp32 ``[length, V]``, in host memory."""
    device = next(model.parameters()).device
    return [model(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in documents]


@contextmanager
def opened(
    model: str | Path, base_model: str | None, place: Path, apart: bool = False, **fields: Any
) -> Iterator[SourceModel]:
    """Yield the model of a name as a source.

    Args:
        model: folder, file or hub name.
        base_model: base of an adapter that does not name it.
        place: folder for the merged model, if the name is an adapter's.
        apart: an adapter is not merged; the folder is that of its base.
        fields: further ones of ``SourceModel``.

    Raises:
        ValueError: there is no such model, or its adapter cannot be merged.
    """
    saved = SavedModel.find(model, base_model)
    file = None if saved.adapted else gguf_of(saved.place)
    if saved.adapted and apart:
        with base_folder(saved, place / "base") as base:
            yield SourceModel(saved, base, **fields)
    elif saved.adapted:
        with base_folder(saved, place / "merged") as base:
            sums = Sums(saved, base, exact=True)
            merged = sums.write(place / "merged")
            yield SourceModel(saved, merged.folder, sums, merged, **fields)
    elif file is not None:
        with dequantised(file, place / "dequantised") as folder:
            yield SourceModel(saved, folder, **fields)
    else:
        yield SourceModel(saved, folder_of(str(saved.place)), **fields)
