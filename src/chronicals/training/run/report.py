"""``report.html``: one self-contained page on data, settings and result of a run, with curves.

It also has answers of the model to a few rows before and after training.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.data import DataReport, Ledger, TokenStore
from chronicals.data.making.store import SIDE_COLUMN
from chronicals.data.reading.ledger import LEDGER_COLUMNS
from chronicals.distributed import Mesh
from chronicals.generation import EngineSettings, Trained, generate_many
from chronicals.models import input_device
from chronicals.objectives import Objective
from chronicals.policies.facts import DIVIDE_WEIGHTS
from chronicals.training.rollouts.turns import cache_memory
from chronicals.training.run.page import image, pairs, table, write_page
from chronicals.training.step.metrics import StepMetrics

logger = logging.getLogger(__name__)

PANELS = {
    "loss": "loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm (before clipping)",
    "tokens_per_second": "real tokens per second",
    "fill": "packing fill",
}

"""Titles of the panels of curves, by metric; the objective's own metrics get a panel each too."""

STEP_METRIC_NAMES = {field.name for field in dataclasses.fields(StepMetrics)}

_PACKAGES = ("chronicals", "torch", "transformers", "triton")

_SAMPLES_FILE = "samples.json"
"""File in the folder of a run: prompts with the answers before training.

A resumed run could not generate these answers again.
"""

NEW_TOKENS = 32
LONGEST_PROMPT = 512
OF_A_TEXT = 16
LOOKED_AT = 100
ROLLOUTS_SHOWN = 4
"""Number of lines of ``samples.jsonl``, the last ones, that the report shows."""

SECONDS = 1.0
"""Maximum seconds for all answers, before training and again after it.

An answer that is not finished by then is cut. A model that generates an answer at a time leaves the
remaining prompts without one.
"""

_SMALL_MODEL = 200_000_000
"""Maximum number of parameters for which answers are cheap on a CPU."""


@dataclass(frozen=True)
class SampleAnswers:
    """Answers of the model to a prompt before and after training."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Report:
    """Content of the report page.

    Attributes:
        title: of the page.
        facts: about the run, by name, for the table at the top.
        metrics: the lines of ``metrics.jsonl``.
        data: what the gate wrote about each data set (``train_dataset.json``,
            ``eval_dataset.json``).
        config: the settings, and which of them were set.
        samples: answers before and after.
        rollouts: lines of ``samples.jsonl``, answers that were drawn in the run.
    """

    title: str
    facts: Mapping[str, object]
    metrics: Sequence[Mapping]
    data: Sequence[Mapping]
    config: ChronicalsConfig
    samples: Sequence[SampleAnswers] = ()
    rollouts: Sequence[Mapping] = ()

    def write(self, path: Path, device: torch.device) -> None:
        """Write the page, with the times of the run, the GPU or CPU, and the software's versions."""
        seconds = sum(
            line["tokens"] / line["tokens_per_second"]
            for line in self.metrics
            if line.get("tokens_per_second")
        )
        times: dict[str, str] = {}
        told = [line["time"] for line in self.metrics if "time" in line]
        if told:
            for name, moment in (("first step", told[0]), ("finished", told[-1])):
                local = datetime.fromtimestamp(moment).astimezone()
                times[name] = local.strftime("%Y-%m-%d %H:%M %Z")
        times["time in steps"] = str(timedelta(seconds=round(seconds)))
        versions = [f"Python {platform.python_version()}"]
        for package in _PACKAGES:
            with suppress(importlib.metadata.PackageNotFoundError):
                versions.append(f"{package} {importlib.metadata.version(package)}")
        on_card = device.type == "cuda"
        facts = {
            **self.facts,
            **times,
            "device": torch.cuda.get_device_name(device)
            if on_card
            else f"CPU ({platform.machine()})",
            "versions": ", ".join(versions),
        }
        sections = [(f"Data: {found.get('data', '')}", _data(found)) for found in self.data]
        sections.append(("Curves", image("curves of the run", _figure(self.metrics))))
        if self.samples:
            rows = [(sample.prompt, sample.before, sample.after) for sample in self.samples]
            answers = table(("prompt", "before", "after"), rows)
            sections.append(("Answers before and after", answers))
        if self.rollouts:
            drawn = self.rollouts[-ROLLOUTS_SHOWN:]
            sections.append(("Answers of the last rollouts, and their rewards", _drawn(drawn)))
        sections.append(("Settings", _settings(self.config)))
        write_page(path, self.title, facts, sections)


