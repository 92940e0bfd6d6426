"""Frozen weights whose rows are on several ranks: where they are cut, and when they are
gathered.
"""

import copy
import random
from contextlib import suppress
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from chronicals.config import ChronicalsConfig
from chronicals.distributed import (
    Mesh,
    frozen_shards,
    gathers_of,
    shard_frozen,
)
from chronicals.distributed.frozen_shards import Gathers, LinearInShards, Unit
from chronicals.distributed.rank_agreement import fingerprint_over
from chronicals.policies import divided_weights
from chronicals.quantization import Linear4bit, Packed, PlainWeight


def packed_of(rows, width, seed):
    return Packed.of(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(
    ("rows", "width", "count"), [(512, 64, 2), (256, 128, 2), (1024, 64, 4), (96, 1024, 3)]
)
def test_rows_of_all_ranks_are_the_weight(rows, width, count):
    seed = random.randrange(2**31)
    packed = packed_of(rows, width, seed)
    whole = packed.dense()
    found = torch.empty(rows, width)
    for rank, place in enumerate(found.chunk(count)):
        own = packed.rows(rank, count)
        divided = {name: tensor.clone() for name, tensor in own.divided.items()}
        own.with_tensors({**own.tensors, **divided}).into(place)
    assert torch.equal(found, whole), seed


@pytest.mark.parametrize(
    ("rows", "width", "count"), [(511, 64, 2), (256, 64, 2), (512, 96, 2), (512, 64, 4)]
)
def test_what_would_be_cut_within_a_block_of_scales_is_not_cut(rows, width, count):
    assert packed_of(rows, width, 0).rows(0, count) is None


def test_rows_of_dense_weights():
    weight = torch.randn(6, 5)
    parts = [PlainWeight(weight).rows(rank, 3).dense() for rank in range(3)]
    assert torch.equal(torch.cat(parts), weight)
    assert PlainWeight(weight).rows(0, 4) is None


@pytest.fixture
def gathered(monkeypatch):
    """Units of which a second rank has the same rows as the first; the order in which
    collectives are begun, waited for, and read."""
    order = []

    class Asked(Gathers):
        def of(self, unit):
            found = super().of(unit)
            order.append(("use", unit.number))
            return found

        def _hold_none(self):
            order.append(("hold none", None))
            super()._hold_none()

    class Work:
        def __init__(self, number):
            self.number = number

        def wait(self):
            order.append(("wait", self.number))

    def gather(out, own, group=None, async_op=False):
        number = next(unit.number for unit in gathers.units if unit.own is own)
        order.append(("begin", number))
        out.view(2, -1).copy_(own)
        return Work(number)

    monkeypatch.setattr(frozen_shards, "dist", SimpleNamespace(all_gather_into_tensor=gather))
    gathers = Asked(0, 2)
    linears = []
    for _ in range(4):
        unit = Unit(len(gathers.units), gathers)
        gathers.units.append(unit)
        linear = LinearInShards(PlainWeight(torch.randn(2, 3)), unit, 4, torch.float32, None)
        rows = linear.rows.dense()
        unit.own = torch.zeros(unit.size, dtype=torch.uint8)
        linear.settle()
        linears.append((linear, torch.cat([rows, rows])))
    return linears, order


def test_the_next_layer_is_gathered_beside_this_one(gathered):
    linears, order = gathered
    x = start = torch.randn(2, 3, requires_grad=True)
    for linear, _ in linears:
        x = linear(x)[:, :3]
    forward = [
        "begin 0",
        "wait 0",
        "begin 1",
        "use 0",
        "wait 1",
        "begin 2",
        "use 1",
        "wait 2",
        "begin 3",
        "use 2",
        "wait 3",
    ]
    assert [f"{what} {number}" for what, number in order] == [*forward, "use 3"]
    assert torch.equal(linears[-1][0].packed.dense(), linears[-1][1])
    order.clear()
    x.sum().backward()
    expected = torch.ones(2, 3)
    for _, whole in reversed(linears):
        expected = torch.nn.functional.pad(expected, (0, 1)) @ whole
    torch.testing.assert_close(start.grad, expected)
    backward = [
        "use 3",
        "begin 1",
        "use 2",
        "wait 1",
        "begin 0",
        "use 1",
        "wait 0",
        "use 0",
    ]  # the last two are there already
    assert [f"{what} {number}" for what, number in order] == backward


def test_a_second_pass_finds_its_own_weights(gathered):
    linears, _ = gathered
    for _ in range(2):
        for linear, whole in linears:
            assert torch.equal(linear.packed.dense(), whole)


def pass_over(linears, x=None):
    x = torch.randn(2, 3, requires_grad=True) if x is None else x
    for linear, _ in linears:
        x = linear(x)[:, :3]
    return x.sum()


def evaluation(linears):
    with torch.no_grad():
        pass_over(linears)


def broken_off_forward(linears):
    with linears[0][0].unit.gathers.passing():
        pass_over(linears[:2])
        raise RuntimeError


def broken_off_backward(linears):
    middle = torch.randn(2, 3, requires_grad=True)
    middle.register_hook(lambda _: 1 / 0)
    pass_over(linears[2:], middle).backward()


BEFORE = {
    "nothing": lambda linears: None,
    "an evaluation": evaluation,
    "an evaluation of some layers": lambda linears: pass_over(linears[:2]),
    "a pass by itself": lambda linears: pass_over(linears).backward(),
    "a pass broken off forward": broken_off_forward,
    "a pass broken off backward": broken_off_backward,
}


@pytest.mark.parametrize("before", BEFORE)
def test_what_a_training_pass_gathers_depends_on_it_alone(before, gathered):
    """So ranks that replay a captured one send what others send. What it begins to gather it
    also waits for.
    """
    linears, order = gathered
    gathers = linears[0][0].unit.gathers
    for _ in range(2):
        with suppress(RuntimeError, ZeroDivisionError):
            BEFORE[before](linears)
        gathers.forget()
        order.clear()
        with gathers.passing():
            pass_over(linears).backward()
        begun = [number for what, number in order if what == "begin"]
        assert begun == [0, 1, 2, 3, 1, 0]
        assert sorted({number for what, number in order if what == "wait"}) == [0, 1, 2, 3]
        assert all(
            order.index(("wait", number)) < order.index(("use", number)) for number in range(4)
        )
        assert gathers._holds == gathers._flying == [None, None]


def test_a_pass_waits_for_what_it_gathered_and_never_read(gathered):
    """A capture that leaves work on another stream is none."""
    linears, order = gathered
    with linears[0][0].unit.gathers.passing():
        evaluation(linears[:1])
        assert ("begin", 1) in order and ("wait", 1) not in order
    assert order.index(("wait", 1)) < order.index(("hold none", None), 1)


def test_buffers_are_there_before_a_pass_and_stay():
    layer = nn.Sequential(nn.Linear(6, 4).requires_grad_(False))
    gathers = shard_frozen([layer], Mesh(), 1, torch.device("cpu"), torch.float32)
    first = [buffer.data_ptr() for buffer in gathers._buffers]
    assert len(first) == 2 and gathers_of(layer) is gathers and gathers_of(nn.Linear(2, 2)) is None


def test_all_that_products_read_is_where_rows_are_gathered():
    """A model that is loaded elsewhere, as on the CPU, and comes to the card when it is divided."""
    target = torch.device("meta")
    layer = nn.Sequential(Linear4bit.of(nn.Linear(256, 128)))
    shard_frozen([layer], Mesh(), 1, target, torch.float32)
    linear = layer[0]
    scales = linear.rows.scales
    read = {
        "rows": linear.weight,
        "bias": linear.bias,
        "code2": scales.code2,
        "offset": scales.offset,
    }
    assert {name: tensor.device.type for name, tensor in read.items()} == dict.fromkeys(
        read, target.type
    )


@pytest.mark.parametrize("nf4", [False, True], ids=["dense", "NF4"])
def test_the_fingerprint_of_divided_weights_is_that_of_whole_ones(nf4):
    """By which a run that goes on knows the model that it began with."""

    class Told(Mesh):
        patterns: ClassVar[list[torch.Tensor]] = []

        def gather(self, tensor):
            self.patterns.append(tensor)
            return self.patterns

    def layer():
        linear = nn.Linear(256, 128, bias=False)
        return nn.Sequential(Linear4bit.of(linear) if nf4 else linear).requires_grad_(False)

    whole = layer()
    expected = fingerprint_over(whole.parameters()).values
    for rank in range(2):
        ranks = Told(rank, 2)
        divided = copy.deepcopy(whole)
        shard_frozen([divided], ranks, 2, torch.device("cpu"), torch.float32)
        found = fingerprint_over(divided.parameters(), ranks).values
    assert found == expected != fingerprint_over(layer().parameters()).values


def test_nothing_of_the_weight_is_saved_and_casts_leave_it(gathered):
    linear, whole = gathered[0][0]
    assert not linear.state_dict()
    linear.to(torch.bfloat16)
    assert linear.dtype == torch.bfloat16 and torch.equal(linear.packed.dense(), whole.bfloat16())
    assert nn.Linear(3, 4).weight.shape == (linear.out_features, linear.in_features)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_stays_whole_is_said_once(rank, caplog):
    """By the first rank, of all."""
    layer = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)).requires_grad_(False)
    shard_frozen([layer], Mesh(rank, 2), 2, torch.device("cpu"), torch.float32)
    assert ("1 linear layers stay whole on every process" in caplog.text) == (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_products_that_are_not_side_by_side_are_said_once(rank, let_return, caplog):
    let_return(
        divided_weights,
        names_of_products=["a", "b"],
        decoder_layers=[],
        trains_layers=True,
        weight_mesh=None,
        shard_weights=1,
    )
    divided_weights.divide_weights(nn.Linear(4, 4), ChronicalsConfig(), Mesh(rank, 2), 2)
    assert ("1 of 2 products take their weights one by one" in caplog.text) == (rank == 0)
