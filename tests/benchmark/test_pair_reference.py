"""DPO and ORPO in the arms: ours and TRL's trainers train as the fp32 formulas do, and a planted
fault is refused.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_benchmark import run
from test_preference_rows import planned

import chronicals.objectives.dpo
import chronicals.objectives.orpo
from chronicals.benchmark.arms import ours, pair_reference
from chronicals.benchmark.measurement import ArmPlan, Measurement, round_file
from chronicals.benchmark.pairs import Pair, PairSteps, PairWork
from chronicals.benchmark.parity import Tolerance, comparison, refusal
from chronicals.objectives.pairs import Pairs

TIGHT = Tolerance(1e-4, 1e-4)
MOVING = {"learning_rate": 1e-3}


def measured(arm, work, folder, steps=4, documents=None):
    """What an arm hands in, in this process."""
    out = folder / f"{arm.__name__}.json"
    arm(work, ArmPlan(steps - 1, 1, documents=documents, out=out))
    return Measurement.read(round_file(out, 0))


@pytest.fixture(
    scope="module", params=[("full", "dpo"), ("lora", "dpo"), ("full", "orpo")], ids="-".join
)
def row(request, tmp_path_factory):
    """A work, its reference, and the folder of results."""
    mode, objective = request.param
    folder = tmp_path_factory.mktemp("row")
    work = planned(folder, mode, objective=objective, **MOVING)
    assert isinstance(work, PairWork)
    return work, measured(pair_reference.train_pair_reference, work, folder), folder


@pytest.mark.slow
def test_ours_trains_as_the_formula_does(row):
    work, reference, folder = row
    found = measured(ours.ours, work, folder)
    assert refusal(found, reference, TIGHT) is None
    assert (
        found.computed is not None
        and sum(found.computed) < sum(found.tokens)
        and found.tokens == reference.tokens
    )
    if work.objective == "dpo":
        assert found.losses[0] == pytest.approx(0.6931472, abs=1e-6) and found.losses[3] < 0.69
        assert ("stored" if work.mode == "full" else "adapters off") in found.settings


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_in_bf16_the_reference_has_the_weights_that_arms_have(mode, tmp_path):
    """Updates of 1e-6 do not show in weights that begin as bf16 numbers: an fp32 model would go
    elsewhere than every arm.
    """
    work = planned(
        tmp_path,
        mode,
        objective="dpo",
        mixed_precision="bf16",
        learning_rate={"full": 1e-6, "lora": 1e-3}[mode],
    )
    exact = planned(
        tmp_path / "exact", mode, objective="dpo", learning_rate={"full": 1e-6, "lora": 1e-3}[mode]
    )
    reference = measured(pair_reference.train_pair_reference, work, tmp_path)
    found = measured(ours.ours, work, tmp_path)
    assert refusal(found, reference, Tolerance()) is None
    noise = [abs(a - b) for a, b in zip(reference.rounded_losses, reference.losses)]
    exact = measured(pair_reference.train_pair_reference, exact, tmp_path)
    assert 0 < max(noise) < 0.01 and exact.rounded_losses is None and exact.rounded_norms is None
    assert (reference.rounded_norms is None) == (mode == "full")
    spreads = reference.rounding_spreads
    most = max(map(len, work.pairs_by_step(len(noise)))) ** 0.5
    assert spreads[0] == 0 < min(spreads[1:]) and all(
        a <= most * b + 1e-6 for a, b in zip(noise, spreads)
    )
    assert exact.rounding_spreads is None
    if mode == "lora":
        assert reference.rounded_norms == pytest.approx(reference.grad_norms, rel=0.05)
        assert reference.rounded_norms != reference.grad_norms


@pytest.mark.slow
def test_trl_trains_as_the_formula_does_on_its_own_steps(row):
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from peers import preference

    work, reference, folder = row
    found = measured(preference.trl, work, folder)
    assert "did not run" not in found.settings and found.own_batches is not None
    held = PairSteps.of_json(found.own_batches)
    flat = [pair for step in work.pairs_by_step(8) for pair in step]
    assert all(pair in flat for step in held.steps for part in step for pair in part)
    assert found.tokens[0] == sum(pair.tokens for part in held.steps[0] for pair in part)
    first = [pair for part in held.steps[0] for pair in part]
    ours = next(work.pairs_by_step(1))
    same = len(first) == len(ours) and all(pair in first for pair in ours)
    assert found.begins_alike == (work.objective == "dpo" and same)
    if found.begins_alike:
        assert (
            refusal(
                found,
                replace(
                    reference, losses=reference.losses[:1], grad_norms=reference.grad_norms[:1]
                ),
                TIGHT,
            )
            is None
        )
    (folder / "own.json").write_text(json.dumps(found.own_batches))
    own = measured(pair_reference.train_pair_reference, work, folder, documents=folder / "own.json")
    assert refusal(found, own, TIGHT) is None
    assert comparison(found, own)["grad_norm"]["largest_deviation"] < 1e-4
    assert found.trained_share == pytest.approx(reference.trained_share)


@pytest.mark.slow
def test_unsloth_trains_through_the_trainer_that_it_patches(tmp_path, monkeypatch, let_return):
    """Its model in this test is PEFT's."""
    pytest.importorskip("trl")
    from peers import unsloth_preference

    from chronicals.benchmark.arms.weights import load, with_peft

    work = planned(tmp_path, "lora", objective="dpo", **MOVING)
    patched = []
    monkeypatch.setitem(
        sys.modules, "unsloth", SimpleNamespace(PatchDPOTrainer=lambda: patched.append(True))
    )
    model = with_peft(load(work.model, torch.float32), work)
    let_return(unsloth_preference, load=(model, None))
    found = measured(unsloth_preference.unsloth, work, tmp_path, steps=2)
    assert (
        patched == [True]
        and found.moved_share > 0.9
        and found.losses[0] == pytest.approx(0.6931, abs=2e-3)
    )
    assert found.settings.startswith("its DPOTrainer, no recomputation, fused AdamW")


