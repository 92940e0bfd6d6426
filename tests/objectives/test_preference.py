"""Preference objectives: the mathematics of TRL, on packs, however a step is divided."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.lora.layers import linear_adapters
from chronicals.objectives import OBJECTIVES, build_objective
from chronicals.objectives.dpo import dpo_losses
from chronicals.objectives.orpo import log_one_minus_exp
from chronicals.objectives.pairs import Pairs, reward_metrics
from chronicals.training import CheckpointError
from chronicals.training.run.callbacks import read_metrics
from preferences import (
    DIVISIONS,
    IN_TREE,
    OF_ANSWERS,
    WITH_REFERENCE,
    assert_close,
    gradients_of,
    judged_rows,
    one_step,
    rows,
    rows_of,
    store_of,
)

COUNT = 9
REWARDS = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}
SHOWN = {*REWARDS, "logps/chosen", "logps/rejected"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of another model, and the model."""
    folder = tmp_path_factory.mktemp("reference")
    model = tiny.llama(seed=7)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder, model


def padded(store, sides, pad):
    """Documents of these sides as right-padded rows: ids, mask, and which tokens are the
    answer's.
    """
    documents = [
        store.whole_document(n) for n in range(len(store)) if store.columns["side"][n] in sides
    ]
    longest = max(len(ids) for ids, _ in documents)
    ids = torch.full((len(documents), longest), pad)
    mask = torch.zeros_like(ids)
    answer = torch.zeros_like(ids)
    for row, (tokens, trained) in enumerate(documents):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        answer[row, : len(tokens)] = torch.tensor(trained)
    return ids, mask, answer


def both_sides(store, pad):
    """As TRL's collator has them: all chosen answers, then all rejected ones, in rows of one
    width.
    """
    chosen, rejected = (padded(store, {side}, pad) for side in (0, 1))
    wide = max(chosen[0].shape[1], rejected[0].shape[1])

    def filled(x, value):
        return torch.nn.functional.pad(x, (0, wide - x.shape[1]), value=value)

    return [
        torch.cat([filled(a, v), filled(b, v)]) for a, b, v in zip(chosen, rejected, (pad, 0, 0))
    ]


