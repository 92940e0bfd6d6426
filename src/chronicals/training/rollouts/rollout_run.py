"""Parts of a run with rollouts, beside those of one on stored tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import RowSource, TokenStore, read_records
from chronicals.distributed import Mesh
from chronicals.generation import why_not_served
from chronicals.objectives import Objective
from chronicals.objectives.policy_gradient import PolicyGradient
from chronicals.policies.facts import DIVIDE_WEIGHTS
from chronicals.rewards import Rewards, build_rewards
from chronicals.training.rollouts.answer_packs import AnswerPacks
from chronicals.training.rollouts.draws import Draws, DrawSettings, PromptRows
from chronicals.training.rollouts.rollout_maker import RolloutMaker
from chronicals.training.rollouts.rollout_steps import HeldOutSteps, RolloutSteps, rollout_steps
from chronicals.training.rollouts.samples import SamplesFile
from chronicals.training.rollouts.scoring import PROMPT_FIELDS, Scoring
from chronicals.training.rollouts.token_passes import TokenPasses
from chronicals.training.rollouts.turns import Turns
from chronicals.training.run.run_steps import RunSteps
from chronicals.training.session import Session

logger = logging.getLogger(__name__)

MICRO_BATCHES = "gradient_accumulation_steps"


def check_rollouts(config: ChronicalsConfig, ranks: Mesh, model: Any, tokens: int) -> None:
    """Check that a run can draw answers.

    Args:
        config: configuration of the run.
        ranks: all ranks of the run.
        model: the model.
        tokens: most tokens of an answer.

    Raises:
        ConfigurationError: a field asks for what does not go together with draws.
    """
    objective = config.objective
    if MICRO_BATCHES in config.explicit:
        raise ConfigurationError(
            f"{MICRO_BATCHES}={config.gradient_accumulation_steps}: objective={objective!r} takes "
            "as many micro-batches as the answers of a step need; leave it out, and set how many "
            f"prompts a step has ({objective}.prompts) and how many packs a micro-batch "
            "(batch_size)"
        )
    if config.lora_dropout and "lora_dropout" in config.explicit and config.use_lora:
        raise ConfigurationError(
            f"lora_dropout={config.lora_dropout}: answers are drawn without dropout, and a pass "
            "with it is of another distribution; leave it out, or set lora_dropout=0"
        )
    dropped = dropping_out(model)
    if dropped is not None:
        raise ConfigurationError(
            f"objective={objective!r}: {dropped} of the model drops out, answers are drawn without "
            "dropout, and a pass with it is of another distribution; set it to 0 in the model's "
            "configuration"
        )
    if config.pack_parts is not None and config.pack_parts > 1:
        raise ConfigurationError(
            f"pack_parts={config.pack_parts}: objective={objective!r} packs answers whole; leave "
            "it out"
        )
    if config.context_parallel > 1:
        raise ConfigurationError(
            f"context_parallel={config.context_parallel}: objective={objective!r} draws answers "
            "with whole sequences in each process; leave it out"
        )
    if config.sharding == DIVIDE_WEIGHTS and ranks.count > 1:
        raise ConfigurationError(
            f"sharding={DIVIDE_WEIGHTS!r}: objective={objective!r} draws answers, for which each "
            "process needs all weights; take sharding='optimizer', or adapters over a packed base"
        )
    if tokens >= config.max_seq_length:
        raise ConfigurationError(
            f"{objective}.max_new_tokens={tokens}: leaves no room for a prompt in "
            f"max_seq_length={config.max_seq_length}; lower it, or raise max_seq_length"
        )
    if config.reward_aggregation == "normalize_then_sum":
        given = config.sections.get(objective, {})
        if objective == "rloo" or given.get("truncated") == "shape":
            raise ConfigurationError(
                "reward_aggregation='normalize_then_sum': rewards that are normalised one by one "
                f"give the advantages themselves, and {objective} takes them of the sum of rewards "
                "with the penalty of long answers; leave it out, or take objective='grpo' without "
                "truncated='shape'"
            )
    reason = why_not_served(model, config.max_seq_length)
    if reason:
        raise ConfigurationError(
            f"objective={objective!r}: answers cannot be drawn with {type(model).__name__}: "
            f"{reason}"
        )


def dropping_out(model: nn.Module) -> str | None:
    """Return the path of a module that drops out in training; None if none does."""
    for path, module in model.named_modules():
        chance = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", None)
        if isinstance(chance, float) and chance > 0:
            return path
    return None


def rewards_of(objective: Objective, config: ChronicalsConfig, ranks: Mesh) -> Rewards | None:
    """Start the rewards of a run on the first rank, before a model is loaded.

    Returns:
        The rewards, which the caller closes; None on the other ranks, and for an objective that
            draws no answers.

    Raises:
        ConfigurationError: there is none, or one cannot be had.
    """
    if not objective.draws_answers:
        return None
    started = list[Rewards]()
    ranks.writer_does(lambda: started.append(build_rewards(config)), ConfigurationError)
    return started[0] if started else None


@dataclass
class RolloutRun:
    """The prompts and rewards of a run, and the steps made of them.

    Attributes:
        objective: objective of the run.
        tokenizer: the model's tokenizer.
        rewards: rewards of the run, on the first rank.
        records: rows of the training data and of the held-out data, on the first rank.
    """

    objective: PolicyGradient
    tokenizer: Any
    rewards: Rewards | None
    records: tuple[Sequence[Any], Sequence[Any]]

    @classmethod
    def of(
        cls,
        objective: PolicyGradient,
        tokenizer: Any,
        rewards: Rewards | None,
        sources: tuple[RowSource, RowSource | None],
        config: ChronicalsConfig,
        ranks: Mesh,
    ) -> RolloutRun:
        """Read the rows, and check that they have the columns that the rewards need.

        Without held-out data of their own, both parts are of the training data.

        Raises:
            ConfigurationError: a row lacks a column.
        """
        run = cls(objective, tokenizer, rewards, ((), ()))

        def read() -> None:
            assert rewards is not None
            run.records = prompt_records(sources, rewards, config)

        ranks.writer_does(read, ConfigurationError)
        return run

    def fitted(self, config: ChronicalsConfig, store: TokenStore, ranks: Mesh) -> ChronicalsConfig:
        """Return ``config`` with the micro-batches of the largest possible step, and log its length.

        Raises:
            ConfigurationError: there are fewer prompts than a step has.
        """
        given = self.objective.settings
        section = config.objective
        if len(store) < given.prompts * given.updates:
            raise ConfigurationError(
                f"{section}.prompts={given.prompts} x {section}.updates={given.updates}: there are "
                f"{len(store)} prompts, and none is answered twice at once; lower one of them, or "
                "give more prompts"
            )
        packs = AnswerPacks(config, ranks=ranks.data_count)
        heaviest = RolloutSteps(PromptRows(store), given, config, _nothing, packs).heaviest()
        steps = rollout_steps(given, config, len(store))
        if ranks.writer:
            again = given.iterations if given.iterations > 1 else 1
            logger.info(
                "training: %d steps, %.3g epochs of %d prompts; a step takes %d prompts x %d "
                "answers of up to %d tokens, in at most %d micro-batches of %d x %d tokens; answers "
                "are drawn every %d steps",
                steps,
                steps / again * given.prompts / len(store),
                len(store),
                given.prompts,
                given.answers,
                given.max_new_tokens,
                len(heaviest.batches),
                config.batch_size,
                config.max_seq_length,
                given.updates * given.iterations,
            )
        # Fresh adapters would drop out by default, and answers are drawn without dropout.
        return config.fitted(gradient_accumulation_steps=len(heaviest.batches), lora_dropout=0.0)

    def total_steps(self, config: ChronicalsConfig, store: TokenStore) -> int:
        """Return the optimizer steps of the run."""
        return rollout_steps(self.objective.settings, config, len(store))

    def run_steps(
        self,
        session: Session,
        train_store: TokenStore,
        eval_store: TokenStore | None,
        padding_token_id: int,
        limited: Callable[[], AbstractContextManager[None]],
    ) -> RunSteps:
        """Return the sources of the steps of the run.

        Args:
            session: of the run.
            train_store: prompts to train on.
            eval_store: prompts to evaluate on; None for none.
            padding_token_id: token of filler documents.
            limited: returns a context in which ranks may wait for each other.
        """
        made_for = self.steps(session, train_store, padding_token_id, limited)
        held_out = None
        if eval_store is not None:
            held_out = self.held_out(session, eval_store, padding_token_id, limited)
        return RunSteps(
            made_for,
            total=self.total_steps(session.config, train_store),
            held_out=held_out,
            documents=self.answered(session, train_store, limited),
        )

    def steps(
        self,
        session: Session,
        store: TokenStore,
        padding_token_id: int,
        limited: Callable[[], AbstractContextManager[None]],
        writes_samples: bool = True,
    ) -> Callable[[ChronicalsConfig], RolloutSteps]:
        """Return a function that makes the steps of the run for a configuration."""
        given = self.objective.settings
        rows = PromptRows(store, self.records[0])
        draws = self._draws(session, rows, DrawSettings.of(given), limited)
        scoring = Scoring(self.tokenizer, rows, self.rewards, session.ranks)
        held = RolloutSteps.Held()

        def made(config: ChronicalsConfig) -> RolloutSteps:
            packs = self._packs(session, config, padding_token_id)
            normalises_first = config.reward_aggregation == "normalize_then_sum"
            passes = TokenPasses(
                session.presented, session.precision, packs, session.ranks, limited
            )
            maker = RolloutMaker(self.objective, draws, scoring, passes, normalises_first)
            if session.ranks.writer and writes_samples:
                maker.samples = SamplesFile(config.output_dir)
            return RolloutSteps(rows, given, config, maker.rollout, packs, held)

        return made

    def held_out(
        self,
        session: Session,
        store: TokenStore,
        padding_token_id: int,
        limited: Callable[[], AbstractContextManager[None]],
    ) -> HeldOutSteps:
        """Return the steps of an evaluation: a greedy answer to each held-out prompt."""
        given = self.objective.settings
        rows = PromptRows(store, self.records[1])
        draws = self._draws(session, rows, DrawSettings.greedy(given), limited)
        scoring = Scoring(self.tokenizer, rows, self.rewards, session.ranks)
        packs = self._packs(session, session.config, padding_token_id)
        return HeldOutSteps(rows, RolloutMaker(self.objective, draws, scoring), packs)

    def answered(
        self,
        session: Session,
        store: TokenStore,
        limited: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[Tensor]:
        """Yield each prompt with one answer of the model as it is, int64 ``[n]``.

        The answers to as many prompts as a step has are drawn when the first of them is asked for.
        All ranks must ask for the same number.
        """
        given = self.objective.settings
        rows = PromptRows(store)
        settings = replace(DrawSettings.of(given), answers=1, noted=0)
        draws = self._draws(session, rows, settings, limited)
        for first in range(0, len(store), given.prompts):
            prompts = np.arange(first, min(first + given.prompts, len(store)))
            for prompt, (answer,) in zip(prompts, draws.answers(prompts, prompts), strict=True):
                yield torch.tensor([*rows.ids(prompt).tolist(), *answer.tokens])

    def _draws(
        self,
        session: Session,
        rows: PromptRows,
        settings: DrawSettings,
        limited: Callable[[], AbstractContextManager[None]],
    ) -> Draws:
        seed = session.config.seed
        generate = Turns(session).generate
        return Draws(generate, self.tokenizer, rows, settings, seed, session.ranks, limited)

    def _packs(
        self, session: Session, config: ChronicalsConfig, padding_token_id: int
    ) -> AnswerPacks:
        ranks = session.ranks
        return AnswerPacks(
            config,
            padding_token_id,
            ranks.data_rank,
            ranks.data_count,
            session.precision.device.type == "cuda",
        )


def _nothing(*_: Any) -> Any:
    raise AssertionError("these steps are only measured")


def check_prompts(
    objective: Objective,
    rewards: Rewards | None,
    sources: tuple[RowSource, RowSource | None],
    config: ChronicalsConfig,
    ranks: Mesh,
) -> None:
    """Check that prompts have the columns that rewards need, before a model is loaded.

    All ranks must call it. An objective that draws no answers has no rewards.

    Raises:
        ConfigurationError: a row lacks a column.
    """

    def read() -> None:
        assert rewards is not None
        prompt_records(sources, rewards, config)

    if objective.draws_answers:
        ranks.writer_does(read, ConfigurationError)


def prompt_records(
    sources: tuple[RowSource, RowSource | None], rewards: Rewards, config: ChronicalsConfig
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the rows of the training data and of the held-out data.

    Without held-out data of their own, both are of the training data.

    Raises:
        ConfigurationError: a row lacks a column that a reward needs.
    """
    train = [record for _, record in read_records(sources[0], config.seed)]
    held_out = train
    if sources[1] is not None:
        held_out = [record for _, record in read_records(sources[1], config.seed)]
    for rows in (train, held_out):
        check_columns(rows, rewards)
    return train, held_out


def check_columns(records: Sequence[Any], rewards: Rewards) -> None:
    """Check that the rows have the columns that rewards need.

    Raises:
        ConfigurationError: a row lacks one; the message names the row, the reward and the column.
    """
    for number, record in enumerate(records, 1):
        if not isinstance(record, Mapping) or rewards.columns_wanted <= record.keys():
            continue
        try:
            rewards.check_columns([name for name in record if name not in PROMPT_FIELDS])
        except ConfigurationError as error:
            raise ConfigurationError(f"row {number}: {error}") from None
