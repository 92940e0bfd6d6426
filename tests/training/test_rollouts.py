"""Runs whose answers the model draws."""

import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rollouts
import runs
import tiny
from chronicals.benchmark.plan import plan_work
from chronicals.cli.app import app
from chronicals.config import ConfigurationError
from chronicals.rewards import RewardsFailed
from chronicals.training import ChronicalsTrainer, TrainingError
from chronicals.training.rollouts.answer_packs import AnswerPacks
from chronicals.training.rollouts.rollout import Rollout
from chronicals.training.rollouts.samples import read_samples
from chronicals.training.run import loop
from chronicals.training.run.callbacks import read_metrics
from comparison import equal

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}


def metrics(folder):
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_the_reward_of_a_trivial_task_rises(objective, tmp_path):
    rewards = rollouts.Rewards()
    rollouts.train(
        tmp_path,
        rewards=rewards,
        objective=objective,
        section={"answers": 8},
        max_steps=16,
        learning_rate=1e-2,
    )
    lines = metrics(tmp_path)
    assert len(rewards.calls) == len(lines) == 16
    first, last = (sum(line["reward"] for line in part) for part in (lines[:4], lines[-4:]))
    assert last > 2 * first
    assert all(line["gap/largest"] < 1e-5 for line in lines)


@pytest.mark.slow
def test_how_a_step_is_divided_changes_nothing(tmp_path):
    seen = {}
    for size in (1, 2, 4):
        folder = tmp_path / str(size)
        rollouts.train(
            folder,
            section={"answers": 6, "prompts": 4},
            batch_size=size,
            max_seq_length=64,
            max_steps=4,
        )
        seen[size] = runs.trajectory(folder)
    for size in (2, 4):
        # A loss of answers that are as likely as when they were drawn is a sum that is about 0.
        np.testing.assert_allclose(seen[size], seen[1], rtol=2e-5, atol=1e-6)
    assert len({line["fill"] for line in metrics(tmp_path / "1")}) > 1


SEVERAL = {
    "section": {"updates": 2, "iterations": 2, "importance": "token_truncate"},
    "save_steps": 1,
    "max_steps": 7,
    "use_lora": True,
    "lora_rank": 4,
}
"""A run with four steps a rollout, and a checkpoint after each."""


class Dying(rollouts.Rewards):
    """Rewards in whose second rollout the process is killed."""

    def score(self, rows):
        if len(self.calls) == 1:
            raise KeyboardInterrupt
        return super().score(rows)


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["within a rollout", "while answers are rewarded"])
def test_a_resumed_run_is_that_which_never_stopped(ended, tmp_path):
    whole = rollouts.Rewards()
    rollouts.train(tmp_path / "whole", rewards=whole, **SEVERAL)
    folder = tmp_path / "cut"
    if ended == "within a rollout":
        cut = rollouts.Rewards()
        trainer = ChronicalsTrainer(
            tiny.llama(), tiny.tokenizer(), rollouts.config(folder, **SEVERAL), rewards=cut
        )
        trainer.callbacks.append(rollouts.StopAfter(trainer, 2))
        with pytest.raises(Exception, match="stopped as asked after step 2"):
            trainer.train(rollouts.prompts())
        assert len(cut.calls) == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            rollouts.train(folder, rewards=Dying(), **SEVERAL)
    later = rollouts.Rewards()
    rollouts.train(folder, rewards=later, resume=True, **SEVERAL)
    # The first rollout is in the checkpoint, and is not drawn again.
    assert [rows.completion_ids for rows in later.calls] == [whole.calls[1].completion_ids]
    assert runs.trajectory(folder) == runs.trajectory(tmp_path / "whole")
    left, right = runs.weights(folder), runs.weights(tmp_path / "whole")
    assert all(equal(left[name], right[name]) for name in right)
    assert [line["rollout"] for line in read_samples(folder / "run")] == [0, 0, 1, 1]