def trl_dpo(folder, model, reference, store, **settings):
    """Loss, gradients and metrics of TRL's trainer over the very tokens of the store."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    args = trl.DPOConfig(
        output_dir=str(folder / "trl"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )
    given = datasets.Dataset.from_list(rows(2))
    trainer = trl.DPOTrainer(
        model, reference, args, train_dataset=given, processing_class=tiny.tokenizer()
    )
    ids, mask, answer = both_sides(store, tiny.tokenizer().pad_token_id)
    trainer.model.train()
    loss = trainer.compute_loss(
        trainer.model, {"input_ids": ids, "attention_mask": mask, "completion_mask": answer}
    )
    shown = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss, gradients_of(model, loss), shown


DPO_LOSSES = [
    ("dpo", {"beta": 0.3}, {"loss_type": "sigmoid"}),
    ("dpo", {"beta": 0.3, "label_smoothing": 0.2}, {"loss_type": "robust", "label_smoothing": 0.2}),
    ("dpo", {"beta": 0.02, "loss": "hinge"}, {"loss_type": "hinge"}),
    ("dpo", {"beta": 3.0, "loss": "sigmoid_norm"}, {"loss_type": "sigmoid_norm"}),
    ("ipo", {"tau": 0.3}, {"loss_type": "ipo"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "section", "settings"), DPO_LOSSES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_loss_gradients_and_metrics_are_those_of_trl(
    objective, section, settings, tmp_path, reference
):
    folder, other = reference
    if settings["loss_type"] == "robust":
        section = {**section, "loss": "robust"}
    given = rows(COUNT)
    terms, gradients = one_step(
        tmp_path, given, objective, {**section, "reference_model": str(folder)}, max_seq_length=2048
    )
    beta = section.get("beta", section.get("tau"))
    loss, expected, shown = trl_dpo(
        tmp_path, tiny.llama(), other, store_of(tmp_path, given, width=2048), beta=beta, **settings
    )
    assert terms["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert_close(gradients, expected)
    for name in SHOWN | {"entropy"}:
        assert terms[name] == pytest.approx(shown[name], rel=1e-4, abs=5e-5), (
            name
        )  # differences of sums of some -80
    both = (shown["rewards/chosen"] + shown["rewards/rejected"]) / (2 * beta)
    assert terms["kl"] == pytest.approx(both, rel=1e-4, abs=5e-5 / beta)


def test_conservative_dpo_weighs_both_ways_of_a_pair():
    """What TRL calls label smoothing of the sigmoid loss (its cDPO) is this mixture."""
    h = torch.randn(5, dtype=torch.float64)
    smoothed = dpo_losses(h, "sigmoid", 0.2)
    torch.testing.assert_close(
        smoothed, 0.8 * dpo_losses(h, "sigmoid", 0.0) + 0.2 * dpo_losses(-h, "sigmoid", 0.0)
    )


def experimental(name, folder, model, **settings):
    module = pytest.importorskip(f"trl.experimental.{name}")
    datasets = pytest.importorskip("datasets")
    config, trainer = (getattr(module, f"{name.upper()}{part}") for part in ("Config", "Trainer"))
    args = config(
        output_dir=str(folder / name),
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=128,
        **settings,
    )
    text = [{"prompt": "hello", "chosen": " world", "rejected": " two"}] * 2
    return trainer(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_list(text),
        processing_class=tiny.tokenizer(),
    )


def trl_batch(store):
    """As the trainers of CPO and ORPO take it: labels are those of the answers."""
    found = {}
    for name, side in (("chosen", 0), ("rejected", 1)):
        ids, mask, answer = padded(store, {side}, tiny.tokenizer().pad_token_id)
        found |= {
            f"{name}_input_ids": ids,
            f"{name}_attention_mask": mask,
            f"{name}_labels": ids.where(answer > 0, -100),
        }
    return {**found, "prompt_input_ids": found["chosen_input_ids"]}


def nll_of(model, batch, labels):
    """Cross-entropy of the chosen side: TRL's ORPO has that of its prompts in it, as the paper
    has not.
    """
    out = model(batch["chosen_input_ids"], attention_mask=batch["chosen_attention_mask"]).logits
    return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


EXPERIMENTAL = [
    ("cpo", "cpo", {"beta": 0.2, "alpha": 0.7}, {"loss_type": "sigmoid", "cpo_alpha": 0.7}, False),
    (
        "cpo",
        "cpo",
        {"beta": 0.2, "alpha": 0.0, "label_smoothing": 0.1},
        {"cpo_alpha": 0.0, "label_smoothing": 0.1},
        False,
    ),
    (
        "simpo",
        "cpo",
        {"beta": 2.0, "gamma": 0.6},
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.6},
        False,
    ),
    ("orpo", "orpo", {"beta": 0.3}, {}, True),
]


@pytest.mark.parametrize(
    ("objective", "trainer", "section", "settings", "prompts"),
    EXPERIMENTAL,
    ids=lambda x: str(x)[:8],
)
def test_objectives_without_a_reference_are_those_of_trl(
    objective, trainer, section, settings, prompts, tmp_path
):
    given = rows(COUNT)
    model = tiny.llama()
    terms, gradients = one_step(tmp_path, given, objective, section, max_seq_length=2048)
    theirs = experimental(trainer, tmp_path, model, beta=section["beta"], **settings)
    batch = trl_batch(store_of(tmp_path, given, width=2048))
    loss, shown = theirs.get_batch_loss_metrics(model, batch)
    whole = batch["chosen_input_ids"].where(batch["chosen_attention_mask"] > 0, -100)
    expected = loss + prompts * (
        nll_of(model, batch, batch["chosen_labels"]) - nll_of(model, batch, whole)
    )
    assert terms["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert_close(gradients, gradients_of(model, expected))
    of_chosen = (
        shown["nll_loss"] if section.get("alpha") else nll_of(model, batch, batch["chosen_labels"])
    )  # 0 without alpha
    shown["cross_entropy"] = float(of_chosen)
    assert terms.get("odds_ratio") == (-terms["log_odds_ratio"] if prompts else None)
    beside = {
        "orpo": {"cross_entropy", "log_odds_ratio", "log_odds_chosen"},
        "cpo": {"cross_entropy"},
    }
    for name in SHOWN | beside.get(objective, set()):
        assert terms[name] == pytest.approx(shown[name], rel=1e-4, abs=1e-5), name


def trl_kto(folder, model, reference, store, **settings):
    """As ``trl_dpo``: TRL's divergence is of one batch, here all rows."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    args = trl.KTOConfig(
        output_dir=str(folder / "trl"), report_to="none", use_cpu=True, bf16=False, **settings
    )
    given = datasets.Dataset.from_list(judged_rows(4))
    trainer = trl.KTOTrainer(
        model, reference, args, train_dataset=given, processing_class=tiny.tokenizer()
    )
    inputs = {"label": torch.tensor(store.columns["label"][store.columns["side"] == 0] == 1)}
    for prefix, side in (("", 0), ("KL_", 1)):
        ids, mask, answer = padded(store, {side}, tiny.tokenizer().pad_token_id)
        inputs |= {
            f"{prefix}input_ids": ids,
            f"{prefix}attention_mask": mask,
            f"{prefix}completion_mask": answer,
        }
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    return (
        loss,
        gradients_of(model, loss),
        {name: values[-1] for name, values in trainer._metrics["train"].items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("labels", [None, True, False], ids=["both", "good", "bad"])
@pytest.mark.parametrize("seed_of_reference", [8, 16])
def test_kto_is_that_of_trl(seed_of_reference, labels, tmp_path):
    """With a divergence held at zero, or above it; with answers of one kind alone, without the
    means of the other.
    """
    given = judged_rows(COUNT)
    other = tiny.llama(seed=seed_of_reference)
    if labels is not None:
        given = [{**row, "label": labels} for row in given]
    other.save_pretrained(tmp_path / "reference")
    section = {
        "beta": 0.3,
        "desirable_weight": 1.2,
        "undesirable_weight": 0.7,
        "reference_model": str(tmp_path / "reference"),
    }
    terms, gradients = one_step(tmp_path, given, "kto", section, max_seq_length=2048)
    store = store_of(tmp_path, given, ("unpaired preference",), width=2048)
    loss, expected, shown = trl_kto(
        tmp_path, tiny.llama(), other, store, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7
    )
    assert terms["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert_close(gradients, expected)
    assert (terms["kl"] > 0.1) == (seed_of_reference == 16)
    expected = {name for name in shown if not name.startswith(("logits/", "num_tokens"))}
    assert expected == terms.keys() - {"loss", "grad_norm", "applied"}
    assert ("rewards/margins" in terms) == (labels is None)
    for name in expected:
        assert terms[name] == pytest.approx(shown[name], rel=1e-4, abs=5e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(("width", "without"), [(50, 2), (256, 0)])
def test_kto_is_of_the_answers_that_there_are(width, without, tmp_path):
    """The divergence is a mean over the rows that have an answer to another prompt; they alone
    have room for it.
    """
    given = judged_rows(40)
    model = tiny.llama()
    store = store_of(tmp_path, given, ("unpaired preference",), width)
    others = (store.columns["side"] == 1).nonzero()[0]
    column = np.full(len(store), -200.0, np.float32)
    assert len(store.items) - 1 - len(others) == without
    terms, _ = one_step(
        tmp_path, given, "kto", {}, column=column, max_seq_length=width, batch_size=40
    )
    ratios = []
    for ids, trained in map(store.whole_document, others):
        log_p = model(torch.tensor(ids[None])).logits[0, :-1].log_softmax(-1)
        said = log_p.gather(-1, torch.tensor(ids[1:, None]).long())[:, 0]
        ratios.append(float(said[torch.tensor(trained[1:]) == 1].sum()) + 200)
    assert terms["kl"] == pytest.approx(sum(ratios) / len(others), rel=1e-4)


@pytest.mark.parametrize("objective", OF_ANSWERS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlong": "split"}, "overlong='split': .*set overlong='cut' or overlong='drop'"),
        ({"train_on": "all"}, "train_on='all': .*set train_on='answers'"),
    ],
)
def test_what_answers_cannot_be_asked_is_refused(objective, changes, words):
    with pytest.raises(ConfigurationError, match=words):
        build_objective(ChronicalsConfig(objective=objective, **changes))
    build_objective(ChronicalsConfig(objective="sft", **changes))
    build_objective(ChronicalsConfig(objective=objective, overlong="drop", train_on="answers"))


@pytest.mark.parametrize(
    ("objective", "field"),
    [
        (name, field.name)
        for name, cls in IN_TREE.items()
        for field in dataclasses.fields(cls.Settings)
        if isinstance(field.default.default, float)
    ],
)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_settings_are_finite(objective, field, value):
    with pytest.raises(ConfigurationError, match=f"{objective}=.*{field}.*finite number"):
        build_objective(ChronicalsConfig(objective=objective, **{objective: {field: value}}))


SETTINGS = {
    **{name: {} for name in OF_ANSWERS if name != "reward"},
    "dpo": {"beta": 0.3},
    "ipo": {"tau": 0.3},
    "kto": {"beta": 0.3},
}
"""Of every registered objective over answers, but for reward models, which have no documents'
log-probabilities; those that are set make terms differ more."""


def reference_column(store, seed=3):
    """Below the policy's, so that KTO's divergence is above zero."""
    return -120 + 3 * torch.randn(len(store), generator=torch.Generator().manual_seed(seed)).numpy()


def rows_and_reference(folder, objective, count):
    """Rows that the objective takes, and what their documents have under its reference."""
    given = rows_of(objective, count)
    if objective not in WITH_REFERENCE:
        return given, None
    return given, reference_column(store_of(folder, given, OBJECTIVES[objective].row_kinds))


VARIANTS = {
    **SETTINGS,
    "dpo, smoothed": {"beta": 0.3, "label_smoothing": 0.2},
    "dpo, hinge": {"beta": 0.02, "loss": "hinge"},
    "dpo, robust": {"beta": 0.3, "loss": "robust", "label_smoothing": 0.2},
    "dpo, by token": {"beta": 3.0, "loss": "sigmoid_norm"},
    "cpo, smoothed": {"label_smoothing": 0.1},
}


APART = {
    "padded": {"padded": True},
    "a pack each": {"use_sequence_packing": False, "max_seq_length": 128, "batch_size": COUNT},
}


@pytest.mark.parametrize("way", APART)
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_is_what_separate_rows_give(name, way, tmp_path):
    """One pack with all pairs, whose answers share their prompts: each answer in a row with its
    prompt; each pair in a pack.
    """
    objective = name.partition(",")[0]
    given, column = rows_and_reference(tmp_path, objective, COUNT)
    packed, other = (
        one_step(
            tmp_path,
            given,
            objective,
            VARIANTS[name],
            column=column,
            **{"max_seq_length": 2048, **more},
        )
        for more in ({}, APART[way])
    )
    assert other[0] == pytest.approx(packed[0], rel=1e-5, abs=1e-6)
    assert_close(other[1], packed[1], 1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_however_a_step_is_divided(name, tmp_path):
    """Batch x accumulation, and many pairs in a pack or one: the same terms and gradients."""
    objective = name.partition(",")[0]
    found = []
    given, column = rows_and_reference(tmp_path, objective, 8)
    for batch, accumulation, more in DIVISIONS:
        found.append(
            one_step(
                tmp_path,
                given,
                objective,
                VARIANTS[name],
                column=column,
                batch_size=batch,
                gradient_accumulation_steps=accumulation,
                max_seq_length=128,
                **more,
            )
        )
    assert found[0][0].get("kl", 1.0) > 0
    for terms, gradients in found[1:]:
        assert terms == pytest.approx(found[0][0], rel=1e-5, abs=1e-6)
        assert_close(gradients, found[0][1], 1e-5)


def test_a_head_that_is_not_read_gives_the_same(tmp_path):
    given = rows(COUNT)
    fused, plain = (
        one_step(tmp_path, given, "orpo", {}, max_seq_length=2048, use_fused_kernels=fused)
        for fused in (True, False)
    )
    assert plain[0] == pytest.approx(fused[0], rel=1e-5, abs=1e-6)
    assert_close(plain[1], fused[1], 1e-4)


# --- metrics
# -----------------------------------------------------------------------------------------------------------


def test_rewards_that_are_equal_are_no_right_choice():
    """As of a model that has not learned yet; an entry without an item counts nothing."""
    chosen = torch.tensor([1.0, 2.0, 3.0, 9.0])
    rejected = torch.tensor([1.0, 1.0, 5.0, 0.0])
    there = torch.tensor([True, True, True, False])
    tokens = torch.ones(4)
    found = reward_metrics(Pairs(chosen, rejected, tokens, tokens, there), chosen, rejected)
    sums = {name.removeprefix("rewards/"): float(term.sum) for name, term in found.items()}
    assert sums == {"chosen": 6.0, "rejected": 7.0, "margins": -1.0, "accuracies": 1.0}
    assert {(term.coefficient, term.per) for term in found.values()} == {(0.0, "items")}


# --- the reference policy
# --------------------------------------------------------------------------------------------

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}


def train(folder, given=None, model=None, **changes):
    usual = {"objective": "dpo", "max_steps": 4, "learning_rate": 1e-3}
    return runs.train(folder, given or rows(24), model, **{**usual, **changes})


def first_and_last(folder):
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]
    return lines[0], lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, LORA, {**LORA, "dpo": {"reference": "stored"}}], ids=["full", "off", "stored"]
)
def test_the_reference_is_what_the_run_begins_with(changes, tmp_path):
    """At first the loss is log 2; rewards and margins grow from nothing."""
    train(tmp_path, **changes)
    first, last = first_and_last(tmp_path)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert abs(first["rewards/margins"]) < 1e-4 < 1e-2 < last["rewards/margins"]