class Samples:
    """Greedy answers to prompts of held-out or training data, before and after training.

    Args:
        model: the trained model.
        tokenizer: its tokenizer.
        store: data that the prompts are taken from.
        config: configuration of the run. Its ``report_samples`` are answered, none if answers take
            long: on a CPU, for a model that is not small.
        objective: objective of the run; without a language model there are no answers.
        ranks: all ranks of the run.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        store: TokenStore,
        config: ChronicalsConfig,
        objective: Objective,
        ranks: Mesh,
    ):
        count = config.report_samples
        reason = None
        if not objective.generates:
            reason = f"objective={config.objective!r} trains no language model"
        elif config.sharding == DIVIDE_WEIGHTS and ranks.count > 1:
            reason = "no process has all weights (sharding='weights')"
        if count and reason is not None:
            logger.info("the report has no sample answers: %s", reason)
            count = 0
        on_card = input_device(model).type == "cuda"
        cheap = (
            on_card or sum(parameter.numel() for parameter in model.parameters()) <= _SMALL_MODEL
        )
        self.file = config.output_dir / _SAMPLES_FILE
        self.config = config
        self.asked = Trained(model, tokenizer, tuple(store.kinds))
        self.answered: list[str] = []
        # Each prompt ends before its first trained token; of a text that is trained whole it is
        # the beginning.
        self.prompts: list[list[int]] = []
        sides = store.columns.get(SIDE_COLUMN)
        for number in range(min(len(store), LOOKED_AT) if cheap else 0):
            if sides is not None and sides[number] != 0:
                continue
            ids, trained = store.whole_document(number)
            begin = int(trained.argmax()) if trained.any() else len(ids)
            begin = begin if begin > 1 or sides is not None else min(OF_A_TEXT, len(ids) - 1)
            if 0 < begin <= LONGEST_PROMPT and len(self.prompts) < count:
                self.prompts.append(ids[:begin].tolist())

    def before(self) -> None:
        """Generate the answers before training."""
        self.answered = self._answers(self.prompts, 0)

    def keep(self) -> None:
        """Write the answers before training to the folder of the run, once it begins."""
        self.file.unlink(missing_ok=True)
        if self.answered:
            kept = [
                {"prompt": prompt, "before": answer}
                for prompt, answer in zip(self.prompts, self.answered)
            ]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(kept))

    def after(self, planned: int = 0) -> list[SampleAnswers]:
        """Generate the answers after training, to prompts that have an answer before it.

        Args:
            planned: bytes that were expected at the largest moment of a step; 0 if unknown.
        """
        if not self.prompts or not self.file.exists():
            return []
        kept = json.loads(self.file.read_text())
        answers = self._answers([one["prompt"] for one in kept], planned)
        read = self.asked.tokenizer.decode
        return [
            SampleAnswers(read(one["prompt"]), one["before"], answer)
            for one, answer in zip(kept, answers)
        ]

    def _answers(self, prompts: Sequence[list[int]], planned: int) -> list[str]:
        """Return the texts for as many prompts as there is time for.

        Empty, with a log message, if the model cannot generate.
        """
        memory = cache_memory(self.config, input_device(self.asked.model), planned)
        settings = EngineSettings(
            memory,
            use_cuda_graphs=self.config.use_cuda_graphs,
            generation_exact=self.config.generation_exact,
        )
        asked = dataclasses.replace(self.asked, engine_settings=settings)
        try:
            found = generate_many(asked, prompts, NEW_TOKENS, seconds=SECONDS)
        # The model's own code may raise anything, and answers are optional.
        except Exception as error:
            logger.info("the report has no sample answers: %s", str(error).partition("\n")[0])
            return []
        finally:
            asked.engine.release()  # training needs the memory
        begun = takewhile(lambda answers: answers[0].tokens, found)
        return [self.asked.ending.text(answer.tokens) for (answer,) in begun]


def data_reports(output_dir: Path) -> list[dict]:
    """Return the gate's reports on the data of a run, training data first."""
    files = [output_dir / f"{name}.json" for name in ("train_dataset", "eval_dataset")]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _data(found: Mapping) -> str:
    names = {field.name for field in dataclasses.fields(DataReport)} - {"findings", "left_out"}
    ledger = Ledger(**found["ledger"])
    report = DataReport(**{name: found[name] for name in names})
    share = found["targets"] / max(found["tokens"], 1)
    what = "scored" if ledger.is_scored else "trained"
    facts = {
        "rows": f"{found['rows']:,} ({ledger.kinds})",
        "documents": report.documents_in_words().removesuffix(" documents"),
        "tokens": f"{found['tokens']:,}",
        f"{what} tokens": f"{found['targets']:,} ({share:.0%})",
    }
    findings = [
        (
            one["level"],
            one["rule"],
            f"{one['count']:,}",
            ", ".join(map(str, one["rows"])),
            one["what"],
            one["remedy"],
        )
        for one in found["findings"]
    ]
    columns = ("", "rule", "rows", "the first", "what", "remedy")
    gate = (
        table(columns, findings, classes=True)
        if findings
        else "<p>The gate found nothing wrong.</p>"
    )
    return pairs(facts) + table(LEDGER_COLUMNS, ledger.table()) + gate


