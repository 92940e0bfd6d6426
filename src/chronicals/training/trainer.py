"""ChronicalsTrainer: takes data, model and configuration, and trains the model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.recipe import METRICS_FILE
from chronicals.data import BatchStream, TokenStore, filler_token
from chronicals.data.packs.packing import PackPlan, plan_epoch
from chronicals.data.packs.steps import Steps
from chronicals.distributed import (
    Mesh,
    RankWatch,
    prove_alike,
    shared_settings,
)
from chronicals.kernels.launch import identify_compiler
from chronicals.memory import checkpoints_end_with_errors
from chronicals.models import check_positions, count_values, embedding_table, reach_positions
from chronicals.objectives import build_objective
from chronicals.objectives.policy_gradient import PolicyGradient
from chronicals.policies.context_parallel import check_dealt, sharing_packs
from chronicals.policies.expert_offload import (
    OFFLOAD_EXPERTS,
    hold_experts_as_asked,
    open_experts_as_asked,
)
from chronicals.policies.facts import DIVIDE_WEIGHTS
from chronicals.policies.sharding import with_sharding
from chronicals.rewards import Rewards
from chronicals.training.adapters import quantise_as_asked, with_token_ids
from chronicals.training.columns.frozen import with_frozen_columns
from chronicals.training.columns.start_columns import StartColumns
from chronicals.training.errors import CheckpointError, TrainingError
from chronicals.training.preparation import (
    RowSource,
    check_class,
    check_exact_generation,
    check_tokenizer,
    fit_precision,
    fit_vocabulary,
    one_device,
    open_stores,
    readable_again,
    teach_generation_to_stop,
)
from chronicals.training.rollouts.rollout_run import RolloutRun, check_rollouts, rewards_of
from chronicals.training.run.callbacks import Callback, Callbacks, MetricsFile
from chronicals.training.run.earlier_run import EarlierRun, check_replaceable, replacing
from chronicals.training.run.finish import about_data, finish
from chronicals.training.run.guard import (
    check_disk,
    check_that_something_was_applied,
    disk_use,
    peak_bytes,
    say_if_memory_was_other,
    saying_what_helps,
)
from chronicals.training.run.length import check_warm_up, fit_batch, fit_learning_rate
from chronicals.training.run.live_samples import LiveSamples
from chronicals.training.run.loop import Loop, Stop
from chronicals.training.run.progress import ProgressBar, heard
from chronicals.training.run.recovery import Recovery
from chronicals.training.run.report import Samples
from chronicals.training.run.resume import checkpoint_to_resume, holds_a_run, sole_writer
from chronicals.training.run.run_checkpoints import RunCheckpoints
from chronicals.training.run.run_state import Run, TrainingResult
from chronicals.training.run.run_steps import steps_over_stores
from chronicals.training.run.trackers import build_trackers
from chronicals.training.session import Session, prepared
from chronicals.training.step.routers import keep_anchor
from chronicals.versions import check_versions_for

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class ChronicalsTrainer:
    """Trains a Hugging Face causal language model.

    Args:
        model: the model, on its device; ``device_map="auto"`` is allowed if it uses one device.
        tokenizer: its tokenizer; ``pad_token = eos_token`` is allowed.
        config: all settings; ``ChronicalsConfig()`` if None.
        callbacks: callbacks beside those for files, progress and trackers.
        write_recipe: writes the recipe that started the run into the folder of a new run, which it
            gets; None for none.
        rewards: rewards of the answers that an objective draws, on the first rank; by default those
            that ``config`` names. The caller closes them.

    Raises:
        ValueError: the model is of another kind, or the configuration cannot be honoured with it on
            this machine; the message names the field.
        VersionError: torch, transformers or PEFT is older than the lowest version that chronicals
            runs with.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ChronicalsConfig | None = None,
        callbacks: Sequence[Callback] = (),
        write_recipe: Callable[[Path], None] | None = None,
        rewards: Rewards | None = None,
    ):
        check_versions_for(model)
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or ChronicalsConfig()
        self.ranks = Mesh.current()
        self.output_dir = self.config.output_dir
        check_class(model)
        if OFFLOAD_EXPERTS.asked(self.config):
            # Records keep the format that experts have, with the bits that the card gives it.
            quantise_as_asked(model, self.config, self.ranks.device)
        hold_experts_as_asked(model, self.config, self.ranks)
        self.config = with_sharding(self.config, model, self.ranks)
        self.device = one_device(
            model, self.ranks, self.config.sharding == DIVIDE_WEIGHTS and self.ranks.count > 1
        )
        self.config = fit_precision(self.config, self.device)
        open_experts_as_asked(model, self.config, self.device)
        self.objective = build_objective(self.config)
        self.callbacks: list[Callback] = []
        if self.ranks.writer:
            self.callbacks = [
                # Trackers come first: they read the earlier metrics that they continue from.
                *build_trackers(self.config),
                MetricsFile(self.output_dir / METRICS_FILE),
                ProgressBar(),
                *callbacks,
            ]
        self._users_callbacks = bool(callbacks)
        self._stop = Stop()
        self._session: Session | None = None
        self._earlier: EarlierRun | None = None
        self._write_recipe = write_recipe
        self._rewards = rewards

    def release_graphs(self) -> None:
        """Release the memory of CUDA graphs.

        A callback may call it between steps; later steps are captured anew.
        """
        if self._session is not None:
            self._session.release_graphs()

    def stop(self, save: bool = True) -> None:
        """End the run after the current step.

        ``train`` then writes a checkpoint and raises ``Interrupted``.

        It may be called from any thread, from callbacks, and on any rank; all ranks stop after the
        same step. It does nothing if ``train`` is not running.

        Args:
            save: whether to write a checkpoint first.
        """
        self._stop.ask("stopped as asked", save)

    def train(
        self,
        train_dataset: RowSource,
        eval_dataset: RowSource | None = None,
        resume: bool | str | Path = False,
    ) -> TrainingResult:
        """Train and evaluate the model, and write the model and the report.

        Args:
            train_dataset: a file or rows; see ``chronicals.data.read_records``.
            eval_dataset: held-out data; or ``validation_split`` takes a share of ``train_dataset``.
            resume: True resumes from the newest whole checkpoint in ``output_dir``, if there is
                one, as if the run had never stopped; a folder resumes from that checkpoint, or from
                the newest of that run.

        Raises:
            DataError: the data would make training wrong.
            TrainingError: a loss or gradient is not a number, nothing is trained, or the card's
                memory is too small.
            CheckpointError: a checkpoint could not be written, ``output_dir`` holds another run, or
                one is writing there.
            ConfigurationError: the configuration cannot be honoured, or is not the same in all
                processes.
            Interrupted: stopped by a signal or ``stop``, after a checkpoint.
        """
        self._stop = Stop()
        self._earlier = None
        padding = self.tokenizer.pad_token
        try:
            watched = RankWatch(self.ranks, self.config.rank_timeout, TrainingError)
            with heard(self.ranks.writer), watched as self._watch:
                prove_alike(self.ranks, shared_settings(self.config))
                self.ranks = sharing_packs(self.ranks, self.config, self.model)
                with ExitStack() as held:  # by rank 0 for all ranks
                    self.ranks.writer_does(
                        lambda: held.enter_context(sole_writer(self.output_dir)), CheckpointError
                    )
                    resumed = checkpoint_to_resume(
                        self.output_dir, resume, self.ranks, self.config.overwrite
                    )
                    self.ranks.writer_does(partial(self._make_room, held), CheckpointError)
                    return self._train(train_dataset, eval_dataset, resumed)
        finally:
            self._session = None
            # An objective may have chosen another padding token for the model that it saved.
            if self.tokenizer.pad_token != padding:
                self.tokenizer.pad_token = padding

    def _train(
        self, train_dataset: RowSource, eval_dataset: RowSource | None, resumed: Path | None
    ) -> TrainingResult:
        model = self.model
        if self.device.type == "cuda":
            identify_compiler()
        check_exact_generation(self.config, model, self.device)
        if isinstance(self.objective, PolicyGradient):
            tokens = self.objective.answer_tokens
            check_rollouts(self.config, self.ranks, model, tokens)
            # Read twice: their tokens, and their columns for the rewards.
            train_dataset = readable_again(train_dataset)
            eval_dataset = None if eval_dataset is None else readable_again(eval_dataset)
        self.config = fit_vocabulary(model, self.tokenizer, self.config, self.ranks)
        self.ranks.writer_does(partial(check_tokenizer, model, self.tokenizer), ConfigurationError)
        train_store, eval_store = open_stores(
            train_dataset,
            eval_dataset,
            embedding_table(model).shape[0],
            self.tokenizer,
            self.config,
            self.ranks,
            reports=self.output_dir,
            answer_tokens=self.objective.answer_tokens,
        )
        if eval_store is None:
            _check_without_held_out(self.config)
        stores = [store for store in (train_store, eval_store) if store is not None]
        longest = max(store.longest for store in stores) + self.objective.answer_tokens
        reach_positions(model, longest, self.config.rope_scaling)
        for store in stores:
            check_dealt(store, self.objective, self.config)
        plan = plan_epoch(train_store, self.config)
        with (
            self._rollouts(train_dataset, eval_dataset) as rollouts,
            self._fitted_to(plan, resumed, rollouts, train_store) as config,
            saying_what_helps(
                config,
                self.device,
                self.ranks.count,
                lambda: None if self._session is None else self._session.planned,
                lambda: self._session,
            ),
            checkpoints_end_with_errors(),
        ):
            result = self._in_session(stores, plan, resumed, rollouts, longest)
        model.eval()
        return result

    def _in_session(
        self,
        stores: list[TokenStore],
        plan: PackPlan,
        resumed: Path | None,
        rollouts: RolloutRun | None,
        longest: int,
    ) -> TrainingResult:
        """Prepare the session of a run whose configuration fits its data, and train in it.

        Args:
            stores: what is trained, and what is evaluated on if something is.
            plan: packs of an epoch.
            resumed: folder of the checkpoint to go on from; None for a new run.
            rollouts: parts of a run that draws answers; None in others.
            longest: tokens of the longest document, with an answer to it.
        """
        config = self.config
        model = self.model
        train_store, *held_out = with_frozen_columns(
            stores, self.objective, model, self.tokenizer, config, self.ranks
        )
        eval_store = held_out[0] if held_out else None
        samples = Samples(
            model, self.tokenizer, eval_store or train_store, config, self.objective, self.ranks
        )
        if self.ranks.writer and resumed is None:
            samples.before()
        teach_generation_to_stop(
            model, self.tokenizer, chats=train_store.chats and config.objective != "pretraining"
        )
        with prepared(
            model, config, self.objective, self.ranks, resumed, self.tokenizer, train_store.alike
        ) as session:
            for frozen in self.objective.frozen.values():
                check_positions(frozen.model, longest)
            self._session = session
            return self._run(session, train_store, plan, eval_store, resumed, samples, rollouts)

    def _make_room(self, held: ExitStack) -> None:
        """Begin the run's folder, on the first rank: an earlier run makes way, the recipe is there.

        Args:
            held: context of the run, at whose end the earlier run is back, or replaced.
        """
        folder = self.output_dir
        has_run = holds_a_run(folder)
        if self.config.overwrite and has_run:
            check_replaceable(folder, self.model, self.config)
            self._earlier = held.enter_context(replacing(folder))
        if self._write_recipe is not None and (self._earlier is not None or not has_run):
            self._write_recipe(folder)

    @contextmanager
    def _rollouts(
        self, train_dataset: RowSource, eval_dataset: RowSource | None
    ) -> Iterator[RolloutRun | None]:
        """Return a context with prompts and rewards of a run that draws answers; None in others."""
        if not isinstance(self.objective, PolicyGradient):
            yield None
            return
        with ExitStack() as around:
            rewards = self._rewards
            # Given ones are the first rank's alone, and all ranks must take the same way.
            given = self.ranks.writer_does(lambda: rewards is not None, ConfigurationError)
            if not given:
                rewards = rewards_of(self.objective, self.config, self.ranks)
                if rewards is not None:
                    around.enter_context(rewards)
            yield RolloutRun.of(
                self.objective,
                self.tokenizer,
                rewards,
                (train_dataset, eval_dataset),
                self.config,
                self.ranks,
            )

    @contextmanager
    def _fitted_to(
        self,
        plan: PackPlan,
        resumed: Path | None,
        rollouts: RolloutRun | None,
        store: TokenStore,
    ) -> Iterator[ChronicalsConfig]:
        """Return a context in which batch and learning rate of the configuration fit the data."""
        original = self.config
        self.config = fit_learning_rate(original, self.ranks, self.model)
        if rollouts is None:
            self.config = fit_batch(self.config, plan, self.ranks, resumed)
        else:
            self.config = rollouts.fitted(self.config, store, self.ranks)
        try:
            self.config = with_token_ids(self.config, self.tokenizer)
            yield self.config
        finally:
            self.config = original

    def _run(
        self,
        session: Session,
        train_store: TokenStore,
        plan: PackPlan,
        eval_store: TokenStore | None,
        resumed: Path | None,
        samples: Samples,
        rollouts: RolloutRun | None,
    ) -> TrainingResult:
        config = session.config
        model = self.model
        stream_of = partial(
            BatchStream,
            config=config,
            padding_token_id=filler_token(self.tokenizer, embedding_table(model).shape[0]),
            rank=self.ranks.data_rank,
            ranks=self.ranks.data_count,
            pin=self.device.type == "cuda",
            context=self.ranks.context,
        )
        in_order = partial(stream_of, epochs=1, shuffle=False)
        limited = partial(self._watch.limited, "computing the reference, before the first step")
        columns = StartColumns(session, in_order, limited)
        columns.write_or_compare(self.output_dir, resumed)
        train_store = columns.beside(train_store)
        eval_store = None if eval_store is None else columns.beside(eval_store)
        if rollouts is None:
            steps = steps_over_stores(config, plan, train_store, eval_store, stream_of, self.ranks)
        else:
            padding = stream_of.keywords["padding_token_id"]
            drawing = partial(self._watch.limited, "drawing answers")
            steps = rollouts.run_steps(session, train_store, eval_store, padding, drawing)
        keep_anchor(session, steps.documents, self.output_dir, resumed)
        stream = steps.made_for(config)
        run = Run(steps.total, self.output_dir)
        check_warm_up(config, run.total_steps)
        keeps_best = eval_store is not None and config.keep != "last"
        saved = self._checkpoints(session, run, keeps_best, resumed, stream)
        divided = model if session.decisions["sharding"].how == DIVIDE_WEIGHTS else None
        callbacks = Callbacks(self.callbacks, self._users_callbacks, self.ranks, divided)
        about = functools.cache(
            lambda: about_data(train_store, model, self.tokenizer, config, columns.record)
        )
        recovery = None
        if config.fit == "auto":
            recovery = Recovery(session, stream, steps.made_for, self.output_dir)
        live = LiveSamples(session, samples)
        loop = Loop(
            session,
            run,
            stream,
            steps.held_out,
            saved,
            callbacks,
            self._stop,
            about,
            self._watch,
            recovery,
            live,
        )
        loop.prove_that_ranks_are_alike()
        if resumed is None:
            self.ranks.writer_does(samples.keep, OSError)
            self.ranks.writer_does(live.begin, OSError)
        return self._take_steps(loop, samples)

    def _checkpoints(
        self,
        session: Session,
        run: Run,
        keeps_best: bool,
        resumed: Path | None,
        stream: Steps,
    ) -> RunCheckpoints:
        """Return the checkpoints of a run, which stands where ``resumed`` was written, if set."""
        config = session.config
        saved = RunCheckpoints(
            self.model, self.tokenizer, config, self.ranks, keeps_best, self._earlier
        )
        if resumed is not None:
            saved.restore(resumed, run, session.optimizer, session.precision, stream)
        if run.step < run.total_steps:
            use = disk_use(self.model, config, run, keeps_best)
            self.ranks.writer_does(lambda: check_disk(use, config), CheckpointError)
        return saved

    def _take_steps(self, loop: Loop, samples: Samples) -> TrainingResult:
        """Train from the step where a run stands to its end, and write what it leaves."""
        model = self.model
        run = loop.run
        session = loop.session
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        run.trainable_share = trained / count_values(model)
        with self._stop.on_signals(), loop.callbacks.around(run):
            before = peak_bytes(self.device)
            with loop.saved, loop.recovery or nullcontext(), session.stepping(loop.hooks()):
                loop.train()
            say_if_memory_was_other(session.planned, before, peak_bytes(self.device))
            check_that_something_was_applied(run, session.precision)
            expected = 0 if session.planned is None else session.planned.held
            answers = partial(samples.after, expected)
            return finish(
                run,
                model,
                self.tokenizer,
                loop.config,
                self.ranks,
                loop.saved,
                loop.about,
                answers,
            )


def _check_without_held_out(config: ChronicalsConfig) -> None:
    """Refuse a configuration that evaluates, for a run in which nothing is held out.

    Raises:
        ConfigurationError: it evaluates, or keeps the best model of evaluations.
    """
    if config.eval_steps is not None:
        raise ConfigurationError(
            f"eval_steps={config.eval_steps}: nothing is held out; give eval_dataset or "
            "validation_split"
        )
    if config.keep == "best":
        raise ConfigurationError(
            "keep='best': nothing is held out to tell which is; give eval_dataset or "
            "validation_split"
        )
