"""patch_model where other libraries train on several ranks: DDP and FSDP2 by accelerate, tensors
split by transformers.
"""

import sys
from pathlib import Path

import pytest
import torch

import families
import two_processes

pytest.importorskip("accelerate")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parent))
import patched_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the ranks would compute on cards, one process on the CPU"
    ),
]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Where the first of two ranks put what it found in every case that is tested."""
    place = tmp_path_factory.mktemp("ranks")
    test = request.node.nodeid
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.nodeid.startswith(f"{test}::")
    ]
    codes, words = two_processes.run(patched_ranks.__file__, place, *cases)
    assert codes == [0, 0], words
    return place


@pytest.mark.parametrize("case", patched_ranks.CASES)
def test_two_ranks_train_the_patched_model_as_one_trains_the_plain_one(case, folder):
    found = torch.load(folder / f"{case}.pt")
    expected = patched_ranks.alone(case)
    assert found.pop("replaced") > 0
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0.0)
    assert expected["losses"][0] - expected["losses"][-1] > 0.01, "nothing was learned"
    assert found.keys() == expected.keys()
    wrong = {name: families.distance(found[name], own) for name, own in expected.items()}
    assert max(wrong.values()) < 1e-5, wrong
