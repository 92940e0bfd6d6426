"""The work that every arm reads: the same documents in the same steps, and only real tokens
counted.
"""

import itertools
import json
from types import SimpleNamespace

import made
import numpy as np
import pytest
import torch
from peers import ways
from peers.packing import packed
from peers.trainer import (
    documents_in,
    sorted_in_steps,
    train_with_trainer,
    with_flash_lengths,
)

import tiny
from chronicals.benchmark.arms import loop
from chronicals.benchmark.arms.loop import grouped, padded
from chronicals.benchmark.arms.weights import with_peft, write_adapter
from chronicals.benchmark.measurement import ArmPlan
from chronicals.benchmark.plan import plan_work, read_work
from chronicals.benchmark.shapes import byte_tokenizer, random_documents
from chronicals.benchmark.work import MAX_PADDED_ROWS, Document, Work
from chronicals.config import ConfigurationError, Recipe
from comparison import equal


def planned(folder, **changes) -> Work:
    """A work whose tokenizer is there already; its weights are not needed."""
    work = made.work(folder, **changes)
    byte_tokenizer().save_pretrained(work.model)
    return work


def test_it_is_read_as_it_was_written(tmp_path):
    work = made.work(tmp_path, mode="lora")
    assert read_work(work.folder) == work
    config = work.config("other", lora_dropout=0.5)
    assert (
        config.use_lora
        and config.lora_dropout == 0.5
        and config.output_dir == work.folder / "other"
    )
    assert (config.lr_scheduler, config.warmup_steps, config.use_lora_plus) == (
        "constant",
        0,
        False,
    )


def test_what_the_user_sets_wins_and_what_a_benchmark_decides_is_dropped(tmp_path):
    work = made.work(tmp_path, learning_rate=0.5, max_steps=1000, batch_size=1)
    assert work.config().learning_rate == 0.5 and work.config().max_steps < 20
    assert work.config().batch_size == 1


def test_no_tracker_and_no_evaluation_of_the_users_run_is_in_a_measured_one(tmp_path):
    recipe = Recipe(
        model="tiny",
        data="fixed",
        mixed_precision="fp32",
        trackers=["wandb"],
        validation_split=0.1,
        eval_steps=10,
        early_stopping_patience=2,
    ).config()
    fields = {name: value for name, value in recipe.to_dict().items() if name in recipe.explicit}
    for config in (
        plan_work(tmp_path, "tiny", "fixed", "full", fields, 3, 1).config(),
        made.work(tmp_path).config(),
    ):
        assert (config.trackers, config.eval_steps, config.early_stopping_patience) == (
            [],
            None,
            None,
        )


def test_the_home_folder_is_found_in_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    work = plan_work(tmp_path / "bench", "~/base", "~/rows.jsonl", "full", {}, 3, 1)
    assert (work.model, work.documents) == (str(tmp_path / "base"), tmp_path / "rows.jsonl")


def test_an_unknown_mode_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="mode='lorra'"):
        plan_work(tmp_path, "tiny", "fixed", "lorra", {}, None, 1)


def test_arms_find_a_model_that_was_named_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "rows.jsonl").touch()
    work = plan_work(tmp_path / "bench", "base", "rows.jsonl", "full", {}, 3, 1)
    assert (work.model, work.documents) == (str(tmp_path / "base"), tmp_path / "rows.jsonl")
    assert (
        plan_work(tmp_path / "bench", "someone/model", "rows.jsonl", "full", {}, 3, 1).model
        == "someone/model"
    )


def test_fixed_documents_fill_every_pack(tmp_path):
    work = planned(tmp_path)
    for step, documents in zip(work.stream().steps(count=5), work.documents_by_step(5)):
        assert [len(document) for document in documents] == [64, 64]
        assert step.counts["tokens"] == step.counts["slots"] == 128


@pytest.mark.parametrize("data", ["fixed", "ragged"])
def test_peers_see_the_documents_of_our_batches(tmp_path, data):
    work = planned(tmp_path, data=data)
    made_here = {
        tuple(json.loads(line)["input_ids"]) for line in work.documents.read_text().splitlines()
    }
    for step, documents in zip(work.stream().steps(count=4), work.documents_by_step(4)):
        assert sum(map(len, documents)) == step.counts["tokens"]
        assert (
            sum(int((document.labels[1:] != -100).sum()) for document in documents)
            == step.counts["targets"]
        )
        for document in documents:
            assert tuple(document.ids.tolist()) in made_here
            assert document.labels[0] == -100 and (document.labels[1:] == document.ids[1:]).all()


