"""The reference policy: where it comes from, what it is the same as, and how a trained model is
compared with it again.
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.data import BatchStream
from chronicals.objectives import build_objective
from chronicals.objectives.reference import with_reference
from chronicals.objectives.terms import ADAPTERS_OFF, REFERENCE_POLICY, TRAINED_MODEL
from chronicals.saving import SavedModel
from chronicals.training import CheckpointError, ChronicalsTrainer
from chronicals.training.columns.start_columns import StartColumns
from chronicals.training.loading import load_to_train
from chronicals.training.run.evaluation import evaluate_data
from chronicals.training.session import prepared
from preferences import judged_rows, rows, store_of

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}
HELD = rows(8, seed=5)


def first(folder, name="loss"):
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return next(line[name] for line in lines if "loss" in line)


def changes_of(**changes):
    return {"objective": "dpo", "max_steps": 3, "learning_rate": 2e-3, **changes}


def train_from(start, folder, eval_rows=None, given=None, **changes):
    """As the command does: the model of a folder, trained; the evaluation of held-out rows."""
    config = runs.config(folder, **changes_of(**changes))
    saved = SavedModel.find(start)
    model, config = load_to_train(saved, config, ranks())
    data = given or (judged_rows(16) if config.objective == "kto" else rows(16))
    return ChronicalsTrainer(model, saved.tokenizer(), config).train(data, eval_rows)


def ranks():
    from chronicals.distributed import Mesh

    return Mesh()


def evaluated(folder, data=HELD, reference_model=None, **changes):
    """As ``chronicals evaluate``: what the run left, on rows, by what it wrote beside its model."""
    saved = SavedModel.find(folder / "run")
    taught = saved.about["taught"]
    config = runs.config(
        folder / "again", objective=taught["objective"], sections=taught["sections"], **changes
    )
    config = with_reference(config, saved.about.get("reference"), reference_model)
    return evaluate_data(saved.model(torch.float32), saved.tokenizer(), data, config)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """The folder of a run of SFT with adapters, which changed the model."""
    folder = tmp_path_factory.mktemp("tuned")
    train_from(base, folder, given=tiny.chat_rows(), objective="sft", learning_rate=1e-2, **LORA)
    return folder / "run"


# --- another model as the reference
# ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_run_of_an_adapter_is_a_reference(tuned, tmp_path):
    """DPO of that adapter beside it is DPO of that adapter with its own start stored."""
    for name, section in {"stored": {}, "named": {"reference_model": str(tuned)}}.items():
        train_from(tuned, tmp_path / name, dpo=section)
        assert first(tmp_path / name) == pytest.approx(math.log(2), rel=1e-5)
    stored, named = (runs.trajectory(tmp_path / name) for name in ("stored", "named"))
    assert named == [pytest.approx(step, rel=1e-4) for step in stored]


@pytest.mark.slow
def test_a_path_is_found_from_another_folder(tuned, base, tmp_path, monkeypatch):
    """Also one that begins with a tilde; in what is written of the run it is whole."""
    monkeypatch.chdir(tuned.parent)
    monkeypatch.setenv("HOME", str(tuned.parent))
    for name, path in {"relative": "run", "tilde": "~/run"}.items():
        train_from(base, tmp_path / name, dpo={"reference_model": path}, **LORA)
        about = json.loads((tmp_path / name / "run" / "model" / "chronicals.json").read_text())
        assert about["taught"]["sections"]["dpo"]["reference_model"] == str(tuned)
    monkeypatch.chdir(tmp_path)
    assert evaluated(tmp_path / "relative").others["rewards/margins"] != 0


@pytest.mark.parametrize("what", ["nothing", "a tokenizer"])
def test_a_reference_that_cannot_be_used_names_its_setting(what, base, tmp_path):
    there = tmp_path / "there"
    if what == "a tokenizer":
        shutil.copytree(base, there)
        tokenizer = tiny.tokenizer()
        tokenizer.add_tokens(["<another>"])
        tokenizer.save_pretrained(there)
    other = "its tokenizer has another vocabulary .*; the reference must read texts as"
    reason = {"nothing": "there is no such folder here", "a tokenizer": other}[what]
    with pytest.raises(
        ConfigurationError, match=f"^dpo={{'reference_model': '{there}'}}: {reason}"
    ) as refused:
        train_from(base, tmp_path, dpo={"reference_model": str(there)})
    assert "--base-model" not in str(refused.value) and "teacher" not in str(refused.value)


@pytest.mark.parametrize("named", [None, "/no/such/model"])
def test_an_adapter_whose_model_is_not_known_is_told_without_flags_of_others(
    named, tuned, base, tmp_path
):
    shutil.copytree(tuned / "model", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": named}))
    with pytest.raises(
        ConfigurationError, match="^dpo={'reference_model': .*write where it is into the adapter's"
    ) as refused:
        train_from(base, tmp_path, dpo={"reference_model": str(tmp_path / "adapter")})
    assert not any(
        words in str(refused.value) for words in ("base-model", "give base_model", " model=")
    )


def test_a_plan_refuses_adapters_that_there_are_not(tmp_path):
    config = runs.config(tmp_path, objective="dpo", dpo={"reference": "adapters_off"})
    with pytest.raises(
        ConfigurationError,
        match="dpo.reference='adapters_off': there are no adapters to switch off",
    ):
        build_objective(config).unplanned_costs(config)
    adapted = config.replace(use_lora=True)
    assert build_objective(adapted).unplanned_costs(adapted) is None
    assert build_objective(adapted).forward_passes(adapted) == [ADAPTERS_OFF]
    judged = runs.config(tmp_path, objective="kto", use_lora=True)
    assert build_objective(judged).forward_passes(judged) == [ADAPTERS_OFF, TRAINED_MODEL]


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"dpo": {"reference": "stored"}, "use_lora": True}, []),
        ({"dpo": {"reference_model": "another"}, "use_lora": True}, [REFERENCE_POLICY]),
        ({}, []),
    ],
    ids=str,
)
def test_forward_passes_are_those_of_where_the_reference_is(fields, passes, tmp_path):
    config = runs.config(tmp_path, objective="dpo", **fields)
    assert build_objective(config).forward_passes(config) == passes


def test_code_of_the_reference_runs_only_if_asked(base, tmp_path, record_calls):
    loads = record_calls(SavedModel, "model")
    for trusted in (False, True):
        config = runs.config(
            tmp_path,
            objective="dpo",
            dpo={"reference_model": str(base), "trust_remote_code": trusted},
        )
        build_objective(config).bring(tiny.llama(), tiny.tokenizer(), config)
    assert [trust_remote_code for _, _, trust_remote_code, *_ in loads] == [False, True]


# --- without dropout
# --------------------------------------------------------------------------------------------------


def gpt2(dropout):
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=len(tiny.tokenizer()),
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def in_training_mode(folder, section, dropout):
    """The reference of each document as a step has it, and the loss of the step without the
    policy's dropout.
    """
    config = runs.config(
        folder, objective="dpo", dpo=section, batch_size=8, gradient_accumulation_steps=1, **LORA
    )
    store = store_of(folder, rows(8))
    model = gpt2(dropout)
    objective = build_objective(config)
    with (
        prepared(model, config, objective, tokenizer=tiny.tokenizer()) as session,
        session.stepping(),
    ):
        if section:
            stored = StartColumns(
                session, lambda s: BatchStream(s, config, 0, epochs=1, shuffle=False)
            )
            store = stored.beside(store)
        (batch,) = BatchStream(
            store, config, tiny.tokenizer().pad_token_id, epochs=1, shuffle=False
        )
        model.train()
        reference = objective.reference_sums(session.presented, batch)
        modes = {name: module.training for name, module in model.named_modules()}
        assert all(modes.values())  # as it was
        model.eval()
        loss = objective(session.presented, batch)["dpo"].sum / 8
    return reference[batch.segments["side"] >= 0].float(), float(loss)


def test_the_reference_does_not_drop_out(tmp_path):
    """With adapters off it is what is stored, whatever the model's own dropout; the first loss
    is log 2.
    """
    off, loss = in_training_mode(tmp_path / "off", {}, 0.3)
    stored, other = in_training_mode(tmp_path / "stored", {"reference": "stored"}, 0.3)
    without, _ = in_training_mode(tmp_path / "without", {}, 0.0)
    torch.testing.assert_close(off, stored, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(off, without, rtol=1e-6, atol=1e-5)
    assert loss == pytest.approx(math.log(2), rel=1e-5) == other


@pytest.mark.slow
def test_the_policy_drops_out_as_it_was_told(tmp_path):
    """Adapters begin without an effect, so that their dropout has none; the model's own has."""
    runs.train(tmp_path / "adapters", rows(16), **changes_of(**{**LORA, "lora_dropout": 0.3}))
    assert first(tmp_path / "adapters") == pytest.approx(math.log(2), rel=1e-5)
    runs.train(tmp_path / "own", rows(16), gpt2(0.3), **changes_of(**LORA))
    assert abs(first(tmp_path / "own") - math.log(2)) > 1e-4