def _drawn(lines: Sequence[Mapping]) -> str:
    """Render prompts with their drawn answers, the reward of each, and each reward by name."""
    rows = []
    for line in lines:
        asked = line["prompt"]
        text = asked if isinstance(asked, str) else "\n".join(m.get("content") or "" for m in asked)
        for answer in line["answers"]:
            by_name = ", ".join(f"{name} {value}" for name, value in answer["rewards"].items())
            rows.append((text, answer["text"], str(answer["reward"]), by_name))
            text = ""
    return table(("prompt", "answer", "reward", "by name"), rows)


def _settings(config: ChronicalsConfig) -> str:
    """Render the settings that were set or fitted; the others are folded away."""
    values = config.to_dict()
    usual = ChronicalsConfig().to_dict()
    rows = []
    for field in dataclasses.fields(config):
        fitted = "fitted to the data" if values[field.name] != usual.get(field.name) else "default"
        rows.append(
            (
                field.name,
                str(values[field.name]),
                "set" if field.name in config.explicit else fitted,
            )
        )
    columns = ("field", "value", "")
    chosen = [row for row in rows if row[2] != "default"]
    defaults = table(columns, [row for row in rows if row[2] == "default"])
    return (
        table(columns, chosen)
        + f"<details><summary>left to their defaults</summary>{defaults}</details>"
    )


def _figure(metrics: Sequence[Mapping]) -> bytes:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    steps = [line for line in metrics if "loss" in line]
    panels = PANELS | {
        name: name for line in steps for name in line if name not in {*STEP_METRIC_NAMES, "time"}
    }
    rows = -(-len(panels) // 2)
    high = 3 * rows  # inches; margins are fixed, since a computed layout takes as long as drawing
    figure = Figure(figsize=(10, high))
    figure.subplots_adjust(
        left=0.08, right=0.99, bottom=0.5 / high, top=1 - 0.3 / high, wspace=0.22, hspace=0.36
    )
    FigureCanvasSVG(figure)
    axes = list(figure.subplots(rows, 2).flat)
    for axis, (name, label) in zip(axes, panels.items()):
        drawn = [line for line in steps if name in line]
        axis.plot(
            [line["step"] for line in drawn],
            [line[name] for line in drawn],
            lw=1.2,
            label="training",
        )
        evaluations = [line for line in metrics if f"eval_{name}" in line]
        if evaluations:
            axis.plot(
                [e["step"] for e in evaluations],
                [e[f"eval_{name}"] for e in evaluations],
                "o-",
                label="held-out",
            )
            axis.legend(frameon=False)
        axis.set_title(label, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="svg")
    return content.getvalue()
