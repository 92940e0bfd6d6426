"""Length and batch of a run with the user's own settings, read from its data as a run reads them.

So every mistake in the data or in the settings is told before the first trial, and the tokens are
stored for all trials.
"""

from __future__ import annotations

from chronicals.config import Recipe
from chronicals.tuning.schedule import Budget


def budget_of(recipe: Recipe) -> Budget:
    """Return the budget of a recipe on one process.

    Raises:
        ConfigurationError: the configuration cannot be honoured.
        DataError: training on the data would be wrong.
    """
    from chronicals.data.packs.packing import plan_epoch
    from chronicals.data.tokens.chat_templates import with_chat_template
    from chronicals.distributed import Mesh
    from chronicals.objectives import build_objective
    from chronicals.objectives.policy_gradient import PolicyGradient
    from chronicals.saving import SavedModel
    from chronicals.training.preparation import open_stores, rows_needed
    from chronicals.training.rollouts.rollout_run import RolloutRun, rewards_of
    from chronicals.training.run.length import Length, fit_batch, fit_learning_rate

    config = recipe.config()
    objective = build_objective(config)
    ranks = Mesh()
    saved = SavedModel.find(recipe.model, recipe.base_model)
    words = saved.tokenizer(recipe.trust_remote_code)
    tokenizer = with_chat_template(words, recipe.chat_template)
    rows = rows_needed(tokenizer, saved.embedding_rows(recipe.trust_remote_code), config)
    store, _ = open_stores(
        *recipe.sources, rows, tokenizer, config, ranks, None, objective.answer_tokens
    )
    fitted = fit_learning_rate(config, ranks)
    if isinstance(objective, PolicyGradient):
        with rewards_of(objective, config, ranks) as rewards:  # type: ignore[union-attr]
            run = RolloutRun.of(objective, tokenizer, rewards, recipe.sources, config, ranks)
            fitted = run.fitted(fitted, store, ranks)
            steps = run.total_steps(fitted, store)
    else:
        packs = plan_epoch(store, fitted)
        fitted = fit_batch(fitted, packs, ranks)
        steps = Length.of(fitted, packs).steps
    return Budget(
        steps, fitted.batch_size, fitted.gradient_accumulation_steps, fitted.learning_rate
    )
