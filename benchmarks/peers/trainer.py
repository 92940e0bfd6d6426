"""Peers that train through TRL's ``SFTTrainer``, also as Unsloth patches it, with its own loop and
packing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from chronicals.benchmark.measurement import (
    COMPARED,
    ArmPlan,
    Clock,
    Measurement,
    Movement,
    device,
    peak_gib,
    reset_peak,
)
from chronicals.benchmark.work import SPARE_STEPS, Document, Work
from peers.packing import flash_lengths


def train_with_trainer(
    model: Any,
    tokenizer: Any,
    work: Work,
    plan: ArmPlan,
    settings: str,
    packing: bool,
    collate: Callable[[Any], Any] = lambda collator: collator,
    **arguments: Any,
) -> None:
    """Train through ``SFTTrainer`` and hand in each round, with losses and norms of its first steps
    and of the last.

    With packing the trainer decides which documents are in a step; those of the first steps are
    reported, for a reference of their own. Without it a step holds as many of the work's documents,
    in the work's order, as batch size times accumulation, sorted by length within the step.

    Args:
        collate: returns the collator to use in the place of the trainer's.
        arguments: further fields of ``SFTConfig``.

    Raises:
        ValueError: the documents have tokens that are not trained, which rows of token ids cannot
            express.
    """
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    documents = [
        document for step in work.documents_by_step(plan.in_all + SPARE_STEPS) for document in step
    ]
    if any((document.labels[1:] == -100).any() for document in documents):
        raise ValueError("documents hold tokens that are not trained; this arm trains every token")
    described = {
        **usual_arguments(work, plan),
        "packing": packing,
        "dataset_num_proc": 1,
        **arguments,
    }
    if not packing:
        a_step = described["per_device_train_batch_size"] * described["gradient_accumulation_steps"]
        documents = sorted_in_steps(documents, a_step)
    rows = Dataset.from_list([{"input_ids": document.ids.tolist()} for document in documents])
    trainer: Any = SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=rows, args=SFTConfig(**described)
    )
    trainer.data_collator = collate(trainer.data_collator)
    trainer._get_train_sampler = lambda *given: SequentialSampler(trainer.train_dataset)
    expected = [
        [document.ids.tolist() for document in step] for step in work.documents_by_step(COMPARED)
    ]
    watch = Watch(trainer, plan, settings, expected)
    reset_peak()
    with contextlib.suppress(Enough):
        trainer.train()
        watch.hand_in()


def usual_arguments(work: Work, plan: ArmPlan) -> dict[str, Any]:
    """Return arguments of a trainer for the row: its recipe, without files, and with logs only of
    the steps that ``Watch`` asks for.
    """
    config = work.config()
    return {
        "output_dir": str(work.folder / "trainer"),
        "max_length": config.max_seq_length,
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "max_steps": plan.at_most,
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "lr_scheduler_type": "constant",
        "max_grad_norm": config.max_grad_norm or math.inf,
        "optim": "adamw_torch_fused" if device().type == "cuda" else "adamw_torch",
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_drop_last": True,
    }


def with_flash_lengths(
    collator: Callable[[Any], dict[str, Any]],
) -> Callable[[Any], dict[str, Any]]:
    """Return the collator, with ``flash_lengths`` for its packed rows."""

    def collated(rows: Any) -> dict[str, Any]:
        batch = collator(rows)
        return {**batch, **flash_lengths(batch["position_ids"])}

    return collated


def sorted_in_steps(documents: Sequence[Document], size: int) -> list[Document]:
    """Return the documents with each ``size`` of them sorted, the longest first."""
    steps = (documents[start : start + size] for start in range(0, len(documents), size))
    return [document for step in steps for document in sorted(step, key=len, reverse=True)]


class Enough(Exception):
    """Ends a trainer's loop, because no further round is requested."""


