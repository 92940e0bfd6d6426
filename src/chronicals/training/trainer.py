"""ChronicalsTrainer: data, model and configuration in, a trained model out."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import BatchStream, DataError, Tokenizer, TokenStore, stop_token_ids
from chronicals.data.sources import Record
from chronicals.distributed import Ranks
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import enable_gradient_checkpointing
from chronicals.models import PresentedModel, input_device, present
from chronicals.objectives import OBJECTIVES
from chronicals.optimizers import FusedAdamW, create_lora_plus_optimizer, learning_rate_factor
from chronicals.training import checkpoint
from chronicals.training.audit import Coverage, FirstStepAudit
from chronicals.training.callbacks import Callback, MetricsFile, ProgressBar, TensorBoard, read_metrics
from chronicals.training.decisions import Decision, decide
from chronicals.training.errors import CheckpointError, Interrupted, TrainingError
from chronicals.training.evaluation import Evaluation, evaluate
from chronicals.training.metrics import Moment, PendingMetrics, StepMetrics
from chronicals.training.precision import Precision
from chronicals.training.report import write_report
from chronicals.training.step import train_step

logger = logging.getLogger(__name__)

Source = str | Path | Iterable[Record]

MAX_SKIPPED = 20
"""Steps in a row that may be skipped for a gradient that is not finite, while the fp16 loss scale adapts."""


@dataclass
class Run:
    """Where a run stands.

    Attributes:
        step: steps done.
        position: packs consumed by all ranks.
        total_steps: steps after which it is done.
        output_dir: where it is written.
        trainable_share: of all parameters.
        best_loss, evaluations_without_gain: for early stopping.
        skipped_in_a_row: steps without an update just now.
    """

    total_steps: int
    output_dir: Path
    step: int = 0
    position: int = 0
    trainable_share: float = 0.0
    best_loss: float = float("inf")
    evaluations_without_gain: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class TrainingResult:
    """What came out.

    Attributes:
        steps: done in all, earlier parts of a resumed run included.
        loss: of the last step.
        evaluation: on held-out data after the last step, if there was any.
        coverage: the first-step audit; None where the run was resumed past it.
        model_dir: the trained model (or adapter) with its tokenizer.
        report: the page with the curves.
    """

    steps: int
    loss: float
    evaluation: Evaluation | None
    coverage: Coverage | None
    model_dir: Path
    report: Path


class ChronicalsTrainer:
    """Trains a Hugging Face causal language model.

    Args:
        model: the model, on its device; ``device_map="auto"`` is fine as long as it uses one device.
        tokenizer: its tokenizer; ``pad_token = eos_token`` is fine.
        config: everything else; ``ChronicalsConfig()`` if None.
        callbacks: further callbacks; those for files, progress and TensorBoard are always there.

    Raises:
        ValueError: the configuration cannot be honoured with this model on this machine; the message names the field.
    """

    def __init__(self, model: Any, tokenizer: Any, config: ChronicalsConfig | None = None, callbacks: Sequence[Callback] = ()):
        self.model, self.tokenizer, self.config = model, tokenizer, config or ChronicalsConfig()
        self.ranks = Ranks.current()
        self.output_dir = self.config.output_dir
        self.device = _one_device(model, self.ranks)
        _check_precision(self.config, self.device)
        self.objective = OBJECTIVES[self.config.objective]()
        self.callbacks = [*self._own_callbacks(), *callbacks] if self.ranks.first else []
        self._stop: str | None = None

    def train(self, train_dataset: Source, eval_dataset: Source | None = None, resume: bool = False) -> TrainingResult:
        """Train, evaluate, write the model and the report.

        Args:
            train_dataset: a file or rows; see ``chronicals.data.read_records``.
            eval_dataset: held-out data; else ``validation_split`` takes a share of ``train_dataset``.
            resume: go on from the newest whole checkpoint in ``output_dir``, exactly as if never stopped.

        Raises:
            DataError: the data would make training wrong.
            TrainingError: a loss or gradient is not a number, or nothing is trained.
            CheckpointError: a checkpoint could not be written, or ``output_dir`` holds another run.
            Interrupted: stopped by a signal, after a checkpoint.
        """
        self._refuse_to_overwrite(resume)
        train_store, eval_store = self._stores(train_dataset, eval_dataset)
        torch.manual_seed(self.config.seed)
        presented = self._prepare_model()
        precision = Precision(self.config.mixed_precision, self.device)
        optimizer = self._optimizer(precision)
        stream = self._stream(train_store, self.config.num_epochs, shuffle=True)
        run = Run(stream.steps_in_all or self.config.max_steps, self.output_dir)
        torch.manual_seed(self.config.seed + self.ranks.rank)
        if resume:
            self._resume(run, optimizer, precision, train_store)
        run.trainable_share = self._trainable_share()
        with presented.attending_documents(), self._signals(), self._callbacks_around(run):
            result = self._loop(run, presented, precision, optimizer, stream, train_store, eval_store)
        self.model.eval()
        return result

    # --- the loop ------------------------------------------------------------------------------------------------

    def _loop(
        self, run: Run, presented: PresentedModel, precision: Precision, optimizer: FusedAdamW, stream: BatchStream,
        train_store: TokenStore, eval_store: TokenStore | None,
    ) -> TrainingResult:  # fmt: skip
        config, parameters = self.config, [p for p in self.model.parameters() if p.requires_grad]
        audit = FirstStepAudit(self.model, optimizer) if run.step == 0 else None
        coverage, evaluation, pending, last_loss = None, None, None, float("nan")
        began = Moment(self.device)
        self.model.train()

        for step in stream.steps(run.position, count=run.total_steps - run.step):
            rate = self._set_learning_rate(optimizer, run)
            scalars = train_step(
                presented, self.objective, step, parameters, optimizer, precision, self.ranks, config.max_grad_norm,
                inspect_gradients=audit.see_gradients if audit else None,
            )  # fmt: skip
            run.step, run.position = run.step + 1, step.position
            if audit:
                coverage, audit = self._close_audit(audit, scalars), None
            if pending:
                last_loss = self._deliver(run, pending)
            pending = PendingMetrics(
                scalars, began, step=run.step, learning_rate=rate, tokens=step.counts.tokens, targets=step.counts.targets,
                fill=step.counts.tokens / step.counts.slots, epoch=stream.epoch_at(step.position),
            )  # fmt: skip
            began = pending.moment
            due = self._due(run, eval_store is not None)
            if due:
                last_loss, pending = self._deliver(run, pending), None
                if "evaluate" in due:
                    evaluation = self._evaluate(run, presented, precision, eval_store)
                if "save" in due or self._stop:
                    self._save(run, optimizer, precision, train_store)
                if self._stop:
                    raise Interrupted(f"{self._stop} after step {run.step}; {self._how_to_resume()}")
                if config.early_stopping_patience and run.evaluations_without_gain >= config.early_stopping_patience:
                    logger.info("stopped early after step %d: no better held-out loss", run.step)
                    break
                began = Moment(self.device)
        return self._finish(run, last_loss, evaluation, coverage, train_store)

    def _due(self, run: Run, has_eval: bool) -> set[str]:
        """What is to be done after this step; anything at all waits for its metrics first."""
        last, due = run.step == run.total_steps, set()
        if has_eval and (last or (self.config.eval_steps and run.step % self.config.eval_steps == 0)):
            due.add("evaluate")
        if last or (self.config.save_steps and run.step % self.config.save_steps == 0):
            due.add("save")
        if self._stopped_anywhere():
            due.add("stop")
        return due

    def _deliver(self, run: Run, pending: PendingMetrics) -> float:
        metrics = pending.arrive()
        self._guard(run, metrics)
        for callback in self.callbacks:
            callback.step_done(metrics)
        return metrics.loss

    def _guard(self, run: Run, metrics: StepMetrics) -> None:
        """Stop where going on would hide that nothing is learned.

        Raises:
            TrainingError: loss or gradient not finite (beyond what fp16 scaling mends), or the gradient is zero.
        """
        if metrics.skipped:
            run.skipped_in_a_row += 1
            mended = self.config.mixed_precision == "fp16" and run.skipped_in_a_row <= MAX_SKIPPED
            if not mended:
                raise TrainingError(
                    f"step {metrics.step}: gradient norm {metrics.grad_norm}, loss {metrics.loss}: not finite. The step "
                    f"was not applied. Lower learning_rate (now {self.config.learning_rate}), or look at the rows of "
                    f"this step; {self._how_to_resume()}"
                )
            logger.warning("step %d: fp16 overflow, step skipped, loss scale halved", metrics.step)
            return
        run.skipped_in_a_row = 0
        if metrics.targets and metrics.grad_norm == 0.0:
            raise TrainingError(f"step {metrics.step}: every gradient is zero, nothing is trained (loss {metrics.loss})")

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

    def _stores(self, train_dataset: Source, eval_dataset: Source | None) -> tuple[TokenStore, TokenStore | None]:
        """Tokenised data, checked; the report of the gate is logged."""
        config, tokenizer = self.config, Tokenizer(self.tokenizer, self.config.objective)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        stores = []
        for name, source in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if source is None:
                continue
            store = TokenStore.build(source, tokenizer, config.max_seq_length, config.cache_dir, builder=self.ranks.first)
            for number, line in enumerate(store.report.lines()):
                logger.log(logging.WARNING if number else logging.INFO, "%s: %s", name, line)
            store.report.check(str(source) if isinstance(source, (str, Path)) else name, config.max_masked_rows)
            if store.max_id >= vocabulary:
                raise DataError(
                    f"{name}: token id {store.max_id} is outside the model's embedding of {vocabulary} rows; the "
                    "tokenizer is not this model's, or model.resize_token_embeddings was not called"
                )
            stores.append(store)
        if eval_dataset is None and config.validation_split:
            return stores[0].split(config.validation_split, config.seed)
        return stores[0], stores[1] if len(stores) > 1 else None

    def _stream(self, store: TokenStore, epochs: int | None, shuffle: bool) -> BatchStream:
        return BatchStream(
            store, self.config, self.tokenizer.pad_token_id or 0, epochs=epochs, rank=self.ranks.rank,
            ranks=self.ranks.count, shuffle=shuffle, pin=self.device.type == "cuda",
        )  # fmt: skip

    def _prepare_model(self) -> PresentedModel:
        """Adapters, the way in, what runs of what is permitted; logged with the reasons."""
        config, model = self.config, self.model
        if config.use_lora and not hasattr(model, "chronicals_lora"):
            apply_lora(
                model,
                LoRAConfig(
                    config.lora_rank,
                    config.lora_alpha,
                    config.lora_dropout,
                    config.lora_target_modules,
                    config.use_rslora,
                ),
            )
        presented = present(model, fused_head=config.use_fused_kernels)
        decisions = decide(config, presented)
        for decision in decisions.values():
            logger.info("%s", decision)
        self._carry_out(decisions)
        if self.tokenizer.chat_template is not None or self.tokenizer.eos_token_id is not None:
            self._teach_generation_to_stop()
        self.ranks.same_weights(model.parameters())
        return presented

    def _carry_out(self, decisions: dict[str, Decision]) -> None:
        if decisions["use_gradient_checkpointing"].runs:
            enable_gradient_checkpointing(self.model)
        if decisions["use_torch_compile"].runs:
            for layer in self.model.get_decoder().layers:
                layer.compile(dynamic=False)

    def _teach_generation_to_stop(self) -> None:
        """The stop token that is trained is where generation ends, also for whoever loads the model."""
        generation = self.model.generation_config
        known = generation.eos_token_id
        known = [] if known is None else [known] if isinstance(known, int) else list(known)
        generation.eos_token_id = known + [stop for stop in stop_token_ids(self.tokenizer) if stop not in known]
        if self.tokenizer.pad_token_id is not None:
            generation.pad_token_id = self.tokenizer.pad_token_id

    def _optimizer(self, precision: Precision) -> FusedAdamW:
        config = self.config
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigurationError("the model has no parameter that requires a gradient; unfreeze some or set use_lora=True")
        options: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
        if hasattr(self.model, "chronicals_lora") and config.use_lora_plus:
            optimizer = create_lora_plus_optimizer(
                self.model, config.learning_rate, config.lora_plus_ratio, config.weight_decay, **options
            )
        else:
            groups = [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
            ]
            optimizer = FusedAdamW([g for g in groups if g["params"]], lr=config.learning_rate, **options)
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        precision.prepare(self.model, optimizer)
        if config.gradient_accumulation_steps > 1 or self.ranks.count > 1:
            for parameter in trained:
                parameter.grad_dtype = torch.float32
        return optimizer

    def _set_learning_rate(self, optimizer: FusedAdamW, run: Run) -> float:
        config = self.config
        warmup = config.warmup_steps
        if "warmup_steps" not in config.explicit:
            warmup = min(warmup, run.total_steps // 10)
        factor = learning_rate_factor(
            config.lr_scheduler, run.step, run.total_steps, warmup, config.min_lr_ratio, config.wsd_decay_ratio
        )
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        return config.learning_rate * factor

    def _trainable_share(self) -> float:
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)

    # --- checkpoints and the end -----------------------------------------------------------------------------------

    def _refuse_to_overwrite(self, resume: bool) -> None:
        found = checkpoint.checkpoints(self.output_dir)
        if found and not resume:
            raise CheckpointError(
                f"output_dir={str(self.output_dir)!r} holds a run ({found[0].name}): {self._how_to_resume()}, or choose "
                "another output_dir"
            )

    def _how_to_resume(self) -> str:
        return f"go on with train(..., resume=True), or chronicals train --resume --output-dir {self.output_dir}"

    def _resume(self, run: Run, optimizer: FusedAdamW, precision: Precision, store: TokenStore) -> None:
        folder = checkpoint.newest_valid(self.output_dir)
        if folder is None:
            logger.info("%s: no whole checkpoint, the run begins anew", self.output_dir)
            return
        state = checkpoint.load_state(folder)
        if state["data"] != store.key:
            raise CheckpointError(
                f"{folder}: was trained on other data (or another tokenizer, template or max_seq_length); resume with "
                "what the run began with, or choose another output_dir"
            )
        checkpoint.load_checkpoint(folder, self.model, optimizer)
        precision.load_state(state["precision"])
        run.step, run.position = state["step"], state["position"]
        run.best_loss, run.evaluations_without_gain = state["best_loss"], state["evaluations_without_gain"]
        logger.info("resumed from %s", folder)

    def _save(self, run: Run, optimizer: FusedAdamW, precision: Precision, store: TokenStore) -> None:
        if self.ranks.first:
            state = {
                "position": run.position,
                "data": store.key,
                "precision": precision.state(),
                "best_loss": run.best_loss,
                "evaluations_without_gain": run.evaluations_without_gain,
                "config": self.config.to_dict(),
                "about": self._about(store),
            }
            checkpoint.save_checkpoint(
                self.output_dir, run.step, self.model, self.tokenizer, optimizer, state, self.config.save_total_limit
            )
        self.ranks.wait_for_all()

    def _about(self, store: TokenStore) -> dict[str, Any]:
        """What ``generate`` must know to ask as the model was taught."""
        return {"kinds": store.kinds, "tokenization": Tokenizer(self.tokenizer, self.config.objective).fingerprint()}

    def _evaluate(self, run: Run, presented: PresentedModel, precision: Precision, store: TokenStore | None) -> Evaluation:
        assert store is not None
        stream = self._stream(store, epochs=1, shuffle=False)
        evaluation = evaluate(presented, self.objective, stream, precision, self.ranks)
        better = evaluation.loss < run.best_loss
        run.best_loss = min(run.best_loss, evaluation.loss)
        run.evaluations_without_gain = 0 if better else run.evaluations_without_gain + 1
        for callback in self.callbacks:
            callback.evaluated(run.step, evaluation)
        return evaluation

    def _finish(
        self, run: Run, loss: float, evaluation: Evaluation | None, coverage: Coverage | None, store: TokenStore
    ) -> TrainingResult:
        model_dir, report = self.output_dir / "model", self.output_dir / "report.html"
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = parameter.dtype
        if self.ranks.first:
            about = self._about(store)

            def fill(aside: Path) -> None:
                aside.rmdir()
                checkpoint.save_model(aside, self.model, self.tokenizer, about)

            checkpoint.write_folder(model_dir, fill)
            metrics = read_metrics(self.output_dir / "metrics.jsonl")
            facts = {
                "model": self.model.config._name_or_path or type(self.model).__name__,
                "steps": run.step,
                "trainable share": f"{run.trainable_share:.2%}",
                "documents": f"{len(store):,}",
                **({"held-out loss": f"{evaluation.loss:.4f}"} if evaluation else {}),
                "configuration": self.config.to_dict(),
            }
            write_report(report, f"chronicals: {self.output_dir.name}", metrics, facts)
        self.ranks.wait_for_all()
        return TrainingResult(run.step, loss, evaluation, coverage, model_dir, report)

    # --- around ----------------------------------------------------------------------------------------------------

    def _own_callbacks(self) -> list[Callback]:
        own: list[Callback] = [MetricsFile(self.output_dir / "metrics.jsonl"), ProgressBar()]
        if TensorBoard.installed():
            own.append(TensorBoard(self.output_dir / "tensorboard"))
        return own

    @contextmanager
    def _callbacks_around(self, run: Run) -> Iterator[None]:
        for callback in self.callbacks:
            callback.run_began(run)
        try:
            yield
        finally:
            for callback in self.callbacks:
                callback.run_ended(run)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends after the step and a checkpoint, the second at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int, _frame: object) -> None:
            self._stop = f"stopped by {signal.Signals(number).name}"
            logger.warning("%s: finishing the step and saving; again to stop at once", self._stop)
            for name, handler in before.items():
                signal.signal(name, handler)

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stopped_anywhere(self) -> bool:
        """Whether any rank was told to stop; all must save together."""
        if self.ranks.count == 1:
            return self._stop is not None
        told = self.ranks.sum(torch.tensor(float(self._stop is not None), device=self.device))
        if told.item() and self._stop is None:
            self._stop = "stopped by a signal to another rank"
        return self._stop is not None


def _one_device(model: Any, ranks: Ranks) -> torch.device:
    """The single device of the model; a process of several moves it to its own card.

    Raises:
        ConfigurationError: the model is spread over devices.
    """
    if ranks.count > 1 and torch.cuda.is_available():
        model.to(f"cuda:{ranks.local_rank}")
    elif torch.cuda.is_available() and getattr(model, "hf_device_map", None) is None:
        model.to("cuda")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise ConfigurationError(
            f"the model is spread over {', '.join(sorted(map(str, devices)))}; load it on one device, for example with "
            'device_map={"": 0}'
        )
    return input_device(model)


def _check_precision(config: ChronicalsConfig, device: torch.device) -> None:
    if (
        config.mixed_precision == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ConfigurationError("mixed_precision='bf16': this card has no bf16; use mixed_precision='fp16'")
