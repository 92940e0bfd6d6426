"""A unit of work: one folder from which every arm reads the same weights, documents, order, labels
and adapters.

    FOLDER/weights/NAME/         a built-in shape with random weights, shared by the rows of a folder
    FOLDER/ROW/work.json         this dataclass
    FOLDER/ROW/documents.jsonl   built-in documents or pairs; else the user's own file is read
    FOLDER/ROW/tokenizer/        the tokenizer of built-in pairs; else the model's is taken
    FOLDER/ROW/tokens/           the token store
    FOLDER/ROW/adapter/          adapters to start from, by their names in PEFT's format
    FOLDER/caches/               what compilers keep between processes
    FOLDER/ways/                 what trials of peers on pairs found

The order of documents is that of ``BatchStream``: step t holds the same documents in every arm that
takes them as they come. Pairs of answers are a ``Work`` of their own (``pairs.py``), and so are
documents with a teacher (``taught.py``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from chronicals.benchmark.floor import PROJECTIONS, DecoderShape, Job, optimizer_bytes
from chronicals.benchmark.shapes import DATA, SHAPES, BuiltIn, random_documents
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from chronicals.data.packs.loader import BatchStream
    from chronicals.data.packs.steps import Step
    from chronicals.lora import LoRAConfig

MODES: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 5e-7},
    "lora": {
        "use_lora": True,
        "lora_rank": 32,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "use_lora_plus": False,
        "lora_target_modules": "all-linear",
        "learning_rate": 1e-4,
    },
}
MODES["qlora"] = {**MODES["lora"], "quantization": "nf4"}
"""The fields of a mode, unless the user sets them. Learning rates are constant and small:
weights in bf16 without a master lose most of a small update to rounding, and over the compared
steps that must stay within the tolerance."""

OWN = (
    "max_steps",
    "num_epochs",
    "output_dir",
    "cache_dir",
    "save_steps",
    "eval_steps",
    "early_stopping_patience",
    "validation_split",
    "trackers",
)
"""Fields of a recipe that a benchmark decides itself."""

UNEQUAL = ("lora_init", "lora_modules_to_save", "lora_trainable_tokens", "lora_target_parameters")
"""Fields of adapters that not all arms have."""

UNEVEN = ("lora_rank_pattern", "lora_alpha_pattern", "lora_layers", "use_dora")
"""Fields of adapters that PEFT has as we do. Their products and norms are not counted: such a
row has neither MFU nor a reference step."""

SHAPE = ("lora_rank", "lora_alpha", "lora_target_modules", "use_rslora", *UNEVEN)
"""Fields that say which adapters there are; those of dropout and of learning rates do not."""

MATRICES = ("lora_rank", "lora_target_modules", "lora_rank_pattern", "lora_layers")
"""Those of them that say which matrices there are."""

SIZES = (
    "batch_size",
    "max_seq_length",
    "gradient_accumulation_steps",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
)
"""Fields that a benchmark sets if there is no recipe; with a recipe they are the recipe's."""

STEPS = {
    "batch_size",
    "max_seq_length",
    "gradient_accumulation_steps",
    "use_sequence_packing",
    "packing_strategy",
    "max_documents",
    "pack_parts",
    "overlong",
    "seed",
    "objective",
    "sections",
    "train_on",
    "train_on_roles",
    "train_on_turns",
    "use_lora",
    "quantization",
    "load_in_4bit",
}
"""Fields that decide what a step holds or trains; all arms must have the same."""

SPARE_STEPS = 8
"""Steps beyond those measured for which there are documents: profiled steps, and those that are
prefetched.
"""

PADDED_ROWS = 32
"""Most documents in a padded micro-batch of a peer, if lengths differ."""


