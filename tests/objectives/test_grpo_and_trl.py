"""Losses, gradients and metrics of GRPO and RLOO beside TRL's trainers, on recorded answers."""

import pytest
import torch

import rollouts
import tiny
from chronicals.objectives.advantages import (
    group_advantages,
    leave_one_out_advantages,
    without_variance,
)
from chronicals.training.rollouts.answer_packs import AnswerPacks
from chronicals.training.run.callbacks import read_metrics
from preferences import assert_close, gradients_of

NEW_TOKENS = 16
DEFAULTS = {"answers": 4, "prompts": 3, "max_new_tokens": NEW_TOKENS}


def padded(rows, value, left=False):
    """Rows of one width, and which of their places are filled."""
    wide = max(map(len, rows))
    filled = torch.full((len(rows), wide), value, dtype=rows[0].dtype)
    mask = torch.zeros(len(rows), wide, dtype=torch.long)
    for number, row in enumerate(rows):
        places = slice(wide - len(row), wide) if left else slice(0, len(row))
        filled[number, places] = row
        mask[number, places] = 1
    return filled, mask


def inputs_of(recorded, advantages, masks_truncated=False):
    """What TRL's trainers compute their loss of."""
    count = recorded.rewards.shape[1]
    prompts = [prompt for prompt in recorded.prompts for _ in range(count)]
    prompt_ids, prompt_mask = padded(prompts, 0, left=True)
    completion_ids, completion_mask = padded(recorded.answers, 0)
    if masks_truncated:
        completion_mask = completion_mask * torch.tensor(recorded.complete)[:, None].int()
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages.flatten().float(),
        "old_per_token_logps": padded(recorded.old, 0.0)[0],
        "num_items_in_batch": completion_mask.sum(),
    }