# --- in the cache
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["another rope_theta", "rows exchanged"])
def test_what_is_stored_is_read_for_the_same_model_alone(how, tmp_path):
    """Another model with weights of the same sums computes its own: its first loss is log 2."""
    for number in (0, 1):
        model = tiny.llama()
        if number and how == "rows exchanged":
            weight = model.model.layers[0].mlp.up_proj.weight
            weight.data = weight.data.roll(1, 0)
        if number and how == "another rope_theta":
            model = tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 3.0})
        folder = tmp_path / str(number)
        runs.train(
            folder, rows(16), model, **changes_of(max_steps=1, cache_dir=tmp_path / "shared")
        )
        assert first(folder) == pytest.approx(math.log(2), rel=1e-6)
    assert len(list((tmp_path / "shared").glob("*.reference.safetensors"))) == 2


def test_what_is_stored_of_pairs_is_not_read_for_others_of_their_lengths(tmp_path):
    """Training and held-out pairs may be as many and as long as each other; each have the
    log-probabilities of the whole.
    """
    given = [
        {"prompt": f"what is {n}?", "chosen": f"{n} {n}", "rejected": f"no {n}"}
        for n in range(1, 9)
    ]
    config = runs.config(tmp_path, objective="dpo", dpo={"reference": "stored"})
    store = store_of(tmp_path, given)
    whole = store_of(tmp_path / "whole", given)
    halves = np.split(np.arange(len(store)), 2)
    parts = [store.subset(half) for half in halves]
    assert np.array_equal(parts[0].lengths, parts[1].lengths)
    with (
        prepared(
            tiny.llama(), config, build_objective(config), tokenizer=tiny.tokenizer()
        ) as session,
        session.stepping(),
    ):
        stored = StartColumns(session, lambda s: BatchStream(s, config, 0, epochs=1, shuffle=False))
        expected = stored.beside(whole).columns["reference"]
        found = [stored.beside(part).columns["reference"] for part in parts]
        stored.beside(store)
        files = len(list(store.path.parent.glob("*.reference.safetensors")))
        for changes in ({"mixed_precision": "bf16"}, {"use_fp8": True}):
            session.config = config.replace(**changes)
            stored.beside(store)
            files += 1
            assert len(list(store.path.parent.glob("*.reference.safetensors"))) == files, changes
    assert not np.array_equal(expected[halves[0]], expected[halves[1]])
    for half, column in zip(halves, found):
        np.testing.assert_allclose(column, expected[half], rtol=1e-5)