def test_lengths_of_ragged_documents():
    lengths = np.array([len(ids) for ids in random_documents("ragged", 400_000, 2048, 1000)])
    assert lengths.min() >= 32 and lengths.max() <= 2048
    assert np.median(lengths) == pytest.approx(400, rel=0.15)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.15)


def test_sizes_of_a_step_are_those_of_its_documents(tmp_path):
    import transformers

    from chronicals.benchmark.shapes import SHAPES

    work = planned(tmp_path, data="ragged")
    transformers.Qwen2Config(**SHAPES["tiny"].sizes).save_pretrained(work.model)
    job = work.job()
    steps = list(work.documents_by_step(work.warm_up + work.steps))[work.warm_up :]
    lengths = [len(document) for step in steps for document in step]
    assert job.tokens == round(sum(lengths) / work.steps)
    assert job.mean_length == pytest.approx(sum(n * n for n in lengths) / sum(lengths))
    assert job.labelled == pytest.approx(1 - len(lengths) / sum(lengths))


def document(length: int, trained_from: int = 1) -> Document:
    ids = np.arange(1, length + 1)
    return Document(ids, np.where(np.arange(length) >= trained_from, ids, -100))


def test_padding_is_no_token():
    step = padded([document(10), document(4), document(9)], rows=2, place=torch.device("cpu"))
    assert (step.tokens, step.slots) == (23, 2 * 10 + 4)
    (first, share), (second, rest) = step.micro_batches
    assert (share, rest) == (17 / 20, 3 / 20)
    assert first["attention_mask"].sum() == 19 and "attention_mask" not in second
    assert first["labels"][1].tolist() == [-100, 2, 3, 4, 5, 6, 7, 8, 9, -100]


def test_micro_batches_are_even():
    step = padded([document(5)] * 17, rows=16, place=torch.device("cpu"))
    assert [len(given["input_ids"]) for given, _ in step.micro_batches] == [9, 8]
    assert step.tokens == step.slots == 85


def test_documents_of_like_length_share_a_micro_batch():
    """Peers sort by length as well; what is left is what a further micro-batch would cost more
    than it saves.
    """
    lengths = [len(ids) for ids in random_documents("ragged", 16_384, 2048, 1000)]
    step = padded([document(length) for length in lengths], MAX_PADDED_ROWS, torch.device("cpu"))
    widths = [width for _, width in step.shapes]
    assert widths == sorted(widths, reverse=True) and sum(rows for rows, _ in step.shapes) == len(
        lengths
    )
    assert step.slots < 1.35 * step.tokens


@pytest.mark.parametrize("overhead", [0, 30, 200, 10**6])
def test_the_groups_are_the_cheapest(overhead):
    lengths = [90, 80, 50, 49, 20, 10, 10, 4]

    def cost(bounds):
        return sum(overhead + (end - start) * lengths[start] for start, end in bounds)

    cuts = [
        [0, *cut, len(lengths)] for n in range(8) for cut in itertools.combinations(range(1, 8), n)
    ]
    all_ways = [
        list(itertools.pairwise(cut))
        for cut in cuts
        if max(b - a for a, b in itertools.pairwise(cut)) <= 5
    ]
    assert cost(grouped(lengths, 5, overhead)) == min(map(cost, all_ways))


class Measured:
    """A model whose passes take as long as it is told: so much for a call, so much for a
    position; some do not fit.
    """

    def __init__(self, call, position, most=10**9):
        self.call = call
        self.position = position
        self.most = most
        self.now = 0.0

    def __call__(self, input_ids, **_):
        if input_ids.numel() > self.most:
            raise torch.OutOfMemoryError
        self.now += self.call + self.position * input_ids.numel()
        return SimpleNamespace(loss=torch.zeros((), requires_grad=True))

    def zero_grad(self, set_to_none):
        pass