def trainer_of(name, folder, model, **settings):
    """A trainer of TRL on the CPU; it never generates."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    args = getattr(trl, f"{name}Config")(
        output_dir=str(folder / "trl"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=12,
        num_generations=4,
        max_completion_length=NEW_TOKENS,
        **settings,
    )
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        lambda completions, **columns: [0.0] * len(completions),
        args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "what?"}] * 12),
        processing_class=tiny.tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def rolled_out(trainer, recorded):
    """What a trainer of TRL makes of recorded answers: advantages, masks and log-probabilities."""
    count = recorded.rewards.shape[1]
    prompts = [ids.tolist() for ids in recorded.prompts for _ in range(count)]
    answers = [ids.tolist() for ids in recorded.answers]
    texts = [""] * len(answers)
    generated = prompts, answers, texts
    if type(trainer).__name__ == "GRPOTrainer":
        generated = prompts, answers, None, texts, None, {}, None, []
    trainer._generate = lambda _: generated
    trainer.reward_funcs = [lambda **_: recorded.rewards.flatten().tolist()]
    return trainer._generate_and_score_completions([{"prompt": "what?"}] * len(answers))


def shown_by(trainer):
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


LOSSES = [
    ({"loss": "dapo"}, {"loss_type": "dapo"}),
    ({"loss": "grpo"}, {"loss_type": "grpo"}),
    ({"loss": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    ({"loss": "cispo", "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    ({"loss": "sapo"}, {"loss_type": "sapo"}),
    (
        {"loss": "dapo", "clip_low": 0.1, "clip_high": 0.28, "clip_bound": 1.5},
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.5},
    ),
    ({"loss": "grpo", "temperature": 0.7}, {"loss_type": "grpo", "temperature": 0.7}),
    (
        {"loss": "grpo", "truncated": "mask"},
        {"loss_type": "grpo", "mask_truncated_completions": True},
    ),
    ({"loss": "dapo", "beta": 0.3}, {"loss_type": "dapo", "beta": 0.3}),
    (
        {"loss": "grpo", "beta": 0.3, "kl_ratio": False},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    (
        {"loss": "dapo", "importance": "token_truncate", "importance_cap": 1.2},
        {"loss_type": "dapo"},
    ),
    ({"loss": "dapo", "entropy": 0.2}, {"loss_type": "dapo", "entropy_coef": 0.2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("section", "settings"), LOSSES, ids=lambda x: str(x.get("loss", "")))
def test_grpo_is_trls(section, settings, level, tmp_path):
    scale = {"token": "group", "sequence": "batch"}[level]
    if section["loss"] == "dr_grpo":
        scale = "none"
    recorded = rollouts.Recorded.of(seed=len(str(section)))
    section = {**DEFAULTS, **section, "level": level, "scale": scale}
    settings = dict(settings)
    beta = settings.pop("beta", 0.0)
    reference = tiny.llama(seed=7)
    if beta:
        reference.save_pretrained(tmp_path / "reference")
        tiny.tokenizer().save_pretrained(tmp_path / "reference")
        section["reference_model"] = str(tmp_path / "reference")
    found, gradients = rollouts.one_update(recorded, tmp_path, section=section, batch_size=2)

    model = tiny.llama()
    trainer = trainer_of("GRPO", tmp_path, model, importance_sampling_level=level, **settings)
    trainer.beta = beta
    inputs = inputs_of(
        recorded,
        group_advantages(recorded.rewards, scale),
        section.get("truncated") == "mask",
    )
    if beta:
        inputs["ref_per_token_logps"] = reference_logps(tmp_path, reference, inputs)
    if "importance" in section:
        # What TRL corrects where vLLM has drawn the answers.
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        differences = inputs["old_per_token_logps"] - padded(recorded.drawn, 0.0)[0]
        weights = (differences * inputs["completion_mask"]).exp()
        inputs["importance_sampling_ratio"] = weights.clamp(max=section["importance_cap"])
    loss = trainer._compute_loss(trainer.model, inputs)
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    assert_close(gradients, gradients_of(model, loss))
    shown = shown_by(trainer)
    assert found["entropy"] == pytest.approx(shown["entropy"], rel=1e-4)
    names = {"clip/low": "clip_ratio/low_mean", "clip/high": "clip_ratio/high_mean"}
    if section["loss"] == "cispo":
        names = {"clip/high": "cispo_clip_ratio"}
    if section["loss"] == "sapo":
        names = {}
    for ours, theirs in names.items():
        assert found[ours] == pytest.approx(shown[theirs], abs=1e-6), ours
    if beta:
        assert found["kl"] == pytest.approx(shown["kl"], rel=1e-4)


GRID = ("dapo", "grpo", "dr_grpo", "cispo", "sapo")
CLIPPED = {"clip/low": "clip_ratio/low_mean", "clip/high": "clip_ratio/high_mean"}
METRICS = {
    "dapo": CLIPPED,
    "grpo": CLIPPED,
    "dr_grpo": CLIPPED,
    "cispo": {"clip/high": "cispo_clip_ratio"},
    "sapo": {},
}
"""Which of the ratios are held back, by the loss and the name of ours."""


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", GRID)
def test_each_loss_level_and_scale_is_trls(loss, level, scale, tmp_path):
    """TRL's trainer computes the advantages, too, of recorded rewards."""
    recorded = rollouts.Recorded.of(seed=GRID.index(loss))
    recorded.rewards[1] = 0.5  # a group without variance
    section = {**DEFAULTS, "loss": loss, "level": level, "scale": scale, "clip_high": 0.3}
    found, gradients = rollouts.one_update(recorded, tmp_path, section=section, batch_size=2)
    model = tiny.llama()
    trainer = trainer_of(
        "GRPO",
        tmp_path,
        model,
        loss_type=loss,
        importance_sampling_level=level,
        scale_rewards=scale,
        epsilon_high=1.3 if loss == "cispo" else 0.3,
    )
    inputs = rolled_out(trainer, recorded)
    torch.testing.assert_close(
        group_advantages(recorded.rewards, scale).flatten().float(), inputs["advantages"]
    )
    inputs["old_per_token_logps"] = padded(recorded.old, 0.0)[0]
    result = trainer._compute_loss(trainer.model, inputs)
    assert found["loss"] == pytest.approx(float(result.detach()), rel=1e-4, abs=1e-6)
    assert_close(gradients, gradients_of(model, result))
    shown = shown_by(trainer)
    assert found["entropy"] == pytest.approx(shown["entropy"], rel=1e-4)
    for ours, theirs in METRICS[loss].items():
        assert found[ours] == pytest.approx(shown[theirs], abs=1e-6), ours
    if scale != "batch":  # of which TRL looks at the deviation of all answers
        assert float(without_variance(recorded.rewards).float().mean()) == pytest.approx(
            shown["frac_reward_zero_std"]
        )