@pytest.mark.slow
def test_each_way_to_have_it_gives_the_same_run(tmp_path):
    base = tmp_path / "base"
    tiny.llama().save_pretrained(base)
    ways = {"off": {}, "stored": {"reference": "stored"}, "model": {"reference_model": str(base)}}
    for name, section in ways.items():
        train(tmp_path / name, dpo=section, **LORA)
    off, *others = (runs.trajectory(tmp_path / name) for name in ways)
    for other in others:
        assert other == [pytest.approx(step, rel=1e-5) for step in off]


@pytest.mark.slow
def test_a_reference_in_4_bits(tmp_path):
    base = tmp_path / "base"
    tiny.llama().save_pretrained(base)
    train(tmp_path, dpo={"reference_model": str(base), "reference_in_4bit": True})
    assert 0 < abs(first_and_last(tmp_path)[0]["rewards/margins"]) < 1


@pytest.mark.slow
def test_a_resumed_run_has_the_reference_it_began_with(tmp_path):
    train(tmp_path / "whole")
    train(tmp_path / "halves", max_steps=2, lr_scheduler="constant", save_steps=1)
    changes = {"lr_scheduler": "constant", "save_steps": 2}
    train(tmp_path / "other", **changes)
    train(tmp_path / "parts", max_steps=2, **changes)
    train(tmp_path / "parts", resume=True, **changes)
    assert runs.trajectory(tmp_path / "parts") == runs.trajectory(tmp_path / "other")