@pytest.mark.slow
def test_a_run_that_was_begun_before_places_were_kept_goes_on(tmp_path):
    changes = changes_of(lr_scheduler="constant", save_steps=2)
    runs.train(tmp_path, rows(16), **{**changes, "max_steps": 2})
    file = tmp_path / "run" / "reference.json"
    file.write_text(json.dumps({"weights": json.loads(file.read_text())["weights"]}))
    runs.train(tmp_path, rows(16), resume=True, **changes)
    assert len(runs.trajectory(tmp_path)) == 3


# --- evaluation beside the same reference
# -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "ipo", "kto"])
def test_adapters_that_began_fresh_are_switched_off(objective, base, tmp_path):
    held = judged_rows(8, seed=5) if objective == "kto" else HELD
    result = train_from(base, tmp_path, held, objective=objective, keep="last", **LORA)
    found = evaluated(tmp_path, held)
    assert SavedModel.find(tmp_path / "run").about["reference"] == {"how": "adapters_off"}
    assert found.loss == pytest.approx(result.evaluation.loss, rel=1e-5)


@pytest.mark.slow
def test_an_evaluation_of_judged_answers_does_not_depend_on_its_steps(base, tmp_path):
    """Their divergence is that of all held-out answers."""
    held = judged_rows(24, seed=5)
    result = train_from(base, tmp_path, held, objective="kto", keep="last", **LORA)
    for batch_size, micro_batches in ((1, 1), (8, 1), (1, 8)):
        sizes = {
            "batch_size": batch_size,
            "gradient_accumulation_steps": micro_batches,
            "max_documents": 6,
        }
        found = evaluated(tmp_path, held, **sizes)
        assert found.loss == pytest.approx(result.evaluation.loss, rel=1e-5)
        assert found.others == pytest.approx(result.evaluation.others, rel=1e-3, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["an adapter", "all weights", "a head beside adapters"])