def by_text(completions, **columns):
    """Rewards that tell answers apart."""
    return [float(sum(map(ord, text)) % 97) / 97 for text in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scale"), [("GRPO", "group"), ("RLOO", "none"), ("RLOO", "batch")]
)
def test_a_step_with_a_reference_is_trls(name, scale, tmp_path, monkeypatch):
    """From draws to gradients, with a divergence from another model."""
    reference = tiny.llama(seed=7)
    reference.save_pretrained(tmp_path / "reference")
    tiny.tokenizer().save_pretrained(tmp_path / "reference")
    seen = []
    batches = AnswerPacks.batches

    def seeing(packs, groups, age):
        seen.append(groups)
        return batches(packs, groups, age)

    monkeypatch.setattr(AnswerPacks, "batches", seeing)
    rewards = rollouts.Rewards((by_text,))
    rollouts.train(
        tmp_path,
        rewards=rewards,
        objective=name.lower(),
        section={
            "scale": scale,
            "beta": 0.3,
            "reference_model": str(tmp_path / "reference"),
            **DEFAULTS,
        },
        max_steps=1,
    )
    (line,) = (line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line)
    groups = seen[-1]
    (scored,) = rewards.calls
    recorded = rollouts.Recorded(
        [torch.tensor(group.prompt) for group in groups],
        [torch.tensor(answer.tokens) for group in groups for answer in group.answers],
        *[None] * 3,
        torch.tensor(by_text(scored.completions)).reshape(len(groups), -1),
    )
    model = tiny.llama()
    settings = {"scale_rewards": scale} if name == "GRPO" else {}
    if name == "RLOO":
        settings["normalize_advantages"] = scale == "batch"
    trainer = trainer_of(name, tmp_path, model, beta=0.0, **settings)
    trainer.beta = 0.3
    trainer.ref_model = trainer_of(name, tmp_path, reference, beta=0.0).model.eval()
    inputs = rolled_out(trainer, recorded)
    advantages = [answer.advantage for group in groups for answer in group.answers]
    assert advantages == pytest.approx(inputs["advantages"].tolist(), rel=1e-3, abs=1e-4)
    result = trainer._compute_loss(trainer.model, inputs)
    shown = shown_by(trainer)
    assert line["loss"] == pytest.approx(float(result.detach()), rel=1e-4, abs=2e-6)
    norms = torch.stack([one.norm() for one in gradients_of(model, result).values()])
    assert line["grad_norm"] == pytest.approx(float(norms.norm()), rel=1e-4)
    assert line["kl"] == pytest.approx(shown["kl"], rel=1e-4)
    assert line["rewards/by_text"] == pytest.approx(shown["reward"], rel=1e-5)


@torch.no_grad()
def reference_logps(folder, reference, inputs):
    """Log-probabilities of another model as a trainer computes those of its own."""
    trainer = trainer_of("GRPO", folder, reference)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    wide = inputs["completion_ids"].shape[1]
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, wide)[0]


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["none", "batch"])
def test_rloo_is_trls(scale, tmp_path):
    recorded = rollouts.Recorded.of(seed=3)
    recorded.old = [old + 0.02 for old in recorded.old]
    recorded.drawn = recorded.old
    section = {**DEFAULTS, "scale": scale, "clip_high": 0.3}
    found, gradients = rollouts.one_update(
        recorded, tmp_path, objective="rloo", section=section, batch_size=2
    )
    model = tiny.llama()
    trainer = trainer_of("RLOO", tmp_path, model, beta=0.0, epsilon_high=0.3)
    advantages = leave_one_out_advantages(recorded.rewards, scale)
    inputs = inputs_of(recorded, advantages)
    inputs["old_logps"] = torch.stack([old.sum() for old in recorded.old])
    loss = trainer._compute_loss(trainer.model, inputs)
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_close(gradients, gradients_of(model, loss))
    shown = shown_by(trainer)
    for ours, theirs in {
        "entropy": "entropy",
        "clip/low": "clip_ratio/low_mean",
        "clip/high": "clip_ratio/high_mean",
    }.items():
        assert found[ours] == pytest.approx(shown[theirs], rel=1e-4, abs=1e-6), ours