@pytest.mark.slow
def test_each_prompt_comes_once_an_epoch_and_seeds_differ(tmp_path):
    seen = {}
    for seed in (1, 2):
        rewards = rollouts.Rewards()
        rollouts.train(tmp_path / str(seed), rewards=rewards, max_steps=4, seed=seed)
        asked = [prompt for rows in rewards.calls for prompt in rows.prompts[::4]]
        assert sorted(asked) == sorted(row["prompt"] for row in rollouts.prompts())
        seen[seed] = asked, [tokens for rows in rewards.calls for tokens in rows.completion_ids]
        for rows in rewards.calls:
            for first in range(0, len(rows.prompts), 4):
                group = rows.completion_ids[first : first + 4]
                assert len(set(map(tuple, group))) == 4
    assert seen[1][0] != seen[2][0] and not set(map(tuple, seen[1][1])) & set(
        map(tuple, seen[2][1])
    )


@pytest.mark.slow
def test_columns_and_messages_reach_the_rewards(tmp_path):
    rewards = rollouts.Rewards(columns_wanted={"wanted"})
    rows = [
        {"prompt": [{"role": "user", "content": f"what is {n}?"}], "wanted": n} for n in range(6)
    ]
    rollouts.train(tmp_path, rows, rewards=rewards, max_steps=1)
    (scored,) = rewards.calls
    assert scored.columns.keys() == {"wanted"}
    for prompt, completion, wanted in zip(
        scored.prompts, scored.completions, scored.columns["wanted"], strict=True
    ):
        assert prompt == [{"role": "user", "content": f"what is {wanted}?"}]
        (message,) = completion
        assert message["role"] == "assistant"
    assert scored.groups == [n // 4 for n in range(12)]
    rewards = rollouts.Rewards(columns_wanted={"answer"})
    with pytest.raises(ConfigurationError, match="row 1: .*answer"):
        rollouts.train(tmp_path / "without", rows, rewards=rewards, max_steps=1)


@pytest.mark.slow
def test_a_gap_between_draw_and_pass_stops_the_run_and_names_the_token(tmp_path):
    words = (
        "step 1: .* differ by more than grpo.max_gap=1e-09 .* most at token '.*' \\(.* of answer"
    )
    with pytest.raises(TrainingError, match=words):
        rollouts.train(tmp_path, section={"max_gap": 1e-9}, max_steps=2)


class Failing(rollouts.Rewards):
    """Rewards that fail in the third rollout."""

    def score(self, rows):
        if len(self.calls) == 2:
            raise RewardsFailed("reward letters: failed for 12 of 12 answers")
        return super().score(rows)


@pytest.mark.slow
def test_rewards_that_fail_end_the_run_with_a_checkpoint(tmp_path):
    rewards = Failing()
    with pytest.raises(TrainingError, match="after step 2: reward letters: failed .* resume"):
        rollouts.train(tmp_path, rewards=rewards, max_steps=4, save_steps=None)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    later = rollouts.Rewards()
    rollouts.train(tmp_path, rewards=later, max_steps=4, save_steps=None, resume=True)
    assert len(later.calls) == 2
    whole = tmp_path / "whole"
    rollouts.train(whole, max_steps=4, save_steps=None)
    assert runs.trajectory(tmp_path) == runs.trajectory(whole)


def first_only(completions, **columns):
    """Rewards that are equal in every group but the first."""
    return [float(n) if n < 4 else 1.0 for n in range(len(completions))]


@pytest.mark.slow
def test_groups_without_variance_are_drawn_again_and_counted(tmp_path):
    rewards = rollouts.Rewards((first_only,))
    rollouts.train(tmp_path, rewards=rewards, section={"redraws": 2}, max_steps=1)
    first, second, third = rewards.calls
    assert [len(rows.prompts) for rows in rewards.calls] == [12, 8, 4]
    assert second.prompts == first.prompts[4:] and third.prompts == second.prompts[4:]
    assert second.completion_ids[0] != first.completion_ids[4]
    (line,) = metrics(tmp_path)
    assert line["groups/drawn_again"] == 3
    assert line["groups/without_variance"] == 0


@pytest.mark.slow
def test_a_step_without_variance_says_so(tmp_path, caplog):
    def same(completions, **columns):
        return [1.0] * len(completions)

    rollouts.train(tmp_path, rewards=rollouts.Rewards((same,)), max_steps=2, report_samples=0)
    assert "rewards of each prompt's answers are all equal" in caplog.text


@pytest.mark.slow
def test_a_step_whose_ratios_are_all_clipped_counts_and_says_so(tmp_path, caplog):
    """An answer's ratio is the product of its tokens', which one update takes far from 1."""
    section = {"iterations": 2, "clip_low": 1e-6, "importance": "token_truncate"}
    given = {"objective": "rloo", "section": section, "report_samples": 0}
    rollouts.train(tmp_path, max_steps=4, learning_rate=1e-2, **given)
    lines = metrics(tmp_path)
    assert [line["grad_norm"] > 0 for line in lines] == [True, False, True, False]
    assert re.search(r"step 2 has no gradient: .*% of the ratios are beyond the clip", caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["token_truncate", "sequence_mask"])
def test_the_share_of_cut_weights_is_shown(how, tmp_path):
    recorded = rollouts.Recorded.of(seed=1)
    section = {"importance": how, "importance_cap": 1.2}
    found, _ = rollouts.one_update(recorded, tmp_path, section=section, batch_size=2)
    logs = [old - drawn for old, drawn in zip(recorded.old, recorded.drawn)]
    if how == "sequence_mask":
        logs = [log.sum().expand_as(log) for log in logs]
    cut = torch.cat(logs).exp() > 1.2
    assert 0.1 < cut.float().mean() < 0.9
    assert found["importance/cut"] == pytest.approx(float(cut.float().mean()), rel=1e-5)


@pytest.mark.slow
def test_answers_to_held_out_prompts_are_rewarded(tmp_path):
    rollouts.train(tmp_path, validation_split=0.25, eval_steps=2, max_steps=4, learning_rate=1e-2)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    evaluations = [line for line in lines if "eval_loss" in line]
    assert len(evaluations) == 2
    assert all(line["eval_reward"] == -line["eval_loss"] for line in evaluations)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_a_divergence_from_the_base_is_measured(objective, tmp_path):
    rollouts.train(tmp_path, objective=objective, section={"beta": 0.5}, learning_rate=2e-2, **LORA)
    first, *_, last = metrics(tmp_path)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and last["kl"] > 1e-5
    with pytest.raises(ConfigurationError, match=f"{objective}.beta=0.5: there is no reference"):
        rollouts.train(tmp_path / "full", objective=objective, section={"beta": 0.5})


@pytest.mark.slow
def test_rewards_normalised_one_by_one_have_equal_weight(tmp_path):
    def large(completions, **columns):
        return [1000.0 * text.count("e") for text in completions]

    seen = []
    for name in ("sum_then_normalize", "normalize_then_sum"):
        rewards = rollouts.Rewards((rollouts.letters, large))
        folder = tmp_path / name
        section = {"answers": 16}
        rollouts.train(folder, rewards=rewards, section=section, reward_aggregation=name)
        seen.append(runs.trajectory(folder)[0][2])
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: .*grpo.prompts"),
        ({"context_parallel": 2}, "context_parallel=2"),
        ({"use_lora": True, "lora_dropout": 0.1}, "lora_dropout=0.1: .* without dropout"),
        ({"section": {"prompts": 13}}, "grpo.prompts=13 .* there are 12 prompts"),
        ({"section": {"max_new_tokens": 128}}, "grpo.max_new_tokens=128: leaves no room"),
    ],
    ids=str,
)
def test_what_does_not_go_with_draws_is_refused_by_name(changes, words, tmp_path):
    with pytest.raises(ConfigurationError, match=words):
        rollouts.train(tmp_path, **changes)


