"""A unit of work: one folder from which every arm reads the same.

These are weights, documents, their order and labels, and adapters.

    FOLDER/weights/NAME/         a built-in shape with random weights, shared by all rows
    FOLDER/ROW/work.json         this dataclass
    FOLDER/ROW/documents.jsonl   built-in documents or pairs; else the user's own file is read
    FOLDER/ROW/tokenizer/        the tokenizer of built-in pairs; else the model's is taken
    FOLDER/ROW/tokens/           the token store
    FOLDER/ROW/adapter/          adapters to start from, by their names in PEFT's format
    FOLDER/caches/               what compilers keep between processes
    FOLDER/ways/                 results of the trials of peers on pairs

The order of documents is that of ``BatchStream``: step t holds the same documents in every arm that
takes them as they come. Pairs of answers are a ``Work`` of their own (``pairs.py``), and so are
documents with a teacher (``DistillationWork``). ``plan.py`` makes a work and reads one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from chronicals.benchmark.shapes import BUILT_IN_DATA, SHAPES, BuiltIn, random_documents
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.step_work import PROJECTIONS, DecoderShape, Job, optimizer_bytes

if TYPE_CHECKING:
    from chronicals.data.packs.loader import BatchStream

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
"""The fields of a mode, unless the user sets them.

Learning rates are constant and small: weights in bf16 without a master lose most of a small update
to rounding, and over the compared steps that must stay within the tolerance.
"""

DECIDED_FIELDS = (
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

UNEVEN_FIELDS = ("lora_rank_pattern", "lora_alpha_pattern", "lora_layers", "use_dora")
"""Fields of adapters that PEFT has, too. Their products and norms are not counted: such a row has
neither MFU nor a reference step."""

_ADAPTER_FIELDS = (
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "use_rslora",
    *UNEVEN_FIELDS,
)
"""Fields that say which adapters there are; those of dropout and of learning rates do not."""

SIZE_FIELDS = (
    "batch_size",
    "max_seq_length",
    "gradient_accumulation_steps",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
)
"""Fields that a benchmark sets if there is no recipe; otherwise they are the recipe's."""

STEP_CONTENT_FIELDS = {
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

MAX_PADDED_ROWS = 32
"""Largest number of documents in a padded micro-batch of a peer, if lengths differ."""


@dataclass(frozen=True)
class Document:
    """Token ids and labels, int64 ``[length]`` each.

    A label is that of its own token, -100 where nothing is trained.
    """

    ids: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Work:
    """The work that all arms of a benchmark train; see the module's docstring for the files.

    Attributes:
        folder: of this row.
        model: folder or hub name of the weights.
        name: the model's name in tables: a built-in shape, or its path.
        mode: ``full``, ``lora``, or ``qlora``, over a base in 4 bits.
        data: a name of built-in data, or a file.
        documents: file with the documents.
        fields: of the configuration of our arm.
        steps, warm_up: sampled steps of a round, and steps before them that are not sampled.
        kind: what a step holds: ``documents``, ``pairs`` of answers, or for ``distillation``
            documents that a teacher reads, too.
        built_in: names of data that are made here.
        store_options: arguments of ``open_store`` that say which rows are read.
    """

    kind: ClassVar[str] = "documents"
    built_in: ClassVar[tuple[str, ...]] = BUILT_IN_DATA
    store_options: ClassVar[dict[str, Any]] = {}

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
        """Return the configuration of our run, which ends before anything is saved."""
        decided = {
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "save_steps": None,
            "trackers": [],
            "report_samples": 0,
            "max_steps": self.warm_up + self.steps + SPARE_STEPS,  # those that are written
            "cache_dir": self.folder / "tokens",
            "output_dir": self.folder / run,
        }
        return ChronicalsConfig(**{**self.fields, **decided, **changes})

    @property
    def adapts(self) -> bool:
        """True if adapters are trained."""
        return self.mode != "full"

    @property
    def in_4_bits(self) -> bool:
        """True if the base of every arm is in 4 bits."""
        return self.mode == "qlora"

    def other_adapters(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the changes of a variant that give it other adapters than the row's."""
        row = self.config()
        variant = self.config(**changes)
        return {
            name: changes[name]
            for name in _ADAPTER_FIELDS
            if name in changes and getattr(variant, name) != getattr(row, name)
        }

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer."""
        return self.model

    @property
    def models(self) -> dict[str, str]:
        """Built-in shapes by name, and the folders of their weights."""
        return {self.name: self.model} if self.name in SHAPES else {}

    def write_tokenizer(self) -> None:
        """Write the tokenizer, if it is not the model's."""

    def stream(self) -> BatchStream:
        """Return the batches that our arm trains on."""
        from chronicals.data import BatchStream, open_store
        from chronicals.models import load_tokenizer

        config = self.config()
        tokenizer = load_tokenizer(self.tokenizer)
        store = open_store(self.documents, tokenizer, config, **self.store_options)
        return BatchStream(store, config, tokenizer.pad_token_id or 0)

    def real_tokens(self, first: int, computed: Sequence[int]) -> list[int]:
        """Return the real tokens of each of our steps.

        Args:
            first: number of the first step (from 0).
            computed: tokens of each step that our arm computes.
        """
        return [*computed]

    @property
    def described(self) -> dict[str, Any]:
        """Further fields of the record, which describe the data."""
        return {}

    def documents_by_step(self, count: int) -> Iterator[list[Document]]:
        """Yield the documents of each of the first ``count`` steps, in order, without padding."""
        for step in self.stream().steps(count=count):
            documents = []
            for batch in step.batches:
                bounds = batch.cu_seqlens.tolist()
                ids = batch.input_ids.numpy()
                targets = batch.targets.numpy()
                for start, end in zip(bounds, bounds[1:]):
                    if (targets[start:end] != -100).any():  # padding has no target
                        labels = np.concatenate([[-100], targets[start : end - 1]])
                        documents.append(Document(ids[start:end].copy(), labels))
            yield documents

    def job(self) -> Job:
        """Return the sizes of a mean step, for the reference step."""
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
            and any(getattr(config, name) != getattr(usual, name) for name in UNEVEN_FIELDS),
            pairs=self.kind == "pairs",
            has_teacher=self.kind == "distillation",
        )

    @classmethod
    def usual_fields(
        cls, shape: BuiltIn | None, mode: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Return sizes of the shape and fields of the mode, for what the user does not set."""
        sizes = (
            {"batch_size": shape.batch_size, "max_seq_length": shape.max_seq_length}
            if shape
            else {"batch_size": 8}
        )
        return {**sizes, "gradient_accumulation_steps": 1, **MODES[mode]}

    @classmethod
    def placed(cls, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with the folders of further models."""
        return fields

    @staticmethod
    def place_of(folder: Path, model: str) -> str:
        """Return the absolute path of the weights, for arms that run in another folder.

        A hub name is returned unchanged.
        """
        if model in SHAPES:
            return str((folder / "weights" / model).absolute())
        path = Path(os.path.expanduser(model))
        return str(path.absolute()) if path.exists() else model

    def write_documents(self, vocabulary: int) -> None:
        """Write the built-in documents."""
        width = self.config().max_seq_length
        rows = random_documents(self.data, self.written_slots, width, vocabulary)
        self.documents.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))

    @property
    def written_slots(self) -> int:
        """Positions of all steps for which there are documents, padding included."""
        config = self.config()
        packs = config.batch_size * config.gradient_accumulation_steps
        steps = self.warm_up + self.steps + SPARE_STEPS
        return packs * config.max_seq_length * steps