def test_another_start_is_the_reference_of_evaluation_too(kind, base, tuned, tmp_path):
    """The loss is that of training, not one beside the base."""
    beside = (
        {**LORA, "lora_modules_to_save": ["lm_head"]} if kind == "a head beside adapters" else {}
    )
    start = tuned if kind == "an adapter" else base
    result = train_from(start, tmp_path, HELD, keep="last", **beside)
    record = SavedModel.find(tmp_path / "run").about["reference"]
    assert record["how"] == "stored" and record["start"] == str(SavedModel.find(start).place)
    found = evaluated(tmp_path)
    assert found.loss == pytest.approx(result.evaluation.loss, rel=1e-5)
    assert found.others == pytest.approx(result.evaluation.others, rel=1e-3, abs=2e-4)
    if kind == "an adapter":
        assert abs(evaluated(tmp_path, reference_model=base).loss - found.loss) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "beside", [{"lora_modules_to_save": ["lm_head"]}, {"dpo": {"reference": "stored"}}]
)
def test_a_start_in_4_bits_is_the_reference_in_4_bits(beside, base, tmp_path):
    """Trained so little that it is still what it began with: the loss is log 2, as beside the
    weights in 16 bits it is not.
    """
    train_from(base, tmp_path, **{**LORA, "learning_rate": 1e-9, "load_in_4bit": True, **beside})
    assert SavedModel.find(tmp_path / "run").about["reference"]["in_4bit"]
    assert evaluated(tmp_path).loss == pytest.approx(math.log(2), rel=1e-5)
    assert abs(evaluated(tmp_path, reference_model=base).loss - math.log(2)) > 1e-4


@pytest.mark.slow
def test_adapters_that_make_up_for_quantising_begin_with_no_stored_model(base, tmp_path):
    train_from(base, tmp_path, **{**LORA, "load_in_4bit": True, "lora_init": "loftq"})
    assert SavedModel.find(tmp_path / "run").about["reference"] == {"how": "stored"}
    with pytest.raises(
        ConfigurationError, match="it was not known where that is stored; give as reference_model"
    ):
        evaluated(tmp_path)