def test_a_rollout_in_a_checkpoint_is_the_same_bit_for_bit():
    draw = np.random.default_rng(0)
    lengths = np.array([2, 3, 1, 4])
    rollout = Rollout(
        7,
        np.array([5, 2]),
        lengths,
        draw.integers(0, 99, 10).astype(np.int32),
        draw.standard_normal(10).astype(np.float32),
        np.array([True, False, True, True]),
        np.array([0.1, np.nan, 2.0, -1.0]),
        draw.standard_normal(4).astype(np.float32),
        shown={"reward": 0.3},
    )
    again = Rollout.from_json(rollout.to_json())
    for name, value in vars(rollout).items():
        found = getattr(again, name)
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype and found.tobytes() == value.tobytes()
        else:
            assert found == value
    assert rollout.places(1) == slice(2, 5) and rollout.answers == 2
    np.testing.assert_allclose(
        rollout.sums(rollout.drawn),
        [rollout.drawn[rollout.places(n)].sum() for n in range(4)],
        rtol=1e-6,
    )


def by_text(completions, **columns):
    """Rewards that tell answers apart."""
    return [float(sum(map(ord, text)) % 97) for text in completions]


def batches_of(monkeypatch):
    """The Batches of the steps that runs take from now on."""
    seen = []
    own = AnswerPacks.batches

    def batches(self, groups, age):
        made = own(self, groups, age)
        seen.append(made[0])
        return made

    monkeypatch.setattr(AnswerPacks, "batches", batches)
    return seen