def _adapted(targets: list[str] | str | None) -> tuple[str, ...]:
    """Return the projections that a configuration's targets name."""
    if targets is None or targets == "all-linear":
        return PROJECTIONS
    if isinstance(targets, str):
        prefixes = ("model.layers.0.self_attn.", "model.layers.0.mlp.")
        return tuple(
            name
            for name in PROJECTIONS
            if any(re.fullmatch(targets, prefix + name) for prefix in prefixes)
        )
    names = {path.split(".")[-1] for path in targets}
    return tuple(name for name in PROJECTIONS if name in names)


DISTILLATION = "distill"
"""Name of the objective."""

FIXED_SETTINGS = {"divergence": "jsd", "beta": 0.5}
"""Settings of the objective that all arms have."""

FREE_SETTINGS = ("teacher", "teacher_precision")
"""Settings that the user gives. Peers have the teacher in the dtype of the student's products."""


@dataclass(frozen=True)
class DistillationWork(Work):
    """Documents on which a student learns a teacher's distributions.

    The divergence is that of Jensen and Shannon with equal shares, at temperature 1 and without
    cross-entropy, which every arm supports:

        ½ KL(p ‖ m) + ½ KL(q ‖ m),   m = ½ p + ½ q

    p is the teacher's distribution and q the student's; the loss is the mean over the targets.
    Teachers may also be built-in shapes with random weights. Their products are not counted, so
    such a row has neither MFU nor a reference step.
    """

    kind: ClassVar[str] = "distillation"

    @property
    def teacher(self) -> str:
        """Folder or hub name of its weights."""
        return str(self.fields["sections"][DISTILLATION]["teacher"])

    @property
    def models(self) -> dict[str, str]:
        """Built-in shapes of student and teacher, and the folders of their weights."""
        models = super().models
        name = Path(self.teacher).name
        return {**models, name: self.teacher} if name in SHAPES else models

    def write_tokenizer(self) -> None:
        """Write the student's tokenizer beside a built-in teacher.

        For another class of models transformers would split texts differently.
        """
        if Path(self.teacher).name in SHAPES:
            from chronicals.models import load_tokenizer

            load_tokenizer(self.model).save_pretrained(self.teacher)

    @property
    def described(self) -> dict[str, Any]:
        """The objective, and the name of the teacher."""
        return {"objective": DISTILLATION, "teacher": Path(self.teacher).name}

    @classmethod
    def placed(cls, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with the folder of the teacher.

        Raises:
            ConfigurationError: there is no teacher, or there are settings that not every arm has.
        """
        settings = fields.get("sections", {}).get(DISTILLATION, {})
        if "teacher" not in settings:
            raise ConfigurationError(
                f"{DISTILLATION}.teacher is missing: give a built-in shape ({', '.join(SHAPES)}) or a "
                "model"
            )
        for name, value in settings.items():
            if name not in FREE_SETTINGS and FIXED_SETTINGS.get(name) != value:
                raise ConfigurationError(
                    f"{DISTILLATION}.{name}={value!r}: not every arm has it; a benchmark takes "
                    f"{DISTILLATION}.teacher, and measures the "
                    "divergence of Jensen and Shannon"
                )
        teacher = cls.place_of(folder, settings["teacher"])
        section = {**FIXED_SETTINGS, **settings, "teacher": teacher}
        return {**fields, "sections": {DISTILLATION: section}}