@dataclass(frozen=True)
class Document:
    """Token ids and labels (aligned with them, -100 where nothing is trained), int64
    ``[length]`` each.
    """

    ids: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Work:
    """What is measured; see the module's docstring for the files.

    Attributes:
        folder: of this row.
        model: folder or hub name of the weights.
        name: the model's name in tables: a built-in shape, or its path.
        mode: ``full``, ``lora``, or ``qlora``, over a base in 4 bits.
        data: a name of built-in data, or a file.
        documents: file with the documents.
        fields: of the configuration of our arm.
        steps, warm_up: sampled steps of a round, and steps before them that are not sampled.
        kind: what a step holds: ``documents`` or ``pairs``; ``taught``: documents, with a teacher.
        built_in: names of data that are made here.
    """

    kind: ClassVar[str] = "documents"
    built_in: ClassVar[tuple[str, ...]] = DATA

    folder: Path
    model: str
    name: str
    mode: str
    data: str
    documents: Path
    fields: dict[str, Any]
    steps: int
    warm_up: int

    def config(self, run: str = "run", **changes: Any) -> ChronicalsConfig:
        """The configuration of our run, which ends before anything is saved."""
        return ChronicalsConfig(
            **{
                **self.fields,
                "lr_scheduler": "constant",
                "warmup_steps": 0,
                "save_steps": None,
                "trackers": [],
                "report_samples": 0,
                "max_steps": self.warm_up + self.steps + SPARE_STEPS,
                "cache_dir": self.folder / "tokens",
                "output_dir": self.folder / run,
                **changes,
            }
        )

    @property
    def adapts(self) -> bool:
        return self.mode != "full"

    @property
    def in_4_bits(self) -> bool:
        """Whether the base of every arm is."""
        return self.mode == "qlora"

    def other_adapters(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Those of the changes of a variant by which its adapters are not the row's."""
        row = self.config()
        own = self.config(**changes)
        return {
            name: changes[name]
            for name in SHAPE
            if name in changes and getattr(own, name) != getattr(row, name)
        }

    @property
    def rows_a_micro_batch(self) -> int:
        return self.config().batch_size if self.data == "fixed" else PADDED_ROWS

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer."""
        return self.model

    @property
    def models(self) -> dict[str, str]:
        """Built-in shapes, and where their weights lie."""
        return {self.name: self.model} if self.name in SHAPES else {}

    def write_tokenizer(self) -> None:
        """Write the tokenizer where it is not the model's."""

    @property
    def reference_policy(self) -> str:
        """In words where every arm has its reference policy from; empty without one."""
        return ""

    def stream(self) -> BatchStream:
        """The batches our arm trains on."""
        from chronicals.data import BatchStream, open_store
        from chronicals.models import load_tokenizer

        config = self.config()
        tokenizer = load_tokenizer(self.tokenizer)
        store = open_store(self.documents, tokenizer, config, **self._of_rows())
        return BatchStream(store, config, tokenizer.pad_token_id or 0)

    def _of_rows(self) -> dict[str, Any]:
        """Arguments of ``open_store`` that say which rows are read."""
        return {}

    def real_tokens(self, first: int, computed: Sequence[int]) -> list[int]:
        """Real tokens of our steps from number ``first`` (from 0) on, of which so many are
        ``computed``.
        """
        return [*computed]

    def described(self) -> dict[str, Any]:
        """What the record says of the data besides."""
        return {}

    def documents_by_step(self, count: int) -> Iterator[list[Document]]:
        """The documents of the first ``count`` steps, in order."""
        return (documents_of(step) for step in self.stream().steps(count=count))

    def job(self) -> Job:
        """Sizes of a mean step, for the reference step."""
        from transformers import AutoConfig

        from chronicals.quantization import NF4

        config = self.config()
        usual = ChronicalsConfig()
        steps = list(self.documents_by_step(self.warm_up + self.steps))[self.warm_up :]
        lengths = np.array([len(document) for step in steps for document in step])
        labelled = sum(int((document.labels != -100).sum()) for step in steps for document in step)
        shape = DecoderShape.of(AutoConfig.from_pretrained(self.model))
        dense = {"bf16": 2, "fp16": 2, "fp32": 4}[config.mixed_precision]
        return Job(
            shape=shape,
            tokens=round(int(lengths.sum()) / len(steps)),
            mean_length=float((lengths**2).sum() / lengths.sum()),
            rank=config.lora_rank if config.use_lora else 0,
            adapted=_adapted(config.lora_target_modules),
            labelled=labelled / int(lengths.sum()),
            optimizer_bytes=optimizer_bytes(
                config.mixed_precision,
                "8bit" if config.use_8bit_optimizer else config.optimizer_state_dtype,
                config.use_lora,
                config.master_weights,
                full=0.0 if config.use_lora else shape.head / shape.parameters,
            ),
            dequantised_bytes=NF4.bytes_a_value(dense) + dense if self.in_4_bits else 0.0,
            uneven=self.adapts
            and any(getattr(config, name) != getattr(usual, name) for name in UNEVEN),
        )

    def write(self) -> None:
        plain = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }
        (self.folder / "work.json").write_text(json.dumps(plain, indent=1))

    @staticmethod
    def read(folder: Path) -> Work:
        plain = json.loads((folder / "work.json").read_text())
        kind = kind_of(plain["fields"])
        return kind(
            **{**plain, "folder": Path(plain["folder"]), "documents": Path(plain["documents"])}
        )

    @classmethod
    def usual_fields(
        cls, shape: BuiltIn | None, mode: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Sizes of the shape and fields of the mode, where the user sets none."""
        sizes = (
            {"batch_size": shape.batch_size, "max_seq_length": shape.max_seq_length}
            if shape
            else {"batch_size": 8}
        )
        return {**sizes, "gradient_accumulation_steps": 1, **MODES[mode]}

    @classmethod
    def placed(cls, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields with the places of further models."""
        return fields

    @staticmethod
    def place_of(folder: Path, model: str) -> str:
        """The absolute path of the weights, for arms run in another folder; a hub name is
        returned unchanged.
        """
        if model in SHAPES:
            return str((folder / "weights" / model).absolute())
        path = Path(os.path.expanduser(model))
        return str(path.absolute()) if path.exists() else model

    @classmethod
    def check(cls, data: str, fields: dict[str, Any]) -> None:
        """Raises ConfigurationError where the built-in data are of another kind."""
        from chronicals.benchmark.pairs import PAIRED, SHARES

        if data in (*DATA, *SHARES) and data not in cls.built_in:
            objectives = (
                "another objective"
                if data in DATA
                else " or ".join(f"objective={name!r}" for name in PAIRED)
            )
            raise ConfigurationError(
                f"data={data!r}: is for {objectives}; there are {', '.join(cls.built_in)}, or a "
                "file"
            )

    def check_settings(self) -> None:
        """Raises ConfigurationError where the objective has settings that not every arm has."""

    def write_documents(self, vocabulary: int) -> None:
        """Write the built-in documents."""
        config = self.config()
        tokens = (
            config.batch_size
            * config.gradient_accumulation_steps
            * config.max_seq_length
            * self.written_steps
        )
        rows = random_documents(self.data, tokens, config.max_seq_length, vocabulary)
        self.documents.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))

    @property
    def written_steps(self) -> int:
        """Steps for which there are built-in documents."""
        return self.warm_up + self.steps + SPARE_STEPS