def trained_documents(batches):
    """Of each document with a trained token: these tokens, its advantage and its reward."""
    found = []
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        for place, (start, end) in enumerate(zip(bounds, bounds[1:])):
            targets = batch.targets[start:end]
            trained = targets[targets >= 0].tolist()
            if trained:
                values = (batch.segments[name][place].item() for name in ("advantage", "reward"))
                found.append((trained, *values))
    return found


@pytest.mark.slow
def test_advantages_are_those_of_the_answers_of_the_step(tmp_path, monkeypatch):
    """The tokens that are trained are the answers', no more and no less."""
    seen = batches_of(monkeypatch)
    rewards = rollouts.Rewards((by_text,))
    rollouts.train(tmp_path, rewards=rewards, section={"scale": "none"}, max_steps=1)
    (scored,) = rewards.calls
    values = np.array(by_text(scored.completions)).reshape(3, 4)
    advantages = (values - values.mean(1, keepdims=True)).flatten()
    expected = sorted(zip(scored.completion_ids, advantages, values.flatten(), strict=True))
    for found, wanted in zip(sorted(trained_documents(seen[-1])), expected, strict=True):
        assert found[0] == wanted[0]
        assert found[1:] == pytest.approx(wanted[1:], rel=1e-5)


@pytest.mark.slow
def test_answers_without_an_end_are_masked(tmp_path, monkeypatch):
    seen = batches_of(monkeypatch)
    rewards = rollouts.Rewards((by_text,))
    section = {"truncated": "mask", "answers": 8, "max_new_tokens": 80}
    rollouts.train(tmp_path, rewards=rewards, section=section, max_steps=1)
    (scored,) = rewards.calls
    stop = tiny.tokenizer().eos_token_id
    whole = [tokens for tokens in scored.completion_ids if tokens[-1] == stop]
    assert 0 < len(whole) < len(scored.completion_ids)
    assert sorted(tokens for tokens, *_ in trained_documents(seen[-1])) == sorted(whole)


class LeavingOut(rollouts.Rewards):
    """Rewards of which the first answer's fails."""

    def score(self, rows):
        outcome = super().score(rows)
        outcome.dropped[0] = True
        return outcome