@pytest.mark.long
def test_the_command_measures_ours_and_trl(tmp_path):
    pytest.importorskip("trl")
    ran, result, _ = run(
        tmp_path,
        "--objective",
        "dpo",
        "--mode",
        "lora",
        "--max-seq-length",
        256,
        "--steps",
        2,
        "--warm-up",
        2,
        "--learning-rate",
        1e-3,
        "--against",
        "trl",
        "--loss-tolerance",
        1e-3,
        "--norm-tolerance",
        1e-3,
    )
    assert (
        result["row"]["data"] == "pairs-50"
        and result["row"]["objective"] == "dpo"
        and result["floor"] is None
    )
    ours, theirs = (result["arms"][name] for name in ("ours", "trl"))
    assert (
        ours["status"] == theirs["status"] == "measured" and ours["rounds"] == theirs["rounds"] == 1
    )
    assert ours["tokens_saved"] > 0.1 and theirs["tokens_saved"] is None
    assert 0 <= ours["padding_share"] < theirs["padding_share"]
    assert "because answers share a prompt" in ran.stdout
    assert any("no MFU and no reference step" in note for note in result["notes"])


def trial(monkeypatch, passed, steps, work=None):
    """What ``fastest_way`` finds for passes that take the seconds, or raise, as ``passed(way,
    longest row)`` says.
    """
    from peers import pair_ways

    class Model:
        def zero_grad(self, set_to_none):
            pass

        def train(self):
            pass

        def set_attn_implementation(self, name):
            self.attention = name

    class Build:
        def __init__(self, model):
            self.model = model

        def __call__(self, steps, pairs):
            rows = [pair for step in steps for pair in step]
            return SimpleNamespace(
                train_dataset=rows, args=SimpleNamespace(gradient_checkpointing=False)
            )

    monkeypatch.setattr(
        pair_ways.PairTrial, "_passed", lambda self, way, rows: passed(way, rows[0].longest)
    )
    model = Model()
    attentions = [pair_ways.Attention(name) for name in ("flash", "sdpa")]
    found = (
        pair_ways.fastest_way
        if work is None
        else partial(pair_ways.known_or_fastest_way, work=work, arm="TRL")
    )
    way, words = found(Build(model), steps, attentions)
    assert model.attention == way.attention.name
    return (way.pairs, way.attention.name), words