def kind_of(fields: dict[str, Any]) -> type[Work]:
    """The class of the work whose configuration has these fields."""
    from chronicals.benchmark.pairs import PAIRED, PairWork
    from chronicals.benchmark.taught import TAUGHT, TaughtWork

    kinds = {**dict.fromkeys(PAIRED, PairWork), TAUGHT: TaughtWork}
    return kinds.get(fields.get("objective", ""), Work)


def _adapted(wanted: list[str] | str | None) -> tuple[str, ...]:
    """The projections that a configuration's targets name."""
    if wanted is None or wanted == "all-linear":
        return PROJECTIONS
    if isinstance(wanted, str):
        paths = ("model.layers.0.self_attn.", "model.layers.0.mlp.")
        return tuple(
            name for name in PROJECTIONS if any(re.fullmatch(wanted, path + name) for path in paths)
        )
    return tuple(
        name for name in PROJECTIONS if any(path.split(".")[-1] == name for path in wanted)
    )


def documents_of(step: Step) -> list[Document]:
    """The documents of a step, without padding, which has no target."""
    found = []
    for batch in step.batches:
        bounds = batch.cu_seqlens.tolist()
        ids = batch.input_ids.numpy()
        targets = batch.targets.numpy()
        for start, end in zip(bounds, bounds[1:]):
            if end > start and (targets[start:end] != -100).any():
                labels = np.concatenate([[-100], targets[start : end - 1]])
                found.append(Document(ids[start:end].copy(), labels))
    return found