def test_a_resumed_run_of_another_model_is_refused(tmp_path):
    changes = {"lr_scheduler": "constant", "save_steps": 2}
    train(tmp_path, max_steps=2, **changes)
    with pytest.raises(
        CheckpointError, match="the run's reference policy is the model that it began with"
    ):
        train(tmp_path, model=tiny.llama(seed=5), resume=True, **changes)


@pytest.mark.slow
def test_log_probabilities_are_computed_once(tmp_path, caplog):
    caplog.set_level("INFO")
    changes = {"cache_dir": tmp_path / "shared", "dpo": {"reference": "stored"}, **LORA}
    for seed in (1, 2):  # adapters begin otherwise, and change nothing yet
        train(tmp_path / str(seed), seed=seed, **changes)
    told = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("reference: ")
    ]
    assert ["computing" in line for line in told] == [True, False]


@pytest.mark.slow
def test_another_model_has_a_stored_reference_of_its_own(tmp_path):
    """Of the same data in the same cache: with another model's log-probabilities the first loss
    would not be log 2.
    """
    for seed in (1, 2):
        train(
            tmp_path / str(seed),
            model=tiny.llama(seed=seed),
            cache_dir=tmp_path / "shared",
            max_steps=1,
        )
        assert first_and_last(tmp_path / str(seed))[0]["loss"] == pytest.approx(
            math.log(2), rel=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("of_peft", [True, False], ids=["PEFT's", "ours"])
def test_adapters_of_another_scale_have_a_stored_reference_of_their_own(of_peft, tmp_path):
    for alpha in (8, 64):
        model = tiny.llama()
        torch.manual_seed(0)
        if of_peft:
            peft = pytest.importorskip("peft")
            shape = peft.LoraConfig(
                r=4, lora_alpha=alpha, init_lora_weights=False, target_modules=["q_proj", "up_proj"]
            )
            model = peft.get_peft_model(model, shape)
        else:
            apply_lora(model, LoRAConfig(rank=4, alpha=alpha, dropout=0.0))
            for _, layer in linear_adapters(model):
                torch.nn.init.normal_(layer.lora_B, std=0.1)
        stored = {"dpo": {"reference": "stored"}, "max_steps": 1}
        train(tmp_path / str(alpha), model=model, cache_dir=tmp_path / "shared", **stored)
        assert first_and_last(tmp_path / str(alpha))[0]["loss"] == pytest.approx(
            math.log(2), rel=1e-5
        )


@pytest.mark.slow
def test_the_adapter_of_peft_that_is_active_is_the_stored_reference(tmp_path):
    peft = pytest.importorskip("peft")
    shape = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "up_proj"])
    for active in ("first", "second"):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny.llama(), shape, adapter_name="first")
        model.add_adapter("second", shape)
        model.set_adapter(active)
        stored = {"dpo": {"reference": "stored"}, "max_steps": 1}
        train(tmp_path / active, model=model, cache_dir=tmp_path / "shared", **stored)
        assert first_and_last(tmp_path / active)[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.slow
def test_a_run_over_adapters_of_peft_goes_on(tmp_path):
    """Their scales, which ``reference.json`` keeps, are found to be the same."""
    peft = pytest.importorskip("peft")
    shape = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "up_proj"])
    changes = {"dpo": {"reference": "stored"}, "lr_scheduler": "constant", "save_steps": 1}
    for steps in (1, 2):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny.llama(), shape)
        train(tmp_path, rows(8), model, max_steps=steps, resume=steps > 1, **changes)
    assert len(runs.trajectory(tmp_path)) == 2