@pytest.mark.slow
def test_an_answer_that_is_left_out_is_not_trained(tmp_path, monkeypatch):
    seen = batches_of(monkeypatch)
    rewards = LeavingOut((by_text,))
    rollouts.train(tmp_path, rewards=rewards, section={"scale": "none"}, max_steps=1)
    (scored,) = rewards.calls
    found = trained_documents(seen[-1])
    assert sorted(tokens for tokens, *_ in found) == sorted(scored.completion_ids[1:])
    values = np.array(by_text(scored.completions))
    others = {tuple(tokens): advantage for tokens, advantage, _ in found}
    for place in (1, 2, 3):
        expected = values[place] - values[1:4].mean()
        assert others[tuple(scored.completion_ids[place])] == pytest.approx(expected, rel=1e-5)
    assert metrics(tmp_path)[0]["answers/left_out"] == pytest.approx(1 / 12)


@pytest.mark.slow
def test_a_models_own_sampling_settings_do_not_apply(tmp_path):
    model = tiny.llama()
    model.generation_config.update(do_sample=True, top_k=2, temperature=0.1)
    rewards = rollouts.Rewards()
    rollouts.train(tmp_path, rewards=rewards, model=model, max_steps=1)
    plain = rollouts.Rewards()
    rollouts.train(tmp_path / "plain", rewards=plain, max_steps=1)
    assert rewards.calls[0].completion_ids == plain.calls[0].completion_ids
    assert len({tokens[0] for tokens in plain.calls[0].completion_ids}) > 6


@pytest.mark.slow
def test_rloo_takes_the_divergence_from_the_reward(tmp_path, monkeypatch):
    seen = batches_of(monkeypatch)
    given = {"objective": "rloo", "section": {"beta": 5.0}, "learning_rate": 2e-2, **LORA}
    rewards = rollouts.Rewards((by_text,))
    rollouts.train(tmp_path, rewards=rewards, max_steps=3, **given)
    values = dict(
        zip(map(tuple, rewards.calls[-1].completion_ids), by_text(rewards.calls[-1].completions))
    )
    taken = [values[tuple(t)] - reward for t, _, reward in trained_documents(seen[-1])]
    assert np.mean(taken) == pytest.approx(5 * metrics(tmp_path)[-1]["kl"] * 8, rel=0.2)
    assert np.abs(taken).max() > 1e-3


@pytest.mark.slow
def test_long_answers_are_rewarded_less(tmp_path):
    section = {"truncated": "shape", "overlong_margin": 4}
    rewards = rollouts.Rewards()
    rollouts.train(tmp_path, rewards=rewards, section=section, max_steps=1)
    (scored,) = rewards.calls
    lengths = np.array([len(tokens) for tokens in scored.completion_ids])
    penalty = np.clip((8 - 4 - lengths) / 4, -1, 0)
    (line,) = metrics(tmp_path)
    assert penalty.min() == -1
    assert line["reward"] == pytest.approx(line["rewards/letters"] + penalty.mean())


def test_a_model_that_drops_out_is_refused(tmp_path):
    model = tiny.llama()
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))
    with pytest.raises(ConfigurationError, match="layers.0.mlp.act_fn.1 of the model drops out"):
        rollouts.train(tmp_path, model=model)


@pytest.mark.slow
def test_a_trained_model_is_evaluated_by_the_rewards_of_its_run(tmp_path, capsys):
    rows = [{"prompt": f"what is {n} + 1?"} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), rollouts.config(tmp_path, rewards=["regex(.)"], max_steps=1)
    )
    trainer.train(rows)
    data = str(tmp_path / "prompts.jsonl")
    flags = ["--data", data, "--cache-dir", str(tmp_path / "tokens")]
    ran = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), *flags])
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.stdout)
    assert figures["reward"] == -figures["loss"] and 0 < figures["reward"] <= 1


