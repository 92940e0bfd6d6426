"""Checkpoints of a run, which all ranks write and read together.

The first rank writes and reads, and sends what it read to the others.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Steps
from chronicals.distributed import Mesh, RankFiles, ShardedAdamW, WorkEnded, is_divided, whole_parts
from chronicals.models.base_format import BaseFormat
from chronicals.optimizers import FusedAdamW
from chronicals.saving import Background, Staging, save_beside, save_model, text_files
from chronicals.training.errors import CheckpointError
from chronicals.training.run import checkpoint
from chronicals.training.run.earlier_run import EarlierRun
from chronicals.training.run.length import PROCESSES
from chronicals.training.run.run_state import Run
from chronicals.training.step.optimizer import Precision

logger = logging.getLogger(__name__)

ORDERED_BY = (
    "seed",
    "use_sequence_packing",
    "packing_strategy",
    "max_documents",
    "pack_parts",
    "context_parallel",
    "validation_split",
    "validation_seed",
)
"""Fields of the configuration that decide the order of documents."""

OF_A_START = {"overwrite"}
"""Fields that matter only when a run begins."""


class RunCheckpoints(AbstractContextManager["RunCheckpoints"]):
    """Checkpoints of a run of ``model`` in ``config.output_dir``.

    Args:
        keeps_best: whether the checkpoint of the step with the lowest held-out loss is kept.
        earlier: run in the folder that makes way for the first checkpoint, on the first rank; None
            for none.

    Attributes:
        divided: writes the model's files if no process has whole weights; None if all have them.
        written: step and folder of each finished checkpoint that callbacks do not know yet, on the
            first rank.
        hold_update: waits, between the backward pass and the update, until the tensors of a
            checkpoint are copied.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: ChronicalsConfig,
        ranks: Mesh,
        keeps_best: bool,
        earlier: EarlierRun | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.ranks = ranks
        self.keeps_best = keeps_best
        self._earlier = earlier
        self._staging = Staging(
            next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
        )
        self.hold_update = self._staging.hold_update
        self._prepared = False
        self._background = Background(self._staging.device)
        self._ended: WorkEnded | None = None
        self._text_files: dict[str, bytes] = {}
        dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
        self.divided = (
            checkpoint.DividedModel(model, dtype)
            if any(is_divided(p) for p in model.parameters())
            else None
        )
        self._optimizer: FusedAdamW | None = None
        self.written = deque[tuple[int, Path]]()

    def write_model(
        self, aside: Path, step: int, text_files: Mapping[str, bytes], about: Mapping[str, Any]
    ) -> None:
        """Write the model of a step, on the first rank.

        It is from this process if it has whole weights, else from the files that all ranks wrote
        into the step's checkpoint.
        """
        if self.divided is None:
            save_model(aside, self.model, text_files, about)
        else:
            shutil.copytree(
                self.folder_of(step) / checkpoint.MODEL,
                aside,
                copy_function=_link_or_copy,
                dirs_exist_ok=True,
            )
            save_beside(aside, text_files, about)

    def folder_of(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.config.output_dir / checkpoint.CHECKPOINTS / checkpoint.name_of(step)

    def restore(
        self, folder: Path, run: Run, optimizer: FusedAdamW, precision: Precision, steps: Steps
    ) -> None:
        """Restore the state of the run on every rank, bit for bit.

        Raises:
            CheckpointError: the checkpoint is of another run: other data, another order of
                documents, another model.
        """
        optimizer_states: dict[str, dict[str, Tensor]] = {}
        loaded = self.ranks.writer_does(
            lambda: self._load(folder, optimizer, steps, optimizer_states), CheckpointError
        )
        state = loaded["state"]
        random_states = loaded["random_states"]
        if self.divided is not None:
            assert isinstance(optimizer, ShardedAdamW)
            checkpoint.load_divided(folder, self.model, optimizer, self.ranks)
        else:
            self._send_weights()
            # Then the optimizer states that the first rank has read, weight by weight.
            trained = checkpoint.trained(self.model) if self.ranks.count > 1 else ()
            for name, parameter in trained:
                sent = optimizer.empty_states(parameter)
                for part, tensor in optimizer_states.get(name, {}).items():
                    # An fp32 weight has no lower half; a run with divided bf16 weights may store one.
                    if part in sent:
                        sent[part].copy_(tensor)
                self.ranks.same_weights(sent.values())
                optimizer.load_state(parameter, sent)
        states = {
            name: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
            for name, text in random_states.items()
        }
        checkpoint.restore_random_states(states, self.ranks.rank, folder)
        precision.load_state(state["precision"])
        run.load_state(state)
        if self.keeps_best and not self._has_best(run):
            # The best of the later steps replaces the best step, whose weights are gone.
            run.best_loss = float("inf")
            run.best_step = None
            run.best_evaluation = None
        left = steps.left(run.position)
        if left is not None:  # steps may have another number of packs than before
            run.total_steps = run.step + left
        logger.info("resumed from %s: %d of %d steps are done", folder, run.step, run.total_steps)

    def _load(
        self,
        folder: Path,
        optimizer: FusedAdamW,
        steps: Steps,
        states: dict[str, dict[str, Tensor]],
    ) -> dict[str, Any]:
        """Load weights and optimizer states on this rank, and return the rest as JSON.

        Optimizer states are put into ``states``, too.
        """
        state = checkpoint.load_state(folder)
        self._check_continuity(folder, state, steps)
        if self.divided is None:
            checkpoint.load_checkpoint_weights(folder, self.model)
            states.update(checkpoint.load_optimizer(folder, self.model, optimizer))
        random_states = load_file(folder / checkpoint.RNG)
        return {
            "state": state,
            "random_states": {
                name: tensor.numpy().tobytes().hex() for name, tensor in random_states.items()
            },
        }

    def _check_continuity(self, folder: Path, state: Mapping[str, Any], steps: Steps) -> None:
        """Check that the run goes on as it began; warn of other fields that were changed.

        Data, order, base and kind of optimizer states must be the same.
        """
        earlier_version = state["data"] in steps.earlier_data
        if state["data"] != steps.data and not earlier_version:
            raise CheckpointError(
                f"{folder}: was trained on other data (or another tokenizer, template or "
                "max_seq_length); resume with "
                "what the run began with, or choose another output_dir"
            )
        in_8bit = state["config"].get("use_8bit_optimizer", False)
        if in_8bit != self.config.use_8bit_optimizer:
            kind = "8 bits" if in_8bit else "fp32 or bf16"
            raise CheckpointError(
                f"{folder}: its optimizer states are in {kind}, so use_8bit_optimizer="
                f"{not in_8bit} cannot go on with them; resume with use_8bit_optimizer={in_8bit}, "
                "or begin a new run from its model in another output_dir"
            )
        about = state.get("about", {})
        if "base" in about:  # older versions may not describe it
            there = BaseFormat.read(about["base"])
            here = BaseFormat.of(self.model)
            difference = None
            if there is not None:
                difference = there.difference(here)
            elif here is not None:
                difference = f"nothing was quantised there, here {here}"
            if difference is not None:
                raise CheckpointError(
                    f"{folder}: its adapters were trained over another base ({difference}); resume "
                    "with the model, quantization and mixed_precision that the run began with, or "
                    "choose another output_dir"
                )
        before = {"model": state["model"], **state["config"]}
        now = {"model": self.model.config._name_or_path, **self.config.to_dict()}
        changed = {
            name: f"{name}={now[name]!r} (before: {before[name]!r})"
            for name in sorted((now.keys() & before.keys()) - OF_A_START)
            if now[name] != before[name]
        }
        if state["order"] != steps.fingerprint:
            otherwise = (
                "this version tokenises the data otherwise"
                if earlier_version
                else "other rows are held out"
            )
            reasons = [changed[name] for name in ORDERED_BY if name in changed] or [otherwise]
            raise CheckpointError(
                f"{folder}: documents would come in another order than before "
                f"({', '.join(reasons)}), some never, others "
                "twice; resume with what the run began with, or choose another output_dir"
            )
        if changed:
            logger.warning("resuming with %s", ", ".join(changed.values()))

    def _send_weights(self) -> None:
        """Send the first rank's weights to all ranks.

        Shards of divided frozen weights are not sent, nor are weights in host memory, which are
        frozen and the same everywhere.
        """
        buffers = (buffer for buffer in self.model.buffers() if buffer.is_floating_point())
        trained = {p.device for p in self.model.parameters() if p.requires_grad}
        sent = (*whole_parts(self.model.parameters()), *buffers)
        self.ranks.same_weights(tensor for tensor in sent if tensor.device in trained)

    def prepare(self, run: Run, optimizer: FusedAdamW) -> None:
        """Start to allocate the memory for checkpoints that are written before the run ends.

        Called after each step; only the first call has an effect.
        """
        if self._prepared:
            return
        self._prepared = True
        midway = self.keeps_best or (self.config.save_steps or run.total_steps) < run.total_steps
        writes = self.ranks.writer or isinstance(optimizer, ShardedAdamW)
        if midway and (writes or self.ranks.count > 1):
            state = self._state(optimizer, {}, {})
            if self._fits(state):
                self._staging.prepare(state.changing().values())

    def _state(
        self, optimizer: FusedAdamW, random: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> checkpoint.CheckpointState:
        """Return the state that this rank writes: the tensors themselves, no copies."""
        weights: dict[str, Tensor] = {}
        if self.ranks.writer and self.divided is None:
            weights = self.model.state_dict(keep_vars=True)
        states: dict[str, Any] = {}
        # The first rank writes; all ranks do if states are sharded.
        if self.ranks.writer or isinstance(optimizer, ShardedAdamW):
            states = checkpoint.optimizer_states(self.model, optimizer)
        return checkpoint.CheckpointState(weights, states, random, facts)

    def save(
        self,
        run: Run,
        optimizer: FusedAdamW,
        precision: Precision,
        steps: Steps,
        about: Mapping[str, Any],
    ) -> None:
        """Start the checkpoint of this step, whose metrics have arrived; all ranks must call it.

        Tensors are copied while the next forward and backward pass run, and a thread writes them.
        Training waits for the last checkpoint of a run, and if host memory is too small for a copy.
        The previous checkpoint is finished first.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
        """
        self.finish()
        self._optimizer = optimizer
        random = checkpoint.random_states(self.ranks)
        facts = {
            **run.state(),
            "data": steps.data,
            "order": steps.fingerprint,
            "precision": precision.state(),
            "model": self.model.config._name_or_path,
            "config": self.config.to_dict(),
            PROCESSES: self.ranks.data_count,
            "about": about,
        }
        state = self._state(optimizer, random, facts)
        fits = self._fits(state)
        if not fits and run.step != run.total_steps:
            logger.warning(
                "host memory is too small for a copy of the state: training waits while "
                "checkpoints are written"
            )
        waits = run.step == run.total_steps or not fits
        files = (
            RankFiles(self.ranks, CheckpointError) if isinstance(optimizer, ShardedAdamW) else None
        )
        ended = WorkEnded() if self.ranks.count > 1 else None

        def begin() -> None:
            self._text_files = self._text_files or text_files(self.model, self.tokenizer)
            best = run.best_step if self.keeps_best else None
            self._start(state, waits, partial(self._write, run.step, best, files), ended)

        self.ranks.writer_does(begin, CheckpointError)
        self._ended = ended
        if files is not None and not self.ranks.writer:
            self._start(state, waits, partial(self._deliver, files))
        if waits:
            self.finish()

    def _fits(self, state: checkpoint.CheckpointState) -> bool:
        """Return whether the host memory of each machine holds the copies of its ranks.

        All ranks must call it.
        """
        host = socket.gethostname()
        needed = self._staging.needed(state.changing().values())
        sizes = self.ranks.gather_values([host, needed])
        others = sum(size for name, size in sizes if name == host) - needed
        return all(self.ranks.gather_values(self._staging.fits(state.changing().values(), others)))

    def _start(
        self,
        state: checkpoint.CheckpointState,
        waits: bool,
        write: Callable[[checkpoint.CheckpointState], None],
        ended: WorkEnded | None = None,
    ) -> None:
        """Start to write a state, from copies unless training waits.

        Args:
            state: state that this rank writes.
            waits: True if training waits until it is written.
            write: writes the state.
            ended: signals to the other ranks that it is written; None if nobody waits.
        """
        if waits:
            if self._staging.device.type == "cuda":
                torch.cuda.synchronize(self._staging.device)
            work = partial(write, state)
        else:
            work = partial(self._write_staged, write, state.staged(self._staging))
        self._background.start(work if ended is None else partial(ended.after, work))

    def _write(
        self,
        step: int,
        best: int | None,
        files: RankFiles | None,
        state: checkpoint.CheckpointState,
    ) -> None:
        """Write the checkpoint of a step, on the first rank, with the files of the other ranks."""
        write_divided = None
        if self.divided is not None and files is not None:
            write_divided = partial(
                self.divided.write, name=checkpoint.MODEL, files=files, text_files=self._text_files
            )
        earlier = self._earlier
        ready = None
        if earlier is not None and earlier.kept:
            ready = partial(earlier.give_way_to, checkpoint.name_of(step))
        try:
            folder = checkpoint.save_checkpoint(
                self.config.output_dir,
                step,
                self.model,
                self._text_files,
                state,
                self.config.save_total_limit,
                best,
                self.ranks,
                nullcontext if files is None else files.collecting,
                write_divided,
                ready,
            )
        except BaseException:  # Ctrl-C too: other ranks wait for these files
            if files is not None:
                files.give_up()
            raise
        if earlier is not None and earlier.kept:
            earlier.discard()
        self.written.append((step, folder))

    def _deliver(self, files: RankFiles, state: checkpoint.CheckpointState) -> None:
        """Write this rank's part of the checkpoint, and hand it to the first rank."""
        share = (
            None if self.divided is None else partial(self.divided.write_share, checkpoint.MODEL)
        )
        files.deliver(lambda folder: state.write_optimizer(folder, self.ranks), share)

    def _write_staged(
        self,
        write: Callable[[checkpoint.CheckpointState], object],
        state: checkpoint.CheckpointState,
    ) -> None:
        with self._staging.reading():
            write(state)

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is written; all ranks must call it.

        Raises:
            CheckpointError: it could not be written.
        """
        self.ranks.writer_does(self._background.wait, CheckpointError)
        self._background.wait()

    @property
    def failed(self) -> bool:
        """Return whether this rank failed to write a checkpoint; ``finish`` raises the error."""
        return self._background.error is not None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the checkpoint that was begun, however the run ended.

        No rank leaves before that: a rank that ends takes the others with it, the first one while
        it writes.
        """
        if kind is not None and self._background.busy:
            logger.warning("finishing the checkpoint that was begun")
        try:
            self._background.wait()
        except Exception as error:  # must not replace the run's own error
            logger.error("%s", error)
        if kind is not None and self._ended is not None and not self.ranks.writer:
            self._ended.wait()
        self._staging.release()

    def _has_best(self, run: Run) -> bool:
        """Return whether the first rank's folder holds the weights of the best step.

        Older checkpoints do not name that step.
        """
        if run.best_step is None:
            if math.isfinite(run.best_loss):
                logger.warning(
                    "the checkpoint does not say after which step the held-out loss was lowest "
                    "(%.4f); the best is looked for "
                    "anew from here on",
                    run.best_loss,
                )
            return False
        best = self.folder_of(run.best_step)
        damage = self.ranks.writer_does(lambda: checkpoint.check_checkpoint(best), CheckpointError)
        if damage is not None:
            logger.warning(
                "%s, with the lowest held-out loss so far (%.4f): %s; the best is looked for anew "
                "from here on",
                best,
                run.best_loss,
                damage,
            )
        return damage is None

    def restore_best(self, run: Run) -> int:
        """Load the weights of the step with the lowest held-out loss, unless it is the last one.

        It returns the step whose weights the model has now.
        """
        if run.best_step is None or run.best_step == run.step:
            return run.step
        best = self.folder_of(run.best_step)

        def load() -> bool:
            damage = checkpoint.check_checkpoint(best)
            if damage:
                logger.error(
                    "%s: %s; the model of the last step is written instead of the best",
                    best,
                    damage,
                )
                return False
            if self.divided is not None:
                return True
            try:
                checkpoint.load_checkpoint_weights(best, self.model)
            except CheckpointError as error:  # raised before any weight is changed
                logger.error("%s; the model of the last step is written instead of the best", error)
                return False
            return True

        if not self.ranks.writer_does(load, CheckpointError):
            return run.step
        if self.divided is not None:
            assert isinstance(self._optimizer, ShardedAdamW)
            checkpoint.load_divided(best, self.model, self._optimizer, self.ranks, states=False)
        else:
            self._send_weights()
        return run.best_step


def _link_or_copy(source: str, target: str) -> str:
    """Copy a file, or make a hard link to a weight file if the file system has hard links.

    Weight files are never written again.
    """
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return target
        except OSError:
            logger.info(
                "%s: is copied, for %s can have no second name on this file system", target, source
            )
    return str(shutil.copy2(source, target))
