"""Prompts, and rewards that need no process, for tests of runs that draw answers."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import tiny
from chronicals.config.config import ChronicalsConfig, laid_over
from chronicals.training import ChronicalsTrainer


def prompts(count: int = 12) -> list[dict]:
    """Prompts that are long enough to be shared, with a column for rewards."""
    return [
        {"prompt": f"what is the answer to everything, life and {n}?", "wanted": n}
        for n in range(count)
    ]


def letters(completions, **columns) -> list[float]:
    """Reward of an answer: how many letters a it has."""
    return [float(text.count("a")) for text in completions]


@dataclass
class Rewards:
    """Rewards that are called in this process, as the trainer calls those of a configuration."""

    functions: Any = (letters,)
    columns_wanted: set = field(default_factory=set)
    calls: list = field(default_factory=list)
    weights: Any = None

    def __post_init__(self) -> None:
        self.names = [function.__name__ for function in self.functions]
        self.weights = self.weights or [1.0] * len(self.names)

    def score(self, rows: Any) -> Any:
        self.calls.append(rows)
        values = [
            function(prompts=rows.prompts, completions=rows.completions, **rows.columns)
            for function in self.functions
        ]
        values = torch.tensor(
            [[float("nan") if v is None else v for v in one] for one in values],
            dtype=torch.float64,
        )
        dropped = torch.zeros(len(rows.prompts), dtype=torch.bool)
        return SimpleNamespace(values=values.t(), dropped=dropped, failures=[])


def config(folder, objective: str = "grpo", section: Any = None, **changes: Any):
    """Configuration of a short run."""
    given = {"answers": 4, "prompts": 3, "max_new_tokens": 8, **(section or {})}
    usual = {
        "learning_rate": 3e-3,
        "batch_size": 2,
        "max_seq_length": 128,
        "max_steps": 3,
        "mixed_precision": "fp32",
        "report_samples": 0,
        "use_torch_compile": False,
        "output_dir": folder / "run",
        "cache_dir": folder / "tokens",
        "objective": objective,
        objective: given,
    }
    return ChronicalsConfig(**laid_over(usual, changes))


def train(folder, rows=None, model=None, rewards=None, resume=False, held_out=None, **changes):
    """Train a tiny Llama on answers that it draws; return the result."""
    trainer = ChronicalsTrainer(
        model or tiny.llama(),
        tiny.tokenizer(),
        config(folder, **changes),
        rewards=rewards or Rewards(),
    )
    return trainer.train(rows or prompts(), held_out, resume=resume)