@pytest.mark.slow
def test_held_out_pairs_are_compared_with_the_reference_too(tmp_path):
    result = train(tmp_path, validation_split=0.25)
    assert set(result.evaluation.others) >= REWARDS and result.evaluation.perplexity is None
    assert result.evaluation.others["rewards/margins"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("labels", [None, True, False], ids=["both", "good", "bad"])
def test_means_over_no_answers_are_not_shown(labels, tmp_path):
    """Neither of a run's steps, one of which may have answers of one kind alone, nor of held-out
    answers.
    """
    held_out = judged_rows(6, seed=5)
    if labels is not None:
        held_out = [{**row, "label": labels} for row in held_out]
    alone = {"batch_size": 1, "gradient_accumulation_steps": 1, "max_documents": 6}
    result = train(
        tmp_path, judged_rows(24), objective="kto", eval_rows=held_out, max_steps=8, **alone
    )
    of_kind = {
        True: {"rewards/chosen", "logps/chosen"},
        False: {"rewards/rejected", "logps/rejected"},
    }
    everything = {"rewards/margins", *of_kind[True], *of_kind[False]}
    expected = everything if labels is None else of_kind[labels]
    assert set(result.evaluation.others) & everything == expected
    assert set(result.evaluation.others) - everything == {"kl", "entropy"}
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert {"rewards/margins" in line for line in lines} == {True, False}
    for line in lines:
        both = {
            f"{name}/{side}" for name in ("rewards", "logps") for side in ("chosen", "rejected")
        } <= line.keys()
        assert ("rewards/margins" in line) == both
        if both:
            assert line["rewards/margins"] == pytest.approx(
                line["rewards/chosen"] - line["rewards/rejected"], abs=1e-6
            )


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"beta": 0.0}, "beta"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "has no label_smoothing"),
        ({"reference_in_4bit": True}, "give dpo.reference_model"),
        ({"reference": "adapters_off"}, "take reference='stored'"),
        ({"reference": "stored", "reference_model": "x"}, "leave one of them out"),
    ],
)
def test_what_cannot_be_honoured_is_refused(section, reason, tmp_path):
    with pytest.raises(ConfigurationError, match=reason):
        train(tmp_path, dpo=section)
    assert not list((tmp_path / "run").glob("model"))


def test_rows_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is of kind chat; the objective takes preference"):
        train(tmp_path, tiny.chat_rows())


def test_log_of_one_minus_exp_near_both_ends():
    x = torch.tensor([-1e-6, -1e-3, -0.6, -0.8, -30.0])
    exact = torch.log1p(-torch.exp(x.double()))
    torch.testing.assert_close(log_one_minus_exp(x).double(), exact, rtol=1e-5, atol=1e-30)
    x = torch.zeros(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_one_minus_exp(x).sum(), x)
    assert torch.isfinite(gradient).all()
