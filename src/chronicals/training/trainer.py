"""ChronicalsTrainer: data, model and configuration in, a trained model out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import BatchStream, Tokenizer, TokenStore, filler_token
from chronicals.data.loader import plan_of
from chronicals.data.packing import PackPlan
from chronicals.distributed import Ranks
from chronicals.kernels.compilation import identify_compiler
from chronicals.models import PresentedModel, check_positions
from chronicals.objectives import build_objective
from chronicals.saving import save_model, text_files, write_folder
from chronicals.training import checkpoint
from chronicals.training.alike import fingerprint, prove_alike, shared_settings
from chronicals.training.audit import Coverage, FirstStepAudit
from chronicals.training.callbacks import Callback, MetricsFile, ProgressBar, read_metrics
from chronicals.training.errors import CheckpointError, Interrupted, TrainingError
from chronicals.training.evaluation import Evaluation, evaluate
from chronicals.training.heard import heard
from chronicals.training.length import Length, fit_batch, fit_learning_rate
from chronicals.training.metrics import Moment, PendingMetrics, StepMetrics
from chronicals.training.out_of_memory import saying_what_helps
from chronicals.training.precision import Precision
from chronicals.training.preparation import (
    Source,
    check_class,
    check_precision,
    one_device,
    open_stores,
    teach_generation_to_stop,
)
from chronicals.training.report import Report, Sample, data_reports
from chronicals.training.resume import checkpoint_to_resume, claimed, how_to_resume
from chronicals.training.run import Run, TrainingResult
from chronicals.training.run_checkpoints import RunCheckpoints
from chronicals.training.samples import Samples
from chronicals.training.session import Session, prepared
from chronicals.training.signals import heeding_signals
from chronicals.training.step import rate_factor, set_learning_rate
from chronicals.training.trackers import build_trackers

logger = logging.getLogger(__name__)

TAUGHT = (
    "objective", "sections", "train_on", "train_on_roles", "train_on_turns", "completions_as_chat", "max_seq_length",
    "overlong", "gate",
)  # fmt: skip
"""Fields of the configuration that decide which rows are let pass, and what of a row is trained."""

MAX_SKIPPED = 20
"""Steps in a row that may be skipped for a gradient that is not finite, while the fp16 loss scale adapts."""


class ChronicalsTrainer:
    """Trains a Hugging Face causal language model.

    Args:
        model: the model, on its device; ``device_map="auto"`` is fine as long as it uses one device.
        tokenizer: its tokenizer; ``pad_token = eos_token`` is fine.
        config: everything else; ``ChronicalsConfig()`` if None.
        callbacks: further callbacks; those for files and progress, and the trackers, are there anyway.

    Raises:
        ValueError: it is another kind of model, or the configuration cannot be honoured with it on this machine; the message
            names the field.
    """

    def __init__(self, model: Any, tokenizer: Any, config: ChronicalsConfig | None = None, callbacks: Sequence[Callback] = ()):
        self.model, self.tokenizer, self.config = model, tokenizer, config or ChronicalsConfig()
        self.ranks = Ranks.current()
        self.output_dir = self.config.output_dir
        check_class(model)
        self.device = one_device(model, self.ranks)
        check_precision(self.config, self.device)
        self.objective = build_objective(self.config)
        self.callbacks = [*self._own_callbacks(), *callbacks] if self.ranks.first else []
        self._others_call = bool(callbacks)
        self._stop: str | None = None
        self._session: Session | None = None

    def release_graphs(self) -> None:
        """Give back the memory of CUDA graphs, as a callback may ask between steps; the next ones run as usual and are captured
        anew."""
        if self._session is not None:
            self._session.release_graphs()

    def train(
        self, train_dataset: Source, eval_dataset: Source | None = None, resume: bool | str | Path = False
    ) -> TrainingResult:  # fmt: skip
        """Train, evaluate, write the model and the report.

        Args:
            train_dataset: a file or rows; see ``chronicals.data.read_records``.
            eval_dataset: held-out data; or ``validation_split`` takes a share of ``train_dataset``.
            resume: True goes on from the newest whole checkpoint in ``output_dir``, if there is one, exactly as if never
                stopped; the folder of a checkpoint, or of another run, goes on from there.

        Raises:
            DataError: the data would make training wrong.
            TrainingError: a loss or gradient is not a number, nothing is trained, or the card's memory is too small.
            CheckpointError: a checkpoint could not be written, ``output_dir`` holds another run, or one is writing there.
            ConfigurationError: the configuration cannot be honoured, or is not the same in all processes.
            Interrupted: stopped by a signal, after a checkpoint.
        """
        prove_alike(self.ranks, shared_settings(self.config))
        with heard(self.ranks.first), claimed(self.output_dir, self.ranks):
            return self._train(train_dataset, eval_dataset, checkpoint_to_resume(self.output_dir, resume, self.ranks))

    def _train(self, train_dataset: Source, eval_dataset: Source | None, resumed: Path | None) -> TrainingResult:
        self._stop = None
        model = self.model
        if self.device.type == "cuda":
            identify_compiler()
        train_store, eval_store = open_stores(
            train_dataset, eval_dataset, model.get_input_embeddings().weight.shape[0], self.tokenizer, self.config, self.ranks,
            reports=self.output_dir,
        )  # fmt: skip
        if eval_store is None and self.config.eval_steps is not None:
            raise ConfigurationError(
                f"eval_steps={self.config.eval_steps}: nothing is held out; give eval_dataset or validation_split"
            )
        if eval_store is None and self.config.keep == "best":
            raise ConfigurationError("keep='best': nothing is held out to tell which is; give eval_dataset or validation_split")
        check_positions(model, max(store.longest for store in (train_store, eval_store) if store is not None))
        plan = plan_of(train_store, self.config)
        with self._fitted_to(plan, resumed) as config, saying_what_helps(config, self.device):
            samples = Samples(model, self.tokenizer, eval_store or train_store, config.report_samples, self.output_dir)
            if self.ranks.first and resumed is None:
                samples.before()
            teach_generation_to_stop(model, self.tokenizer, chats=train_store.chats and config.objective != "pretraining")
            with prepared(model, config, self.objective, self.ranks) as session:
                result = self._run(session, train_store, plan, eval_store, resumed, samples)
        model.eval()
        return result

    @contextmanager
    def _fitted_to(self, plan: PackPlan, resumed: Path | None) -> Iterator[ChronicalsConfig]:
        """Within: the batch of the configuration is fitted to the data."""
        asked = self.config
        self.config = fit_batch(fit_learning_rate(asked, self.ranks, self.model), plan, self.ranks, resumed)
        try:
            yield self.config
        finally:
            self.config = asked

    def _run(
        self, session: Session, train_store: TokenStore, plan: PackPlan, eval_store: TokenStore | None, resumed: Path | None,
        samples: Samples,
    ) -> TrainingResult:  # fmt: skip
        config, model = self.config, self.model
        stream = self._stream(train_store, config.epochs, shuffle=True, plan=plan)
        run = Run(Length.of(config, plan, self.ranks.count).steps, self.output_dir)
        if "warmup_steps" in config.explicit and config.warmup_steps > run.total_steps:
            raise ConfigurationError(
                f"warmup_steps={config.warmup_steps} exceeds the {run.total_steps} steps of the run: the peak would never be "
                "reached"
            )
        saved = RunCheckpoints(model, self.tokenizer, config, self.ranks, eval_store is not None and config.keep != "last")
        if resumed is not None:
            saved.restore(resumed, run, session.optimizer, session.precision, stream)
        self._prove_that_ranks_are_alike(run, stream, eval_store)
        if resumed is None:
            self.ranks.first_does(samples.keep, OSError)
        run.trainable_share = self._trainable_share()
        with heeding_signals(self._told_to_stop), self._callbacks_around(run):
            session.before_update = saved.hold_update
            with saved, session.stepping():
                self._session = session
                self._loop(run, session, stream, eval_store, saved)
            self._session = None
            self._check_that_something_was_applied(run, session.precision)
            return self._finish(run, train_store, saved, samples.after)

    # --- the loop ------------------------------------------------------------------------------------------------

    def _loop(
        self, run: Run, session: Session, stream: BatchStream, eval_store: TokenStore | None, saved: RunCheckpoints
    ) -> None:  # fmt: skip
        optimizer, presented = session.optimizer, session.presented
        audit = FirstStepAudit(self.model, optimizer) if run.applied == 0 else None
        pending, began = None, Moment(self.device)
        self.model.train()

        for step in stream.steps(run.position, count=0 if self._gains_no_more(run) else run.total_steps - run.step):
            factor = rate_factor(self.config, run.step, run.total_steps)
            set_learning_rate(optimizer, factor)
            scalars = session.train_once(step, audit.see_gradients if audit else None)
            run.step, run.position = run.step + 1, step.state
            if audit:
                run.coverage = self._close_audit(audit, scalars)
                audit = None if run.coverage else FirstStepAudit(self.model, optimizer)  # once more for a step left out
            saved.prepare(run, optimizer)
            if pending:
                self._deliver(run, presented, pending)
            pending = PendingMetrics(
                scalars, began, step=run.step, learning_rate=self.config.learning_rate * factor,
                tokens=step.counts["tokens"], targets=step.counts["targets"],
                fill=step.counts["tokens"] / step.counts["slots"], epoch=stream.epoch(step.state),
            )  # fmt: skip
            began = pending.moment
            due = self._due(run, eval_store is not None, saved.failed)
            if due:
                self._deliver(run, presented, pending)
                pending = None
                if "evaluate" in due and self._evaluate(run, session, eval_store) and saved.keeps_best:
                    due.add("save")
                told, enough = self._stopped_anywhere(saved.failed), self._gains_no_more(run)  # told while it evaluated, too
                if "save" in due or told or enough:
                    saved.save(run, optimizer, session.precision, stream, self._about(stream.store))
                if told:
                    saved.finish()
                    raise Interrupted(f"{self._stop} after step {run.step}; {how_to_resume(self.output_dir)}")
                if enough:
                    after = "" if run.best_step is None else f", after step {run.best_step}"  # unknown to older checkpoints
                    lowest = f"the lowest held-out loss was {run.best_loss:.4f}{after}"
                    logger.info("stopped early after step %d: %s", run.step, lowest)
                    break
                began = Moment(self.device)
        saved.finish()

    def _due(self, run: Run, has_eval: bool, failed: bool) -> set[str]:
        """What is to be done after this step; anything at all waits for its metrics first."""
        last, due = run.step == run.total_steps, set()
        if has_eval and (last or (self.config.eval_steps and run.step % self.config.eval_steps == 0)):
            due.add("evaluate")
        if last or (self.config.save_steps and run.step % self.config.save_steps == 0):
            due.add("save")
        if self._stopped_anywhere(failed):
            due.add("stop")
        return due

    def _gains_no_more(self, run: Run) -> bool:
        patience = self.config.early_stopping_patience
        return patience is not None and run.evaluations_without_gain >= patience

    def _deliver(self, run: Run, presented: PresentedModel, pending: PendingMetrics) -> None:
        metrics = pending.arrive()
        self._guard(run, metrics)
        with self._as_it_came(presented):
            for callback in self.callbacks:
                callback.step_done(metrics)
        self._train_on()
        run.last_loss = metrics.loss

    def _guard(self, run: Run, metrics: StepMetrics) -> None:
        """Stop where going on would hide that nothing is learned.

        Raises:
            TrainingError: loss or gradient not finite (beyond what fp16 scaling mends), or the gradient is zero.
        """
        if metrics.skipped:
            run.skipped_in_a_row += 1
            mended = self.config.mixed_precision == "fp16" and run.skipped_in_a_row <= MAX_SKIPPED
            if not mended:
                applied = "in part" if "optimizer_in_backward" in self.config.memory_policies else "not"
                raise TrainingError(
                    f"step {metrics.step}: gradient norm {metrics.grad_norm}, loss {metrics.loss}: not finite. The step "
                    f"was {applied} applied. Lower learning_rate (now {self.config.learning_rate}), or look at the rows of "
                    f"this step; {how_to_resume(self.output_dir)}"
                )
            logger.warning("step %d: fp16 overflow, step skipped, loss scale halved", metrics.step)
            return
        run.skipped_in_a_row = 0
        run.applied += 1
        if not math.isfinite(metrics.loss):
            raise TrainingError(
                f"step {metrics.step}: loss {metrics.loss}: not a number, though its gradient is; look at the rows of this "
                f"step; {how_to_resume(self.output_dir)}"
            )
        if metrics.targets and metrics.grad_norm == 0.0:
            raise TrainingError(f"step {metrics.step}: every gradient is zero, nothing is trained (loss {metrics.loss})")

    def _check_that_something_was_applied(self, run: Run, precision: Precision) -> None:
        """Raises TrainingError where every step of the run was skipped, so that its weights are those it began with."""
        if run.step and not run.applied:
            raise TrainingError(
                f"none of the {run.step} steps was applied: the gradients of all of them overflow fp16, though the loss scale "
                f"has fallen to {float(precision.scale):g}. Begin anew with mixed_precision='bf16' or 'fp32', or let it fall "
                f"further in more than max_steps={run.total_steps}: {how_to_resume(self.output_dir)}"
            )

    def _close_audit(self, audit: FirstStepAudit, scalars: dict[str, torch.Tensor]) -> Coverage | None:
        if not scalars["applied"]:
            return None
        coverage = audit.coverage()
        logger.info("%s", coverage)
        try:
            coverage.check()
        except RuntimeError as error:
            raise TrainingError(str(error)) from None
        return coverage

    # --- before ----------------------------------------------------------------------------------------------------

    def _stream(self, store: TokenStore, epochs: int | None, shuffle: bool, plan: PackPlan | None = None) -> BatchStream:
        return BatchStream(
            store, self.config, filler_token(self.tokenizer, self.model.get_input_embeddings().weight.shape[0]), epochs=epochs,
            rank=self.ranks.rank, ranks=self.ranks.count, shuffle=shuffle, pin=self.device.type == "cuda", plan=plan,
        )  # fmt: skip

    def _prove_that_ranks_are_alike(self, run: Run, stream: BatchStream, eval_store: TokenStore | None) -> None:
        if self.ranks.count > 1:
            weights = (p for p in self.model.parameters() if p.device.type == self.device.type)
            facts = {"step": run.step, "position": run.position, "steps in all": run.total_steps, "best step": run.best_step}
            held_out = eval_store and eval_store.key
            data = {"training data": stream.store.key, "held-out data": held_out, "order": stream.fingerprint}
            prove_alike(self.ranks, {**data, **facts, "weights": fingerprint(weights)})

    def _trainable_share(self) -> float:
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)

    # --- held-out data and the end ---------------------------------------------------------------------------------

    def _about(self, store: TokenStore) -> dict[str, Any]:
        """What ``generate`` must know to ask as the model was taught, and ``evaluate`` to score what it was."""
        return {
            "kinds": store.kinds,
            "tokenization": Tokenizer.configured(self.tokenizer, self.config).fingerprint(),
            "taught": {field: getattr(self.config, field) for field in TAUGHT},
        }

    def _evaluate(self, run: Run, session: Session, store: TokenStore | None) -> bool:
        """Whether it is the best so far."""
        assert store is not None
        stream = self._stream(store, epochs=1, shuffle=False)
        evaluation = evaluate(session.presented, session.objective, stream, session.precision, self.ranks)
        if not math.isfinite(evaluation.loss):
            raise TrainingError(
                f"held-out loss after step {run.step}: {evaluation.loss}, not a number: the weights were damaged by training, "
                "which a lower learning_rate avoids, or what the model predicts for the held-out rows overflows; look at both. "
                f"This step is not saved; {how_to_resume(self.output_dir)}"
            )
        better = run.evaluated(evaluation)
        with self._as_it_came(session.presented):
            for callback in self.callbacks:
                callback.evaluated(run.step, evaluation)
        self._train_on()
        return better

    def _finish(
        self, run: Run, store: TokenStore, saved: RunCheckpoints, answers: Callable[[], list[Sample]]
    ) -> TrainingResult:  # fmt: skip
        model_dir, report = self.output_dir / checkpoint.MODEL, self.output_dir / "report.html"
        model_step = saved.restore_best(run) if saved.keeps_best else run.step
        evaluation = run.best_evaluation if model_step == run.best_step else run.evaluation

        def write() -> None:
            about, beside = self._about(store), text_files(self.model, self.tokenizer)
            write_folder(model_dir, lambda aside: save_model(aside, self.model, beside, about))
            try:
                self._write_report(report, run, model_step, evaluation, answers())
            except Exception as error:  # the model is there
                logger.error("%s: the report cannot be written (%s: %s)", report, type(error).__name__, error)
                with suppress(OSError):
                    report.unlink()

        self.ranks.first_does(write, CheckpointError)
        if model_step != run.step:
            logger.info("%s holds the weights of step %d, which had the lowest held-out loss", model_dir, model_step)
        return TrainingResult(run.step, model_step, run.last_loss, evaluation, run.coverage, model_dir, report)

    def _write_report(
        self, file: Path, run: Run, model_step: int, evaluation: Evaluation | None, answers: list[Sample]
    ) -> None:  # fmt: skip
        metrics = read_metrics(self.output_dir / "metrics.jsonl")
        facts = {
            "model": self.model.config._name_or_path or type(self.model).__name__,
            "steps": run.step,
            "weights written": f"of step {model_step}",
            "trainable parameters": f"{run.trainable_share:.2%}",
            "last training loss": f"{run.last_loss:.4f}",
            **({"held-out loss": f"{evaluation.loss:.4f}"} if evaluation else {}),
            "processes": self.ranks.count,
        }
        title, data = f"chronicals: {self.output_dir.name}", data_reports(self.output_dir)
        Report(title, facts, metrics, data, self.config, answers).write(file, self.device)

    # --- around ----------------------------------------------------------------------------------------------------

    def _own_callbacks(self) -> list[Callback]:
        """Trackers first: where they go on from, they read in the metrics of the part before."""
        return [*build_trackers(self.config), MetricsFile(self.output_dir / "metrics.jsonl"), ProgressBar()]

    def _as_it_came(self, presented: PresentedModel) -> AbstractContextManager[None]:
        """Within: the model attends as it did before the run, for a user's callback that calls it."""
        return presented.attending_as_before() if self._others_call else nullcontext()

    def _train_on(self) -> None:
        """Whatever mode a user's callback left the model in."""
        if self._others_call:
            self.model.train()

    @contextmanager
    def _callbacks_around(self, run: Run) -> Iterator[None]:
        began: list[Callback] = []

        def begin() -> None:
            for callback in self.callbacks:
                callback.run_began(run)
                began.append(callback)

        try:
            self.ranks.first_does(begin, TrainingError)
            yield
            run.outcome = "finished"
        except (Interrupted, KeyboardInterrupt):
            run.outcome = "interrupted"
            raise
        finally:
            with ExitStack() as ending:
                for callback in reversed(began):
                    ending.callback(callback.run_ended, run)

    def _told_to_stop(self, reason: str) -> None:
        self._stop = reason

    def _stopped_anywhere(self, failed: bool = False) -> bool:
        """Whether any rank was told to stop, or could not write a checkpoint, which is raised when the next is begun; all must
        save together."""
        told_here = failed or self._stop is not None
        if self.ranks.count == 1:
            return told_here
        told = self.ranks.sum(torch.tensor(float(told_here), device=self.device))
        stopped = bool(told.item())
        if stopped and self._stop is None:
            self._stop = "stopped by a signal to another rank"
        return stopped  # a signal to this rank since then counts the next time, for all