def step_of(length):
    return [Pair([1], [2] * (length - 1), [3])] * 8


def test_a_trial_takes_the_fastest_that_has_room(monkeypatch):
    """No more pairs than what ran out of memory; smaller micro-batches where the usual ones do
    not fit.
    """
    tried = []

    def passed(way, longest):
        tried.append((way.pairs, way.attention.name))
        if way.pairs > 2:
            raise torch.OutOfMemoryError
        if way.attention.name == "flash":
            raise ValueError("no kernel")
        return 1.0 / way.pairs

    way, words = trial(monkeypatch, passed, [step_of(2)])
    assert way == (2, "sdpa") and "flash 2 pairs did not run: ValueError" in words
    assert list(dict.fromkeys(tried)) == [(4, "flash"), (4, "sdpa"), (2, "flash"), (2, "sdpa")]


def test_a_trial_fits_the_longest_step_and_times_usual_ones(monkeypatch):
    """Each of them once: a pass of a length that was met before is faster. The first way
    compiles in other steps, and is timed again, for it may compile more."""
    seen = []

    def passed(way, longest):
        seen.append((way.pairs, way.attention.name, longest))
        if longest == 90 and way.pairs == 8:
            raise torch.OutOfMemoryError
        slow = {"flash": 10.0, "sdpa": 1.0} if longest == 90 else {"flash": 1.0, "sdpa": 1.5}
        compiling = 30.0 if len(seen) < 7 else 0.0
        return slow[way.attention.name] + longest / 100 + compiling

    way, words = trial(
        monkeypatch, passed, [step_of(length) for length in (30, 90, 5, 28, 32, 85, 26, 3)]
    )
    assert way == (4, "flash")
    assert [length for *_, length in seen if _ == [4, "flash"]] == [
        90,
        3,
        5,
        85,
        26,
        90,
        26,
        28,
        30,
        32,
    ]
    assert [length for *_, length in seen if _ == [4, "sdpa"]] == [90, 26, 28, 30, 32]
    assert (
        words[0]
        == "passes of a usual step: flash 4 pairs 1.29 s, sdpa 4 pairs 1.79 s, flash 2 pairs 1.29 s"
    )
    assert words[1] == "flash 8 pairs did not run: OutOfMemoryError"


@pytest.mark.parametrize(("seconds", "found"), [(1.2, (8, "flash")), (1.4, (4, "sdpa"))])
def test_a_trial_takes_more_pairs_with_an_attention_that_comes_close(monkeypatch, seconds, found):
    """One that is the fastest with many pairs alone; not one that is far from it."""
    took = {
        ("flash", 4): seconds,
        ("flash", 8): 0.5,
        ("sdpa", 4): 1.0,
        ("sdpa", 2): 2.0,
        ("sdpa", 8): 1.1,
    }
    way, words = trial(
        monkeypatch, lambda way, longest: took[way.attention.name, way.pairs], [step_of(3)]
    )
    assert way == found
    assert "flash 2 pairs" not in words[0]


@pytest.mark.slow
def test_what_a_trial_found_holds_for_other_shares_of_prompts(monkeypatch, tmp_path):
    """Whose rows are as long; not for another objective, wider packs, or steps of more pairs, of
    which other numbers fit into a micro-batch."""
    tried = []

    def passed(way, longest):
        tried.append(way)
        return 1.0 if way.attention.name == "flash" else 2.0

    half, more = (
        planned(tmp_path, "lora", objective="dpo", data=data) for data in ("pairs-50", "pairs-70")
    )
    steps = [step_of(2)]
    assert trial(monkeypatch, passed, steps, half)[0] == (4, "flash") and tried
    tried.clear()
    way, words = trial(monkeypatch, passed, [step_of(3)], more)
    assert way == (4, "flash") and not tried
    assert words[0] == "as in the trial of pairs-50" and "flash 4 pairs 1.00 s" in words[1]
    orpo = planned(tmp_path, "lora", objective="orpo", data="pairs-70")
    wider = {**more.fields, "max_seq_length": 512}
    longer = [step_of(3) + step_of(3)[:4]]
    for other, given in (
        (more, longer),
        (more, [step_of(3)[:6]]),
        (orpo, steps),
        (replace(more, fields=wider), steps),
    ):
        tried.clear()
        trial(monkeypatch, passed, given, other)
        assert tried