@pytest.mark.slow
def test_a_run_that_goes_on_remembers_its_start(base, tmp_path):
    changes = {"lr_scheduler": "constant", "save_steps": 2}
    train_from(base, tmp_path, max_steps=2, **changes)
    record = json.loads((tmp_path / "run" / "reference.json").read_text())["reference"]
    model, config = load_to_train(
        SavedModel.find(base), runs.config(tmp_path, **changes_of(**changes)), ranks()
    )
    model.__dict__.pop("_chronicals_loaded_from")
    ChronicalsTrainer(model, tiny.tokenizer(), config).train(rows(16), resume=True)
    assert SavedModel.find(tmp_path / "run").about["reference"] == record


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_folder_has_the_reference_of_before(base, tmp_path, caplog):
    changes = {"lr_scheduler": "constant", "save_steps": 2}
    train_from(base, tmp_path, max_steps=2, **changes)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    record = json.loads((tmp_path / "run" / "reference.json").read_text())

    def go_on(start, folder, checkpoint):
        config = runs.config(tmp_path / folder, **changes_of(**changes))
        model, config = load_to_train(SavedModel.find(start), config, ranks())
        ChronicalsTrainer(model, tiny.tokenizer(), config).train(rows(16), resume=checkpoint)
        return json.loads((tmp_path / folder / "run" / "reference.json").read_text())

    with pytest.raises(
        CheckpointError,
        match="the run's reference policy is the model that it began with, and this is",
    ):
        go_on(tmp_path / "run", "other", checkpoint)
    assert go_on(base, "there", checkpoint) == record and "is not compared" not in caplog.text
    alone = shutil.copytree(checkpoint, tmp_path / "alone" / "checkpoints" / checkpoint.name)
    assert (
        go_on(base, "again", alone) == record and "there is no reference.json beside" in caplog.text
    )


@pytest.mark.slow
def test_adapters_go_on_over_the_base_that_they_began_on_alone(base, tmp_path):
    """Whose files may lie elsewhere now."""
    changes = {"lr_scheduler": "constant", "save_steps": 2, **LORA}
    train_from(base, tmp_path, **changes, max_steps=2)
    shutil.copytree(base, tmp_path / "copy", copy_function=shutil.copy)
    for folder, seed in (("another", 5), ("copy", None)):
        if seed is not None:
            tiny.llama(seed).save_pretrained(tmp_path / folder)
        model, config = load_to_train(
            SavedModel.find(tmp_path / folder),
            runs.config(tmp_path, **changes_of(**changes)),
            ranks(),
        )
        trainer = ChronicalsTrainer(model, tiny.tokenizer(), config)
        if seed is None:
            trainer.train(rows(16), resume=True)
            assert len(runs.trajectory(tmp_path)) == 3
        else:
            with pytest.raises(
                CheckpointError,
                match="reference.json: the run's reference policy is .*, and this is another",
            ):
                trainer.train(rows(16), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["copied", "changed", "another", "left out", "named since"])
def test_a_run_goes_on_beside_the_reference_that_it_began_with_alone(what, base, tmp_path):
    """The model may lie elsewhere meanwhile."""
    one = tmp_path / "one"
    other = tmp_path / "other"
    for folder, seed in ((one, 7), (other, 8)):
        tiny.llama(seed).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    begun = {"reference_model": str(one)}
    then = {"reference_model": str(one)}
    if what == "named since":
        begun = {}
    changes = {"lr_scheduler": "constant", "save_steps": 2}
    train_from(base, tmp_path, dpo=begun, **changes, max_steps=2)
    if what == "copied":
        then = {
            "reference_model": str(
                shutil.copytree(one, tmp_path / "there", copy_function=shutil.copy)
            )
        }
        shutil.rmtree(one)
    if what == "changed":
        tiny.llama(9).save_pretrained(one)
    if what == "another":
        then = {"reference_model": str(other)}
    if what == "left out":
        then = {}
    config = runs.config(tmp_path, **changes_of(dpo=then, **changes))
    model, config = load_to_train(SavedModel.find(base), config, ranks())
    trainer = ChronicalsTrainer(model, tiny.tokenizer(), config)
    if what == "copied":
        trainer.train(rows(16), resume=True)
        assert len(runs.trajectory(tmp_path)) == 3
        return
    reason = (
        "the setting that it began with"
        if what in ("left out", "named since")
        else "the model that the run began"
    )
    with pytest.raises(
        CheckpointError,
        match=f"reference.json: the run's reference policy is .*; resume with {reason}",
    ):
        trainer.train(rows(16), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["changed", "gone", "not known"])
