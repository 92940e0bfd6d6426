"""Rates: all that the floor counts runs, in the number of a step, and is timed where it stands."""

from dataclasses import replace

import made
import pytest
import torch

from chronicals.benchmark import rates
from chronicals.benchmark.arms.weights import prepare_work
from chronicals.benchmark.rates import BACKWARD, COPY, FORWARD
from chronicals.step_work import (
    DecoderShape,
    Job,
    Product,
    dequantised_bytes,
    elementwise_bytes,
    loss_bytes,
    products,
)

SHAPE = DecoderShape(3, 64, 4, 2, 16, 128, 1024, 0, 10**5)


@pytest.fixture
def on_a_card(let_return):
    let_return(rates, device=torch.device("cuda"))


@pytest.mark.parametrize("tokens", [10**5, 10**7])
@pytest.mark.parametrize("rank", [0, 8])
def test_a_step_has_each_part_as_often_as_the_floor_counts_it(rank, tokens, on_a_card):
    job = Job(SHAPE, tokens, 500.0, rank)
    size = rates.copied_bytes(job)
    order = rates.order_of_a_step(job, size)
    counted = dict.fromkeys((product.key for product in products(job)), 0)
    for product in products(job):
        counted[product.key] += product.count
    assert {name: order.count(name) for name in counted} == counted
    assert order.count(FORWARD) == order.count(BACKWARD) == 3
    total = (
        elementwise_bytes(SHAPE) * job.tokens
        + loss_bytes(job) * job.tokens
        + job.optimizer_bytes * job.trained_parameters
    )
    assert order.count(COPY) * 2 * size == pytest.approx(total, rel=0.1)


def test_weights_in_4_bits_are_copied_as_often_as_they_are_dequantised(on_a_card):
    """In whole copies of a layer."""
    job = Job(SHAPE, 10**5, 500.0, 8)
    size = rates.copied_bytes(job)
    plain, packed = (
        rates.order_of_a_step(replace(job, dequantised_bytes=of), size).count(COPY)
        for of in (0.0, 2e4)
    )
    more = dequantised_bytes(replace(job, dequantised_bytes=2e4))
    assert (packed - plain) * 2 * size == pytest.approx(
        more, abs=2 * size * SHAPE.layers
    ) and packed > plain


def test_copies_are_neither_tiny_nor_huge(on_a_card):
    sizes = [rates.copied_bytes(Job(SHAPE, tokens, 500.0)) for tokens in (1, 10**5, 10**9)]
    assert sizes[0] == rates.SMALLEST_COPY < sizes[1] < sizes[2] == rates.LARGEST_COPY


@pytest.mark.parametrize("kind", ["forward", "dX", "dW"])
def test_products_have_their_shapes(kind):
    run = rates._product(Product("qkv", kind, 300, 64, 32, 1), torch.float32, {})
    assert run().shape == {"forward": (256, 32), "dX": (256, 64), "dW": (32, 64)}[kind]


@pytest.mark.parametrize("name", ["head", "down"])
def test_only_what_comes_back_to_the_head_is_of_one_sign(name):
    operands = {}
    rates._product(Product(name, "dX", 300, 64, 32, 1), torch.float32, operands)
    (x, upstream, weight), *_ = operands.values()
    assert (upstream > 0).all() == (name == "head")
    assert (x < 0).any() and (weight < 0).any()


class Ticking:
    """A clock whose time passes as it is told, with marks that take some of it."""

    now = 0.0
    of_a_mark = 0.0

    def __init__(self):
        self.marks = []

    def mark(self):
        type(self).now += self.of_a_mark
        self.marks.append(self.now)

    def seconds(self):
        return [b - a for a, b in zip(self.marks, self.marks[1:])]

    @classmethod
    def takes(cls, seconds):
        def run():
            cls.now += seconds

        return run


PARTS = {"a": Ticking.takes(1.0), "b": Ticking.takes(4.0)}
ORDER = ["a", "b", "b", "a"]


@pytest.fixture
def ticking(monkeypatch):
    """The clock of the rates, whose marks take no time."""
    monkeypatch.setattr(rates, "Clock", Ticking)
    return Ticking


def test_each_part_is_timed_where_it_stands(ticking, let_return):
    let_return(rates, device=torch.device("cpu"))
    assert rates.seconds_of(PARTS, ORDER) == {"a": 1.0, "b": 4.0}


def test_a_whole_step_has_no_marks_between_its_parts(ticking, monkeypatch):
    monkeypatch.setattr(ticking, "of_a_mark", 0.5)
    square = torch.zeros(0, 8)
    assert rates._step(PARTS, ORDER, square, 0)[1] == [1.5, 4.5, 4.5, 1.5]
    assert rates._step(PARTS, ORDER, square, 0, marked=False)[1] == [10.5]


def test_what_marks_take_is_taken_off():
    with_marks = {"a": 1.5, "b": 4.5}
    assert rates._without_marks(with_marks, ORDER, 10.0) == {"a": 1.0, "b": 4.0}
    assert (
        rates._without_marks(with_marks, ORDER, 13.0) == with_marks
    )  # a step that was slow for another reason
    assert rates._without_marks(with_marks, ORDER, 4.0) == {
        "a": 0.75,
        "b": 2.5,
    }  # no part takes no time


def test_a_slow_host_is_given_a_longer_lead():
    assert rates._leading(queued=0.01, step=0.1, square=0.0015) == rates.LEADING_PRODUCTS
    assert rates._leading(queued=0.04, step=0.041, square=0.0015) * 0.0015 >= 0.04
    assert rates._leading(queued=0.001, step=0.0015, square=0.0015) == rates.LEADING_PRODUCTS


@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_of_a_whole_row(mode, tmp_path):
    work = made.work(tmp_path, mode=mode)
    prepare_work(work)
    found = rates.measure_rates(work)
    parts = found["floor"]
    job = work.job()
    assert found["products"].keys() == {product.key for product in products(job)}
    assert (
        all(rate["flops_per_second"] > 0 for rate in found["products"].values())
        and found["copy_bytes_per_second"] > 0
    )
    expected = sum(
        product.count * found["products"][product.key]["seconds"] for product in products(job)
    )
    assert parts["products"] == pytest.approx(expected) and parts["attention"] > 0
    assert parts["tokens_per_second"] == pytest.approx(job.tokens / parts["seconds"])