def test_torchs_attention_is_tried_without_cudnn_too():
    from peers import pair_ways

    given = [
        pair_ways.attentions_of(*given)
        for given in ((["flash_attention_4", "sdpa"], True), ([], True), ([], False))
    ]
    assert [[attention.words for attention in found] for found in given] == [
        ["flash_attention_4", "sdpa without cuDNN", "sdpa"],
        ["attention without cuDNN", ""],
        [""],
    ]
    try:
        for attention in given[1]:
            attention.take(None)
            assert torch.backends.cuda.cudnn_sdp_enabled() == attention.cudnn
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def upside_down(losses):
    return lambda h, *given: losses(-h, *given)


@pytest.mark.slow
def test_a_wrong_sign_is_refused(row, monkeypatch, tmp_path):
    work, reference, _ = row
    module, name = {
        "dpo": (chronicals.objectives.dpo, "dpo_losses"),
        "orpo": (chronicals.objectives.orpo, "log_odds_ratio"),
    }[work.objective]
    right = getattr(module, name)
    monkeypatch.setattr(
        module, name, upside_down(right) if work.objective == "dpo" else lambda a, b: right(b, a)
    )
    found = measured(ours.ours, work, tmp_path)
    reason = refusal(found, reference, TIGHT if work.objective == "orpo" else Tolerance())
    assert reason is not None and "where the fp32 reference has" in reason


@pytest.mark.slow
def test_a_missing_reference_policy_is_refused(row, monkeypatch, tmp_path):
    work, reference, _ = row
    if work.objective != "dpo":
        pytest.skip("ORPO has none")
    monkeypatch.setattr(Pairs, "log_ratios", lambda pairs: (pairs.chosen, pairs.rejected))
    reason = refusal(measured(ours.ours, work, tmp_path), reference, Tolerance())
    assert reason is not None and reason.startswith("step 1: loss")


def test_the_losses_of_the_reference_are_the_papers():
    """By sigmoids and odds themselves."""
    work = SimpleNamespace(beta=0.1)
    part = [Pair([1], [2, 3], [4])]
    scores = pair_reference.PairScores(
        *(torch.tensor([value]) for value in (-1.0, -2.0, 2.0, 1.0, -1.0))
    )
    start = pair_reference.PairScores(
        *(torch.tensor([value]) for value in (-1.5, -1.5, 2.0, 1.0, -1.5))
    )
    margin = 0.1 * ((-1.0 + 1.5) - (-2.0 + 1.5))
    dpo = pair_reference.dpo_loss(work, part, scores, start)
    assert float(dpo) == pytest.approx(float(-torch.tensor(margin).sigmoid().log()))
    odds = [torch.tensor(p).exp() / (1 - torch.tensor(p).exp()) for p in (-0.5, -2.0)]
    orpo = pair_reference.orpo_loss(work, part, scores, prompt_is_trained=False)
    assert float(orpo) == pytest.approx(
        0.5 - 0.1 * float((odds[0] / odds[1]).log().sigmoid().log()), rel=1e-5
    )


def test_rows_are_scored_alone_whatever_they_are_padded_with(device):
    import tiny

    model = tiny.llama().eval().to(device)
    pairs = [Pair([5, 6, 7], [8, 9], [10, 11, 12, 13]), Pair([20], [21, 22, 23], [24])]
    together = pair_reference.scores_of(model, pairs, prompt_is_trained=True)
    for number, pair in enumerate(pairs):
        alone = pair_reference.scores_of(model, [pair], prompt_is_trained=True)
        for name in ("chosen", "rejected", "chosen_tokens", "trained"):
            assert getattr(together, name)[number].item() == pytest.approx(
                getattr(alone, name)[0].item(), rel=1e-5
            )
        log_p = model(torch.tensor([pair.rows[0]], device=device)).logits[0].log_softmax(-1)
        of_answer = sum(
            log_p[len(pair.prompt) - 1 + at, token] for at, token in enumerate(pair.chosen)
        )
        assert alone.chosen.item() == pytest.approx(of_answer.item(), rel=1e-5)
