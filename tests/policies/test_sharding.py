"""Which processes are on one machine, and so share a copy of divided weights, whatever started
them.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh, on_each_machine
from chronicals.memory import RESERVE
from chronicals.models import present
from chronicals.objectives import build_objective
from chronicals.policies import Facts, facts, sharding
from chronicals.policies.frozen_models import planned_frozen
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.sharding import ranks_per_copy, with_sharding
from chronicals.training import session


@dataclass(frozen=True)
class Told(Mesh):
    """One of several processes, of which this is what each tells."""

    told: list[Any] = field(default_factory=list)

    def gather_values(self, value):
        return self.told


def started(*machines, told_by_torchrun=None):
    said = told_by_torchrun or [None] * len(machines)
    return Told(0, len(machines), told=[list(pair) for pair in zip(said, machines)])


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (started(*"aaaabbbb"), 4),  # as srun and mpirun start them
        (started(*"aabbccdd"), 2),
        (started(*"abababab"), 8),  # in turns: neighbours are on other machines
        (started(*"aaaaaaaabbbb"), 12),
        (started(*"aaaaaaaabbbb", told_by_torchrun=["8"] * 8 + ["4"] * 4), 12),
        (started(*"aaaaaaaa", told_by_torchrun=["4"] * 8), 4),  # machines of one name
        (started("a"), 1),
    ],
)
def test_neighbours_on_a_machine(ranks, expected):
    assert on_each_machine(ranks) == expected


def test_machines_hold_copies_whatever_started_the_processes(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = runs.config(tmp_path, sharding="weights")
    here = on_each_machine(started(*"aaaabbbb"))
    assert ranks_per_copy(Facts(config, tiny.llama(), 8, here=here)) == 4


def decided(monkeypatch, ranks, here, **fields):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))  # as torchrun says it
    return session.decide_together(
        present(tiny.llama()), runs.config(ranks.told[0], sharding="weights", **fields), ranks
    )[1]["sharding"]


class Alike(Told):
    """Of which all tell the same."""

    def gather_values(self, value):
        return [value] * self.count


def test_a_decision_says_what_machines_share(tmp_path, monkeypatch, let_return):
    ranks = Alike(0, 8, told=[tmp_path])
    assert decided(monkeypatch, ranks, 4).reason.endswith("1/4 in each process, 2 copies")
    assert decided(monkeypatch, ranks, 8).reason.endswith("1/8 in each process")
    spread = decided(monkeypatch, ranks, 4, sharding_ranks=8).reason
    assert spread.endswith("1/8 in each process, each over 2 machines")
    let_return(facts, card_memory=1)
    made = decided(
        monkeypatch, ranks, 4, check_memory=False
    )  # which would refuse a card of one byte
    assert "each over 2 machines, for the cards of one hold no copy" in made.reason


def test_processes_that_would_share_with_others_are_refused(tmp_path, monkeypatch):
    """They would make other groups, and wait for each other for ever."""

    class Recorded(Alike):
        def gather_values(self, value):
            if not isinstance(value, dict):
                return super().gather_values(value)
            self.told.append(value)
            return [*self.told[1:], *[value] * (self.count - len(self.told) + 1)]

    ranks = Recorded(0, 8, told=[tmp_path])
    decided(monkeypatch, ranks, 4)
    told = r"do not train the same: sharding is .*4, 0\] on rank 0 and .*2, 0\] on rank 1"
    with pytest.raises(ConfigurationError, match=told):
        decided(monkeypatch, ranks, 2)


def test_the_smallest_card_decides(tmp_path, monkeypatch, let_return):
    """Each would decide for itself, and wait for others that decided otherwise."""
    ranks = Told(0, 2, told=[1 << 40, 1 << 20])
    free = runs.config(tmp_path)
    monkeypatch.setattr(Mesh, "device", torch.device("cuda"))
    let_return(sharding, card_memory=1 << 40, on_each_machine=2)
    assert with_sharding(free, tiny.llama(), ranks).sharding == "weights"
    ranks.told[1] = 1 << 40
    assert with_sharding(free, tiny.llama(), ranks).sharding == "optimizer"


def test_a_teacher_on_each_card_leaves_less_for_whole_weights(tmp_path, monkeypatch, let_return):
    """A card that holds the run alone does not hold it beside its teacher."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    tiny.llama(**sizes).config.save_pretrained(tmp_path / "teacher")
    alone = runs.config(tmp_path)
    fields = {"objective": "distill", "distill": {"teacher": str(tmp_path / "teacher")}}
    taught = runs.config(tmp_path, **fields)
    (teacher,) = planned_frozen(build_objective(taught), taught).values()
    needed = expected_memory(Facts(taught, tiny.llama(), 2))[1].needed("nothing")
    assert teacher.size > needed / 10
    size = int((needed + 1) / RESERVE)
    monkeypatch.setattr(Mesh, "device", torch.device("cuda"))
    let_return(sharding, card_memory=size, on_each_machine=2)
    ranks = Told(0, 2, told=[size, size])
    assert with_sharding(alone, tiny.llama(), ranks).sharding == "optimizer"
    assert with_sharding(taught, tiny.llama(), ranks).sharding == "weights"
