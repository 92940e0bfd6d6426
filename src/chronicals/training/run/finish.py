"""End of a run: the trained model and the report are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.config.config import TARGET_FIELDS
from chronicals.config.recipe import METRICS_FILE
from chronicals.config.reward_entries import reward_text
from chronicals.config.sections import lasting_sections
from chronicals.data import Tokenizer, TokenStore
from chronicals.distributed import Mesh
from chronicals.lora.peft_format import CONFIG_FILE
from chronicals.models import input_device, within_adapters
from chronicals.models.base_format import BaseFormat
from chronicals.models.gguf_loading import GGUF_FILE
from chronicals.models.peft_kinds import active_adapters
from chronicals.saving import differences, text_files, write_folder
from chronicals.training.errors import CheckpointError
from chronicals.training.rollouts.samples import read_samples
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.checkpoint import MODEL
from chronicals.training.run.model_card import CARD_FILE, model_card
from chronicals.training.run.report import Report, SampleAnswers, data_reports
from chronicals.training.run.run_checkpoints import RunCheckpoints
from chronicals.training.run.run_state import Run, TrainingResult

logger = logging.getLogger(__name__)

TAUGHT = ("objective", "sections", *TARGET_FIELDS)
"""Fields of the configuration that a trained model remembers: what its targets were."""


def about_data(
    store: TokenStore,
    model: Any,
    tokenizer: Any,
    config: ChronicalsConfig,
    reference: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what later commands must know of a trained model.

    ``generate`` prompts it as it was trained; ``evaluate`` scores the same tokens against the same
    ``reference`` policy. The result also says how the model's layers are quantised, or names their
    GGUF file, and holds PEFT's active adapters and the dtype of products.
    """
    file = getattr(within_adapters(model), GGUF_FILE, None)
    form = BaseFormat.of(model)
    active = active_adapters(model)
    return {
        "kinds": store.kinds,
        "tokenization": Tokenizer.configured(tokenizer, config).fingerprint(),
        "taught": {field: getattr(config, field) for field in TAUGHT}
        | {"sections": lasting_sections(config.sections)}
        | ({"rewards": [*map(reward_text, config.rewards)]} if config.rewards else {}),
        "mixed_precision": config.mixed_precision,
        **({"reference": reference} if reference is not None else {}),
        "base": {} if form is None else form.to_json(),
        **({"gguf": file} if file is not None else {}),
        **({"active_adapters": active} if active else {}),
    }


def finish(
    run: Run,
    model: Any,
    tokenizer: Any,
    config: ChronicalsConfig,
    ranks: Mesh,
    saved: RunCheckpoints,
    about: Callable[[], dict[str, Any]],
    answers: Callable[[], list[SampleAnswers]],
) -> TrainingResult:
    """Load the best weights if they are kept, and write the model and the report on rank 0.

    Args:
        run: state of the run after its last step.
        model: the trained model.
        tokenizer: its tokenizer.
        config: configuration of the run.
        ranks: all ranks of the run.
        saved: checkpoints of the run.
        about: makes the result of ``about_data``.
        answers: makes the samples of the report.

    Raises:
        CheckpointError: the model cannot be written, or differs after it is read back.
    """
    model_dir = run.output_dir / MODEL
    report = run.output_dir / "report.html"
    model_step = saved.restore_best(run) if saved.keeps_best else run.step
    evaluation = run.best_evaluation if model_step == run.best_step else run.evaluation
    losses = {"last training loss": f"{run.last_loss:.4f}"}
    if evaluation:
        losses["held-out loss"] = f"{evaluation.loss:.4f}"

    def write_model(aside: Path) -> None:
        saved.write_model(aside, model_step, text_files(model, tokenizer), about())
        read_back = partial(
            differences, aside, model, tokenizer, about(), divided=saved.divided is not None
        )
        _check_written(model_dir, read_back, saved.folder_of(run.step))
        # After the comparison: what is read back is what was trained, and a card is not.
        facts = {"steps": str(model_step), **losses}
        text = model_card(
            run.output_dir.name,
            str(model.config._name_or_path or type(model).__name__),
            config.to_dict(),
            facts,
            is_adapter=(aside / CONFIG_FILE).exists(),
        )
        (aside / CARD_FILE).write_text(text)

    def write() -> None:
        write_folder(model_dir, write_model)
        try:
            facts = {
                "model": model.config._name_or_path or type(model).__name__,
                "steps": run.step,
                "weights written": f"of step {model_step}",
                "trainable parameters": f"{run.trainable_share:.2%}",
                **losses,
                "processes": ranks.count,
            }
            title = f"chronicals: {run.output_dir.name}"
            metrics = read_metrics(run.output_dir / METRICS_FILE)
            data = data_reports(run.output_dir)
            device = input_device(model)
            drawn = [line for line in read_samples(run.output_dir) if "rollout" in line]
            Report(title, facts, metrics, data, config, answers(), drawn).write(report, device)
        except Exception as error:  # the model is written already, so the run has succeeded
            logger.error(
                "%s: the report cannot be written (%s: %s)", report, type(error).__name__, error
            )
            with suppress(OSError):
                report.unlink()

    ranks.writer_does(write, CheckpointError)
    if model_step != run.step:
        logger.info(
            "%s holds the weights of step %d, which had the lowest held-out loss",
            model_dir,
            model_step,
        )
    return TrainingResult(
        run.step, model_step, run.last_loss, evaluation, run.coverage, model_dir, report
    )


def _check_written(
    model_dir: Path, read_back: Callable[[], Iterable[str]], checkpoint: Path
) -> None:
    """Check that the model which was written is the one that was trained.

    Args:
        model_dir: folder that the model is for.
        read_back: reads what was written, and returns in what it differs.
        checkpoint: folder of the last step's checkpoint, which stays.

    Raises:
        CheckpointError: it differs, or cannot be read.
    """
    kept = f"The checkpoint of the last step stays: {checkpoint}"
    try:
        wrong = list(read_back())
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(
            f"{model_dir}: what was written cannot be read back: {error}. {kept}"
        ) from error
    if wrong:
        more = f" (and {len(wrong) - 1} more differences)" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{model_dir}: what was written is not what was trained, so it was not kept: "
            f"{wrong[0]}{more}. {kept}"
        )
