"""Prompts, and rewards that need no process, for tests of runs that draw answers."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import tiny
from chronicals.config import ConfigurationError
from chronicals.config.config import ChronicalsConfig, laid_over
from chronicals.data.packs.steps import Step
from chronicals.objectives import build_objective
from chronicals.objectives.policy_gradient import DRAWN, OLD
from chronicals.objectives.terms import REFERENCE_POLICY
from chronicals.training import Callback, ChronicalsTrainer
from chronicals.training.columns.frozen import present_frozen
from chronicals.training.rollouts.answer_packs import AnswerGroup, AnswerPacks, DrawnAnswer
from chronicals.training.session import prepared


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

    def check_columns(self, columns: Any) -> None:
        missing = self.columns_wanted - set(columns)
        if missing:
            raise ConfigurationError(f"rewards: no {missing}")

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


class StopAfter(Callback):
    """Ends a run after a step."""

    def __init__(self, trainer: Any, step: int):
        self.trainer = trainer
        self.step = step

    def step_done(self, metrics: Any) -> None:
        if metrics.step == self.step:
            self.trainer.stop()


@dataclass
class Recorded:
    """Answers to some prompts, with all that a loss takes of them; made by a seed.

    Attributes:
        prompts: tokens of each prompt.
        answers: tokens of each answer, prompt after prompt.
        drawn, old: log-probabilities of these tokens, some of which differ much from the model's.
        complete: which answers have an end.
        rewards: ``[prompts, answers]``.
    """

    prompts: list
    answers: list
    drawn: list
    old: list
    complete: list
    rewards: torch.Tensor

    @classmethod
    def of(cls, seed: int = 0, prompts: int = 3, answers: int = 4) -> Any:
        draw = torch.Generator().manual_seed(seed)

        def ids(least: int, most: int) -> Any:
            length = int(torch.randint(least, most + 1, (1,), generator=draw))
            return torch.randint(4, 300, (length,), generator=draw)

        asked = [ids(8, 30) for _ in range(prompts)]  # some are too short to be shared
        answered = [ids(1, 12) for _ in range(prompts * answers)]
        logs = [
            [-5.7 + 0.4 * torch.randn(len(one), generator=draw) for one in answered]
            for _ in range(2)
        ]
        complete = [bool(torch.rand(1, generator=draw) < 0.7) for _ in answered]
        rewards = torch.randn(prompts, answers, generator=draw, dtype=torch.float64)
        return cls(asked, answered, logs[0], logs[1], complete, rewards)

    def groups(self, objective: Any, old: bool = True) -> list:
        """Groups as a step of the objective has them."""
        advantages = objective.advantages(self.rewards).flatten().tolist()
        rewards = self.rewards.flatten().tolist()
        masks = objective.settings.truncated == "mask"
        count = self.rewards.shape[1]
        found = []
        for place, prompt in enumerate(self.prompts):
            answers = []
            for number in range(place * count, (place + 1) * count):
                of_tokens = {DRAWN: self.drawn[number].numpy()}
                if old:
                    of_tokens[OLD] = self.old[number].numpy()
                answers.append(
                    DrawnAnswer(
                        number,
                        self.answers[number].numpy(),
                        self.complete[number] or not masks,
                        rewards[number],
                        advantages[number],
                        of_tokens,
                    )
                )
            found.append(AnswerGroup(prompt.numpy(), answers))
        return found


def one_update(recorded, folder, model=None, old=True, age=1, reference=None, **changes):
    """Metrics and gradients of one step over recorded answers, before clipping."""
    changes = {"max_grad_norm": float("inf"), "batch_size": 1, **changes}
    given = config(folder, **changes)
    model = model or tiny.llama()
    objective = build_objective(given)
    gradients: dict[str, torch.Tensor] = {}

    def look() -> None:
        gradients.update(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )

    packs = AnswerPacks(given, tiny.tokenizer().pad_token_id)
    batches, counts = packs.batches(recorded.groups(objective, old), age)
    given = given.fitted(gradient_accumulation_steps=len(batches))
    with prepared(model, given, objective, tokenizer=tiny.tokenizer()) as session:
        if reference is not None:
            present_frozen(objective, {REFERENCE_POLICY: reference}, model, given)
        with session.stepping():
            model.train()
            terms = session.train_once(Step(batches, counts, None, None), look)
    return {name: float(value) for name, value in terms.items()}, gradients