def test_rows_without_a_column_of_a_reward_are_told_before_the_model_is_loaded(tmp_path):
    """There is only the configuration of a model, so its weights could not be loaded."""
    folder = tmp_path / "model"
    tiny.llama().config.save_pretrained(folder)
    taught = {"objective": "grpo", "max_seq_length": 64}
    (folder / "chronicals.json").write_text(json.dumps({"taught": taught}))
    rows = [{"prompt": "what is 1 + 1?", "answer": "2"}, {"prompt": "what is 2 + 1?"}]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data", str(data), "--rewards", "exact", "--cache-dir", str(tmp_path / "tokens")]
    ran = CliRunner().invoke(app, ["evaluate", str(folder), *flags])
    assert isinstance(ran.exception, ConfigurationError), ran.output
    assert "row 2: rewards: exact asks for the column 'answer'" in str(ran.exception)
    data.write_text(json.dumps(rows[0]) + "\n")
    ran = CliRunner().invoke(app, ["evaluate", str(folder), *flags])
    assert "row 2" not in str(ran.exception) and ran.exception is not None  # it has no weights


@pytest.mark.slow
def test_held_out_answers_are_the_likeliest(tmp_path):
    """So they do not depend on the seed, by which the others are drawn."""
    held_out = [{"prompt": f"what is {n}, if not the answer to life?"} for n in range(5)]
    given = {"learning_rate": 1e-9, "eval_steps": 1, "max_steps": 1}
    seen = []
    for seed in (1, 2):
        rewards = rollouts.Rewards()
        folder = tmp_path / str(seed)
        rollouts.train(folder, rewards=rewards, held_out=held_out, seed=seed, **given)
        (answered,) = (rows for rows in rewards.calls if len(rows.prompts) == 5)
        assert answered.prompts == [row["prompt"] for row in held_out]
        seen.append(answered.completion_ids)
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_the_largest_possible_step_is_rehearsed_and_changes_nothing(tmp_path, monkeypatch):
    usual = tmp_path / "usual"
    rollouts.train(usual, section={"prompts": 4}, max_seq_length=64, batch_size=1)
    seen = batches_of(monkeypatch)
    monkeypatch.setattr(loop, "is_limited", lambda device: True)
    rollouts.train(tmp_path, section={"prompts": 4}, max_seq_length=64, batch_size=1)
    # One is measured for the plan, the next one is rehearsed.
    _, largest, *steps = seen
    longest = max(int(batch.cu_seqlens.diff().max()) for batch in largest)
    assert len(largest) >= max(map(len, steps)) and len(steps) == 3
    assert sum(int((batch.targets >= 0).sum()) for batch in largest) == 4 * 4 * 8
    assert longest <= 64
    assert runs.trajectory(tmp_path) == runs.trajectory(usual)


@pytest.mark.slow
def test_the_report_shows_answers_and_their_rewards(tmp_path):
    rollouts.train(tmp_path, rewards=rollouts.Rewards((by_text,)), max_steps=2)
    first, second, third, fourth = read_samples(tmp_path / "run")
    assert [line["rollout"] for line in (first, second, third, fourth)] == [0, 0, 1, 1]
    page = (tmp_path / "run" / "report.html").read_text()
    for line in (first, fourth):
        assert line["prompt"] in page and len(line["answers"]) == 4
        for answer in line["answers"]:
            assert (
                answer["reward"] == answer["rewards"]["by_text"] and str(answer["reward"]) in page
            )


@pytest.mark.slow
def test_prompts_are_shown_as_the_model_gets_them_and_not_benchmarked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.llama().save_pretrained("tiny")
    tiny.tokenizer().save_pretrained("tiny")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "why?"}]}\n')
    flags = ["--model", "tiny", "--objective", "grpo"]
    shown = CliRunner().invoke(app, ["data", "show", "prompts.jsonl", *flags])
    assert "row 1: " in shown.output and "0 of them trained" in shown.output
    with pytest.raises(ConfigurationError, match="objective='grpo': its steps are drawn"):
        fields = {"objective": "grpo"}
        plan_work(tmp_path, "tiny", "prompts.jsonl", "full", fields, steps=2, warm_up=0)