def test_a_reference_that_is_not_there_any_more_is_refused_with_the_remedy(what, base, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(base, start)
    if what == "not known":
        runs.train(tmp_path, rows(16), **changes_of())
    else:
        train_from(start, tmp_path)
    if what == "gone":
        shutil.rmtree(start)
    if what == "changed":
        tiny.llama(seed=9).save_pretrained(start)
    reason = {
        "changed": "whose files were changed",
        "gone": "cannot be read",
        "not known": "it was not known where that is",
    }
    with pytest.raises(
        ConfigurationError, match=f"{reason[what]}.*; give as reference_model, a folder or hub name"
    ):
        evaluated(tmp_path)
    assert evaluated(tmp_path, reference_model=base).others["rewards/margins"] > 0


def test_where_nothing_says_which_reference_nothing_is_guessed(base, tuned, tmp_path):
    """Of adapters, too, which may have begun elsewhere; who knows better says so."""
    config = runs.config(tmp_path, objective="dpo")
    for place in (base, tuned):
        model = SavedModel.find(place).model(torch.float32)
        with pytest.raises(
            ConfigurationError,
            match="nothing says which reference policy .* give it as reference_model",
        ):
            evaluate_data(model, tiny.tokenizer(), HELD, config)
    off = runs.config(tmp_path, objective="dpo", dpo={"reference": "adapters_off"})
    named = runs.config(tmp_path, objective="dpo", dpo={"reference_model": str(base)})
    one, other = (
        evaluate_data(SavedModel.find(tuned).model(torch.float32), tiny.tokenizer(), HELD, c)
        for c in (off, named)
    )
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    with pytest.raises(
        ConfigurationError, match="'adapters_off': it has no adapters of ours, so that switching"
    ):
        evaluate_data(tiny.llama(), tiny.tokenizer(), HELD, off)


@pytest.mark.slow
def test_an_embedding_trained_whole_is_said_as_the_user_calls_it(base, tmp_path):
    train_from(base, tmp_path, **{**LORA, "lora_modules_to_save": ["lm_head"]})
    model = SavedModel.find(tmp_path / "run").model(torch.float32)
    off = runs.config(tmp_path, objective="dpo", dpo={"reference": "adapters_off"})
    with pytest.raises(
        ConfigurationError, match="lm_head is trained whole .*; give it as reference_model"
    ):
        evaluate_data(model, tiny.tokenizer(), HELD, off)


def test_an_objective_without_a_reference_takes_none(tmp_path):
    config = runs.config(tmp_path, objective="simpo")
    assert with_reference(config, {"how": "adapters_off"}) is config
    with pytest.raises(
        ConfigurationError,
        match="reference_model='x': objective='simpo' compares with no reference policy",
    ):
        with_reference(config, None, "x")


@pytest.mark.slow
def test_a_model_that_was_trained_since_is_not_what_was_loaded(base, tmp_path):
    """A second run of it begins elsewhere than where it was loaded from."""
    model, config = load_to_train(
        SavedModel.find(base), runs.config(tmp_path / "first", **changes_of()), ranks()
    )
    ChronicalsTrainer(model, tiny.tokenizer(), config).train(rows(16))
    runs.train(tmp_path / "then", rows(16), model, **changes_of())
    found = [
        SavedModel.find(tmp_path / name / "run").about["reference"] for name in ("first", "then")
    ]
    assert found[0]["start"] == str(base) and found[1] == {"how": "stored"}
    model, config = load_to_train(SavedModel.find(base), runs.config(tmp_path / "sft"), ranks())
    ChronicalsTrainer(model, tiny.tokenizer(), config).train(tiny.chat_rows())
    runs.train(tmp_path / "after", rows(16), model, **changes_of())
    assert SavedModel.find(tmp_path / "after" / "run").about["reference"] == {"how": "stored"}