def plan_work(
    folder: Path,
    model: str,
    data: str,
    mode: str,
    fields: dict[str, Any],
    steps: int | None,
    warm_up: int,
) -> Work:
    """Plan a row and write its documents; ``prepare`` writes the weights later, in a process of its
    own.

    Args:
        folder: shared by rows; the row gets a folder in it.
        model: a built-in shape or a model's folder or hub name.
        data: built-in data or a file.
        fields: configuration fields set by the user; they override those of the mode.
        steps: sampled steps of a round; None takes the shape's number, or 20.

    Raises:
        ConfigurationError: an unknown mode, or built-in data for a model whose vocabulary is not
            known.
    """
    if mode not in MODES:
        raise ConfigurationError(f"mode={mode!r}: no such mode; there are {', '.join(MODES)}")
    if fields.get("use_lora", mode != "full") != (mode != "full"):
        raise ConfigurationError(
            f"mode={mode!r} contradicts use_lora={fields['use_lora']}: give one of the two"
        )
    for name in ("quantization", "load_in_4bit"):
        if name in fields and bool(fields[name]) != (mode == "qlora"):
            raise ConfigurationError(
                f"mode={mode!r} contradicts {name}={fields[name]!r}: give one of the two"
            )
    usual = ChronicalsConfig()
    if unequal := [
        name for name in UNEQUAL if fields.get(name, getattr(usual, name)) != getattr(usual, name)
    ]:
        raise ConfigurationError(
            f"{unequal[0]}={fields[unequal[0]]!r}: not every arm has it; leave it out, or give it "
            "to ours alone as a variant"
        )
    shape = SHAPES.get(model)
    kind = kind_of(fields)
    kind.check(data, fields)
    chosen = {**kind.usual_fields(shape, mode, fields), **fields}
    chosen = kind.placed(folder, {name: value for name, value in chosen.items() if name not in OWN})
    about = [chosen["objective"]] if kind is not Work else []
    row = folder / "-".join([Path(model).name, mode, *about, Path(data).stem])
    row.mkdir(parents=True, exist_ok=True)
    built_in = data in kind.built_in
    work = kind(
        folder=row.absolute(),
        model=kind.place_of(folder, model),
        name=model,
        mode=mode,
        data=data,
        documents=row.absolute() / "documents.jsonl"
        if built_in
        else Path(os.path.expanduser(data)).absolute(),
        fields=chosen,
        steps=steps or (shape.steps if shape else 20),
        warm_up=warm_up,
    )
    work.check_settings()
    if built_in:
        work.write_documents(shape.sizes["vocab_size"] if shape else _vocabulary(model))
    work.write()
    return work


def _vocabulary(model: str) -> int:
    from transformers import AutoConfig

    try:
        return ModelShape.of(AutoConfig.from_pretrained(model)).vocabulary
    except (OSError, ValueError) as error:
        shapes = ", ".join(SHAPES)
        raise ConfigurationError(
            f"model={model!r}: neither a built-in shape ({shapes}) nor a model: {error}"
        ) from None


def prepare(work: Work) -> None:
    """Write what the arms share: weights of a built-in shape, tokens, adapters. It runs in a
    process of its own.
    """
    import torch

    from chronicals.benchmark.shapes import build_model

    for name, place in work.models.items():
        if not (Path(place) / "tokenizer.json").exists():
            build_model(name, Path(place), "cuda" if torch.cuda.is_available() else "cpu")
    work.write_tokenizer()
    work.stream()
    if work.adapts:
        _write_adapter(work)


ADAPTER_FILE = "adapter_model.safetensors"


def _write_adapter(work: Work) -> None:
    from safetensors.torch import save_file

    (work.folder / "adapter").mkdir(exist_ok=True)
    save_file(
        starting_values(work, work.config()),
        work.folder / "adapter" / ADAPTER_FILE,
        metadata={"format": "pt"},
    )


def starting_values(work: Work, config: ChronicalsConfig) -> dict[str, Tensor]:
    """A and B that every arm with the adapters of ``config`` starts from, by their names in PEFT's
    files.

    A is uniform as in a linear layer, rounded to bf16 so that every arm holds it exactly; B is
    zero. Lengths of rows (DoRA) are those of the base, which each arm measures itself.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from chronicals.lora import apply_lora
    from chronicals.lora.layers import linear_adapters
    from chronicals.lora.peft_format import PREFIX

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work.model))
    apply_lora(model, replace(adapter_shape(config), use_dora=False))
    generator = torch.Generator().manual_seed(0)
    found = {}
    for path, layer in linear_adapters(model):
        bound = layer.lora_A.shape[1] ** -0.5
        start = torch.rand(layer.lora_A.shape, generator=generator) * 2 * bound - bound
        found[f"{PREFIX}{path}.lora_A.weight"] = start.bfloat16().float()
        found[f"{PREFIX}{path}.lora_B.weight"] = torch.zeros(layer.lora_B.shape)
    return found


def start_of(work: Work, config: ChronicalsConfig) -> dict[str, Tensor]:
    """``starting_values``: from the row's folder where the matrices of ``config`` are those of
    the row.
    """
    from safetensors.torch import load_file

    row = work.config()
    if any(getattr(config, name) != getattr(row, name) for name in MATRICES):
        return starting_values(work, config)
    return load_file(work.folder / "adapter" / ADAPTER_FILE)


def adapter_shape(config: ChronicalsConfig) -> LoRAConfig:
    """The adapters of a configuration."""
    from chronicals.lora import LoRAConfig

    return LoRAConfig(
        config.lora_rank,
        config.lora_alpha,
        config.lora_dropout,
        config.lora_target_modules,
        config.use_rslora,
        config.lora_rank_pattern,
        config.lora_alpha_pattern,
        config.lora_layers,
        config.use_dora,
    )