class Watch:
    """Records every micro-batch of a trainer, marks the end of every step and hands in the rounds.

    Args:
        expected: token ids of the documents of the work's first steps, to compare with those that
            the trainer takes.
    """

    def __init__(self, trainer: Any, plan: ArmPlan, settings: str, expected: list[list[Any]]):
        self.trainer = trainer
        self.plan = plan
        self.settings = settings
        self.expected = expected
        self.movement = Movement(trainer.model)
        self.loaded = time.perf_counter() - plan.began
        self.began_at = 0
        self.clock = Clock()
        self.micro_batches: list[tuple[int, Tensor, int]] = []
        self.batches: list[list[Any]] = []
        inner = trainer.training_step

        def watched(model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
            self._see(inputs)
            return inner(model, inputs, *given, **named)

        trainer.training_step = watched
        trainer.add_callback(self._callback())

    def _callback(self) -> Any:
        from transformers import TrainerCallback

        watch = self

        class Marks(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
                watch.clock.mark()

            def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
                if state.global_step - watch.began_at == watch.plan.in_all and not watch.hand_in():
                    raise Enough

            def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
                watch.clock.mark()
                step = state.global_step - watch.began_at
                control.should_log = step <= COMPARED or step >= watch.plan.in_all - 1

        return Marks()

    def hand_in(self) -> bool:
        """Hand in the steps since the last round. Returns True if another round is requested."""
        first = not self.plan.rounds
        wanted = self.plan.hand_in(
            Measurement(
                settings=self.settings,
                tokens=self._by_step(1),
                slots=self._by_step(2),
                seconds=self.clock.seconds(),
                losses=self._logged("loss"),
                grad_norms=self._logged("grad_norm"),
                warm_up=self.plan.discarded,
                peak_gib=peak_gib(),
                trained_share=self.movement.trained_share,
                moved_share=self.movement.moved_share(),
                load_seconds=self.loaded,
                own_batches=self.own_batches() if first else None,
                begins_alike=first and self.begins_alike(),
                first=first,
            )
        )
        self.began_at = self.trainer.state.global_step
        self.clock = Clock()
        self.micro_batches.clear()
        self.clock.mark()
        return wanted

    def own_batches(self) -> Any:
        """Return the content of the first steps; None if it is the work's."""
        return self.batches if self.batches != self.expected else None

    def begins_alike(self) -> bool:
        """Return whether the first step holds the same documents as the work's."""
        return self.batches[:1] == self.expected[:1]

    def _see(self, inputs: dict[str, Any]) -> None:
        step = self.trainer.state.global_step
        self.micro_batches.append((step - self.began_at, *self.sizes(inputs)))
        if step < COMPARED:
            while len(self.batches) <= step:
                self.batches.append([])
            self.batches[step] += self.held(inputs)

    def sizes(self, inputs: dict[str, Any]) -> tuple[Tensor, int]:
        """Return the real tokens of a micro-batch, and its positions."""
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        return torch.tensor(ids.numel()) if mask is None else mask.sum(), ids.numel()

    def held(self, inputs: dict[str, Any]) -> list[Any]:
        """Return the documents of a micro-batch."""
        return documents_in(inputs)

    def _by_step(self, part: int) -> list[int]:
        sums = [0] * self.plan.in_all
        for micro_batch in self.micro_batches:
            sums[micro_batch[0]] += int(micro_batch[part])
        return sums

    def _logged(self, name: str) -> list[float | None]:
        """Return the values that the trainer logged, by step; None for steps without a log."""
        by_step = {
            line["step"]: float(line[name])
            for line in self.trainer.state.log_history
            if name in line
        }
        return [by_step.get(self.began_at + step) for step in range(1, self.plan.in_all + 1)]


def documents_in(inputs: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of the documents in a trainer's batch, divided by packed lengths, by
    positions that restart, or by row.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    has_mask = mask is not None and mask.dim() == 2
    real = mask.bool() if has_mask else torch.ones_like(ids, dtype=torch.bool)
    flat = ids[real]
    lengths = inputs.get("packed_seq_lengths")
    if lengths is not None and int(lengths.sum()) == flat.numel():
        parts = lengths.tolist()
    elif positions is not None and positions.shape == ids.shape:
        starts = (positions[real] == 0).nonzero().flatten().tolist()
        parts = [end - start for start, end in zip(starts, [*starts[1:], flat.numel()])]
    else:
        parts = real.sum(1).tolist()
    return [part.tolist() for part in flat.cpu().split(parts) if len(part) > 1]
