"""Number of threads with which a quickstart computes."""

import pytest
import torch

from chronicals.training.quickstart import fastest_threads, operations_in


@pytest.fixture
def four_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize(
    "operations, fastest",
    [
        ({4: 400, 3: 300, 2: 200, 1: 100}, 4),  # nothing else runs
        ({4: 90, 3: 280, 2: 200, 1: 100}, 3),  # another program takes one core
        ({4: 30, 3: 50, 2: 80, 1: 100}, 1),  # others take all
        ({4: 100, 3: 100, 2: 100, 1: 100}, 4),
    ],
)
def test_the_fastest_number_of_threads_computes(four_threads, operations, fastest):
    with fastest_threads(operations.__getitem__) as threads:
        assert threads == torch.get_num_threads() == fastest
    assert torch.get_num_threads() == 4


def test_the_usual_threads_are_back_after_an_error(four_threads):
    with pytest.raises(RuntimeError, match="ended"), fastest_threads({4: 1, 3: 2, 2: 1, 1: 1}.get):
        raise RuntimeError("ended")
    assert torch.get_num_threads() == 4


def test_more_time_is_more_operations(four_threads):
    assert operations_in(1, 0.2) > operations_in(1, 0.02) > 0
    assert torch.get_num_threads() == 1
