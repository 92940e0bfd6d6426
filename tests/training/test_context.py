"""Processes that share packs, each a part of their tokens, train what one process trains."""

import sys
from pathlib import Path

import pytest
import torch

import families
import runs
import tiny
import two_processes
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh
from chronicals.policies.context_parallel import exchanging, sharing_packs

sys.path.insert(0, str(Path(__file__).parent))
import context_ranks

pytestmark = [
    pytest.mark.of_file(4),
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the ranks would compute on cards, one process on the CPU"
    ),
]

CASES = [
    *(f"run: {name}" for name in context_ranks.RUNS),
    *(f"refused: {name}" for name in context_ranks.REFUSED),
    *(f"attention: {name}" for name in context_ranks.OPTIONS if "both" not in name),
    "fused: layers",
    "fused: tiles",
    "resumed: by one",
]


def launched(folder, count, cases):
    teacher = folder / "teacher"
    tiny.llama(1).save_pretrained(teacher)
    tiny.tokenizer().save_pretrained(teacher)
    codes, words = two_processes.run(context_ranks.__file__, folder, *cases, count=count)
    assert codes == [0] * count, words
    return folder


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    """Where two processes put what they found in every case that is tested."""
    tested = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    left = [name for name in context_ranks.RUNS if {"name": name} not in tested]
    return launched(
        tmp_path_factory.mktemp("two"),
        2,
        [case for case in CASES if case.removeprefix("run: ") not in left],
    )


def agree(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found["steps"], expected["steps"], rtol=tolerance, atol=0.0)
    assert found["held out"] == pytest.approx(expected["held out"], rel=tolerance)
    assert found["weights"].keys() == expected["weights"].keys()
    distances = {
        name: families.distance(found["weights"][name], own)
        for name, own in expected["weights"].items()
    }
    assert max(distances.values()) < 1e-4, distances


@pytest.mark.parametrize("name", context_ranks.RUNS)
def test_two_that_share_packs_train_what_one_trains(name, two):
    seen = torch.load(two / f"run: {name}.pt")
    agree(seen["together"], seen["alone"])
    losses = seen["alone"]["steps"][:, 1]
    assert losses[0] != losses[-1]


def test_one_goes_on_where_two_that_shared_packs_ended(two):
    seen = torch.load(two / "resumed: by one.pt")
    (last,) = seen["together"]["steps"].tolist()
    assert last == pytest.approx(seen["alone"]["steps"][-1].tolist(), rel=1e-5)
    agree({**seen["together"], "steps": seen["alone"]["steps"]}, seen["alone"])


def test_four_of_which_two_share_each_pack(tmp_path):
    names = (
        "all heads",
        "one key head",
        "sinks",
        "keys, window",
        "keys, narrow values",
        "both",
        "both, window",
        "both, sinks",
    )
    launched(tmp_path, 4, ["run: all weights", *(f"attention: {name}" for name in names)])
    seen = torch.load(tmp_path / "run: all weights.pt")
    agree(seen["together"], seen["alone"])
    for name in names:  # all four share the documents
        seen = torch.load(tmp_path / f"attention: {name}.pt")
        torch.testing.assert_close(seen["found"], seen["expected"])


@pytest.mark.parametrize("name", [name for name in context_ranks.OPTIONS if "both" not in name])
def test_attention_of_parts_is_that_of_the_whole(name, two):
    seen = torch.load(two / f"attention: {name}.pt")
    for found, expected in zip(seen["found"], seen["expected"], strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["layers", "tiles"])
def test_fused_layers_take_parts(way, two):
    seen = torch.load(two / f"fused: {way}.pt")
    for found, expected in zip(seen["found"], seen["expected"], strict=True):
        assert families.distance(found, expected) < 1e-5


WORDS = {
    "dpo": "pack_parts=2: objective='dpo' compares whole documents, which must lie on one process",
    "heads": "context_parallel=2: 3 query and 3 key heads cannot be divided among 2 ranks; "
    "context_heads=1 divides none",
    "padded rows": "context_parallel=2: MambaForCausalLM takes documents as padded rows",
    "router loss": "context_parallel=2: the router loss of MixtralForCausalLM is one of whole "
    "packs",
    "layers skipped": "context_parallel=2: OPTForCausalLM skips layers at random",
    "in the backward pass": "memory=['reduce_in_backward']: sums wait for processes that wait for "
    "heads",
    "tokens mixed": "context_parallel=2: LlamaForCausalLM computes something else of a part of a "
    "document than of the whole",
    "odd tokens": "max_seq_length=98: packs in 2 parts (context_parallel, pack_parts) need a "
    "multiple of 4",
    "parts": "pack_parts=3: so many parts cannot be divided among context_parallel=2 processes",
}


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_be_shared_is_refused(name, two):
    assert torch.load(two / f"refused: {name}.pt").startswith(WORDS[name])


@pytest.mark.parametrize(
    ("machines", "number", "heads", "key_heads", "inner"),
    [
        ("aaaa", 4, 8, 4, 4),
        ("aaaa", 2, 8, 4, 2),
        ("aaaa", 4, 8, 2, 2),
        ("aaaa", 2, 3, 3, 1),
        ("aaaabbbb", 8, 32, 8, 4),
        ("aaaabbbb", 8, 32, 2, 2),
        ("aabb", 4, 6, 3, 1),
        ("abab", 2, 8, 8, 1),
        ("aaabbb", 6, 12, 6, 3),
        ("aabbbb", 6, 12, 6, 2),
    ],
)
def test_heads_are_exchanged_within_machines_where_they_divide(
    machines, number, heads, key_heads, inner
):
    assert exchanging(machines, number, heads, key_heads) == inner


def test_processes_that_are_no_multiple():
    with pytest.raises(
        ConfigurationError,
        match=r"context_parallel=2: 1 processes cannot share packs 2 by 2; .*--nproc 2",
    ):
        Mesh().sharing_packs(2)


def test_heads_that_no_processes_exchange(tmp_path):
    with pytest.raises(
        ConfigurationError, match="context_heads=2: no pack is shared; set context_parallel too"
    ):
        sharing_packs(Mesh(), runs.config(tmp_path, context_heads=2), tiny.llama())
    with pytest.raises(
        ConfigurationError,
        match="context_heads=3: 4 processes that share packs cannot exchange heads 3 by 3",
    ):
        Mesh(count=4).sharing_packs(4, 3)