@pytest.fixture
def told_by(monkeypatch):
    """Lets trials take the time from a model: ``told_by(model)``."""
    return lambda model: monkeypatch.setattr(ways, "_now", lambda: model.now)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Measured(0, 1), 512),
        (Measured(2000, 1), 2048),
        (Measured(10**5, 1), 8192),
        (Measured(10**5, 1, most=5000), 512),
    ],
)
def test_a_padded_peer_takes_the_micro_batches_that_are_fastest(model, expected, told_by):
    lengths = [
        2048,
        1800,
        1500,
        1000,
        900,
        700,
        650,
        600,
        500,
        450,
        400,
        300,
        280,
        250,
        200,
        150,
        100,
        90,
        60,
        40,
    ]
    told_by(model)
    found, failed = ways.fastest_way(
        model, [[document(length) for length in lengths]], MAX_PADDED_ROWS
    )
    assert (found, failed) == (ways.Way(None, expected), [])


class Attending(Measured):
    """One whose positions take as long as its attention needs, ``packed`` times that in packed
    rows; a broken one raises.
    """

    def __init__(self, apart=True, packed=1.0, **costs):
        super().__init__(2000, 0)
        self.apart = apart
        self.packed = packed
        self.costs = costs
        self.attention = "sdpa"

    def set_attn_implementation(self, name):
        self.attention = name

    def __call__(self, input_ids, **given):
        self.position = self.costs[self.attention]
        if self.position is None or (self.position < 0 and "position_ids" in given):
            raise RuntimeError("no such kernel")
        self.position = abs(self.position) * (self.packed if "position_ids" in given else 1)
        logits = input_ids[..., None] if self.apart else input_ids[..., None] + input_ids.sum()
        return SimpleNamespace(loss=super().__call__(input_ids).loss, logits=logits)


@pytest.mark.parametrize(
    ("flash", "lengths", "expected", "failed"),
    [
        (0.5, [64] * 4, ways.Way("flash_attention_4"), []),
        (2, [64] * 4, ways.Way("sdpa"), []),
        (None, [64] * 4, ways.Way("sdpa"), ["flash_attention_4 did not run: RuntimeError"]),
        (0.5, [2048, 900, 300, 40], ways.Way("flash_attention_4", None), []),
        (
            -0.5,
            [2048, 900, 300, 40],
            ways.Way("flash_attention_4", 8192),
            ["flash_attention_4, packed rows did not run: RuntimeError"],
        ),
    ],
)
def test_a_plain_peer_takes_the_attention_that_is_fastest_and_names_what_fails(
    flash, lengths, expected, failed, told_by
):
    model = Attending(sdpa=1, flash_attention_4=flash)
    told_by(model)
    steps = [[document(length) for length in lengths]]
    assert ways.fastest_way(model, steps, MAX_PADDED_ROWS, ["flash_attention_4", "sdpa"]) == (
        expected,
        failed,
    )
    assert model.attention == expected.attention


def test_an_attention_that_is_slow_over_padded_rows_may_be_the_fastest_over_packed_ones(
    told_by,
):
    model = Attending(packed=0.1, sdpa=1, flash_attention_4=3)
    told_by(model)
    steps = [[document(length) for length in (2048, 900, 300, 40)]]
    found, _ = ways.fastest_way(model, steps, MAX_PADDED_ROWS, ["flash_attention_4", "sdpa"])
    assert found == ways.Way("flash_attention_4", None) and model.attention == "flash_attention_4"


def test_packed_rows_whose_documents_see_each_other_are_not_taken(told_by):
    model = Attending(apart=False, sdpa=1, flash_attention_4=0.5)
    told_by(model)
    steps = [[document(length) for length in (2048, 900, 300, 40)]]
    found, failed = ways.fastest_way(model, steps, MAX_PADDED_ROWS, ["flash_attention_4", "sdpa"])
    assert found == ways.Way("flash_attention_4", 8192)
    assert failed == ["flash_attention_4, packed rows did not run: its documents see each other"]


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_real_model_changes_its_attention_and_keeps_packed_documents_apart(mode, device):
    model = tiny.llama().to(device)
    model.config.use_cache = False
    if mode == "lora":
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        )
    model.set_attn_implementation("eager")
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa" and ways.keeps_documents_apart(model)


