"""Steps of a run: those that train, those of an evaluation, and how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, TokenStore
from chronicals.data.packs.packing import PackPlan
from chronicals.data.packs.steps import Steps
from chronicals.distributed import Mesh
from chronicals.training.run.length import Length
from chronicals.training.step.routers import stored_documents


@dataclass(frozen=True)
class RunSteps:
    """Sources of the steps of a run.

    Attributes:
        made_for: returns the steps of the run in the batches of a configuration.
        total: number of optimizer steps.
        held_out: steps of an evaluation; None where nothing is held out.
        documents: int64 ``[n]`` each, what the model is trained on.
    """

    made_for: Callable[[ChronicalsConfig], Steps]
    total: int
    held_out: Steps | None
    documents: Iterable[Tensor]


def steps_over_stores(
    config: ChronicalsConfig,
    plan: PackPlan,
    train_store: TokenStore,
    eval_store: TokenStore | None,
    stream_of: Callable[..., BatchStream],
    ranks: Mesh,
) -> RunSteps:
    """Return the steps of a run on stored tokens.

    Args:
        config: of the run.
        plan: packs of an epoch.
        train_store: what is trained.
        eval_store: what is evaluated on; None for nothing.
        stream_of: makes the stream of a store, given what differs between streams of this run.
        ranks: all ranks of the run.
    """

    def made_for(config: ChronicalsConfig) -> BatchStream:
        return stream_of(train_store, config=config, epochs=config.epochs, plan=plan)

    held_out = None
    if eval_store is not None:
        held_out = stream_of(eval_store, epochs=1, shuffle=False)
    total = Length.of(config, plan, ranks.data_count).steps
    return RunSteps(made_for, total, held_out, stored_documents(train_store))