def test_a_packed_step_has_no_padding_and_no_target_across_documents():
    step = packed([document(3), document(2)], torch.device("cpu"))
    ((given, share),) = step.micro_batches
    assert given["position_ids"].tolist() == [[0, 1, 2, 0, 1]] and (
        share,
        step.tokens,
        step.slots,
    ) == (1.0, 5, 5)
    assert [label == -100 for label in given["labels"][0].tolist()] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert (given["cu_seq_lens_q"].tolist(), given["max_length_q"]) == ([0, 3, 5], 3)
    assert given["cu_seq_lens_q"].dtype == torch.int32 and type(given["max_length_q"]) is int


def test_a_trainers_packed_rows_say_where_documents_begin():
    positions = torch.tensor([[0, 1, 0, 0, 1, 2]])
    batch = with_flash_lengths(lambda rows: {"input_ids": rows, "position_ids": positions})(
        positions
    )
    assert (batch["cu_seq_lens_k"].tolist(), batch["max_length_k"]) == ([0, 2, 3, 6], 3)
    assert batch["input_ids"] is positions and batch["position_ids"] is positions


def test_states_made_before_a_trial_change_no_step():
    def trained(made):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(8))
        optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
        if made:
            before = weight.detach().clone()
            ways.make_states(optimizer)
            assert (
                equal(weight, before)
                and weight.grad is None
                and optimizer.state[weight]["exp_avg"].shape == (8,)
            )
        for _ in range(3):
            (weight**3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    assert equal(trained(True), trained(False))


def test_a_trainers_padded_rows_are_sorted_within_a_step():
    documents = [document(length) for length in (3, 9, 5, 4, 8, 7, 6)]
    assert [len(one) for one in sorted_in_steps(documents, 3)] == [9, 5, 3, 8, 7, 4, 6]


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": [[1, 2, 3, 4, 5]], "position_ids": [[0, 1, 0, 1, 2]]},
        {"input_ids": [[1, 2, 0], [3, 4, 5]], "attention_mask": [[1, 1, 0], [1, 1, 1]]},
        {
            "input_ids": [[1, 2, 3, 4, 5, 0]],
            "attention_mask": [[1, 1, 1, 1, 1, 0]],
            "packed_seq_lengths": [2, 3],
        },
    ],
)
def test_documents_are_found_in_a_trainers_batch(inputs):
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    assert documents_in(tensors) == [[1, 2], [3, 4, 5]]


@pytest.mark.slow
def test_a_trainers_step_is_as_large_as_ours(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    work = planned(tmp_path, batch_size=2, gradient_accumulation_steps=3)
    given = {}

    class Described(Exception):
        pass

    def described(**fields):
        given.update(fields)
        raise Described

    monkeypatch.setattr(trl, "SFTConfig", described)
    with pytest.raises(Described):
        train_with_trainer(None, None, work, ArmPlan(steps=2, warm_up=1), "made", packing=False)
    assert (given["per_device_train_batch_size"], given["gradient_accumulation_steps"]) == (2, 3)
    (step,) = work.documents_by_step(1)
    assert len(step) == 2 * 3


def test_adapters_of_a_peer_are_scaled_as_ours(tmp_path):
    pytest.importorskip("peft")
    work = planned(
        tmp_path, mode="lora", lora_rank=4, lora_alpha=2.5, lora_target_modules=["q_proj"]
    )
    tiny.llama().save_pretrained(work.model)
    write_adapter(work)
    model = with_peft(tiny.llama(), work)
    scales = {layer.scaling["default"] for layer in model.modules() if hasattr(layer, "lora_A")}
    assert scales == {2.5 / 4}


@pytest.mark.parametrize(("lengths", "leaves"), [((7, 7), False), ((7, 9), True)])
def test_where_steps_differ_in_their_shapes_cudnn_makes_no_plans(
    lengths, leaves, monkeypatch, let_return
):
    steps = [padded([document(length)], 4, torch.device("cpu")) for length in lengths]
    set_to = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", set_to.append)
    let_return(loop, device=torch.device("cpu"))
    assert not loop.disable_cudnn_for_varying_shapes(steps) and set_to == []
    let_return(loop, device=torch.device("cuda"))
    assert loop.disable_cudnn_for_varying_shapes(steps) == leaves and set_to == [False] * leaves
