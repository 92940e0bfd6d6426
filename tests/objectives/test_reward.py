"""A reward model: the mathematics of TRL, on packs, however a step is divided; saved as
transformers and PEFT load it.
"""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import families
import mixtures
import runs
import tiny
from chronicals.cli.app import app
from chronicals.config import ConfigurationError
from chronicals.export import FORMATS, ExportError, export
from chronicals.models import Term, attach_score, load_model, score_of
from chronicals.objectives import OBJECTIVES, reward
from chronicals.objectives.reward import padding_token
from chronicals.saving import SavedModel, save_model
from chronicals.training import ChronicalsTrainer
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.evaluation import evaluate_data
from chronicals.verification import verify
from comparison import equal
from preferences import DIVISIONS, assert_close, gradients_of, one_step, rows, store_of

COUNT = 9
LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}
SHOWN = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}
PAD = 1
"""What rows of the tiny tokenizer are padded with: its own padding token is one with which
answers may end.
"""

UNUSED = 31
"""A token of no row: transformers gives the embedding of the padding token no gradient."""

READY = {"report_samples": 0, "lr_scheduler": "constant"}


def padded(documents, pad=PAD):
    """Right-padded ids and mask."""
    longest = max(len(ids) for ids in documents)
    ids = torch.full((len(documents), longest), pad)
    mask = torch.zeros(len(documents), longest, dtype=torch.long)
    for row, tokens in enumerate(documents):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(np.asarray(tokens)), 1
    return ids, mask


def sides_of(store):
    """Token ids of the chosen and of the rejected answers, each behind its prompt."""
    return [
        [store.whole_document(n)[0] for n in range(len(store)) if store.columns["side"][n] == side]
        for side in (0, 1)
    ]


def with_score(scale=10.0):
    """A tiny Llama whose score is drawn already, ``scale`` times as large as a run draws it."""
    model = tiny.llama()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        score = attach_score(model, PAD)
    with torch.no_grad():
        score.weight.mul_(scale)
    return model


def classifier(model):
    """transformers' class with the same weights, by hand."""
    from transformers import LlamaForSequenceClassification

    config = type(model.config)(
        **{**model.config.to_dict(), "num_labels": 1, "pad_token_id": UNUSED}
    )
    found = LlamaForSequenceClassification(config)
    found.load_state_dict(
        {name: w for name, w in model.state_dict().items() if not name.startswith("lm_head")}
    )
    return found


# --- mathematics
# -----------------------------------------------------------------------------------------------------


def trl_reward(folder, model, store, **settings):
    """Loss, gradients and metrics of TRL's trainer over the very tokens of the store."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(UNUSED)
    args = trl.RewardConfig(
        output_dir=str(folder / "trl"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )
    trainer = trl.RewardTrainer(
        model, args, train_dataset=datasets.Dataset.from_list(rows(2)), processing_class=tokenizer
    )
    chosen, rejected = sides_of(store)
    ids, mask = padded([*chosen, *rejected], UNUSED)
    assert (ids[mask > 0] != UNUSED).all()
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, {"input_ids": ids, "attention_mask": mask})
    return (
        loss,
        gradients_of(model, loss),
        {name: values[-1] for name, values in trainer._metrics["train"].items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("center", [0.0, 0.3])
def test_loss_gradients_and_metrics_are_those_of_trl(center, tmp_path):
    given = rows(COUNT)
    model = with_score()
    expected = classifier(model)
    terms, gradients = one_step(
        tmp_path, given, "reward", {"center_coefficient": center}, model=model, max_seq_length=2048
    )
    settings = {"center_rewards_coefficient": center} if center else {}
    loss, theirs, shown = trl_reward(
        tmp_path, expected, store_of(tmp_path, given, width=2048), **settings
    )
    assert terms["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert ("centering" in terms) == bool(center)
    assert_close(gradients, theirs)
    assert terms["rewards/accuracies"] == pytest.approx(shown["accuracy"])
    assert terms["rewards/margins"] == pytest.approx(shown["margin"], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_however_a_step_is_divided(tmp_path):
    """Batch x accumulation, and many pairs in a pack or one: the same terms and gradients."""
    given = rows(8)
    found = []
    for batch, accumulation, more in DIVISIONS:
        found.append(
            one_step(
                tmp_path,
                given,
                "reward",
                {"center_coefficient": 0.2},
                model=with_score(),
                batch_size=batch,
                gradient_accumulation_steps=accumulation,
                max_seq_length=128,
                **more,
            )
        )
    for terms, gradients in found[1:]:
        assert terms == pytest.approx(found[0][0], rel=1e-5, abs=1e-6)
        assert_close(gradients, found[0][1], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"use_sequence_packing": False}, {"use_fused_kernels": False}], ids=str
)
def test_packed_is_what_separate_rows_give(changes, tmp_path):
    given = rows(COUNT)
    packed, other = (
        one_step(
            tmp_path,
            given,
            "reward",
            {},
            model=with_score(),
            max_seq_length=1024,
            batch_size=size,
            **more,
        )
        for size, more in ((1, {}), (COUNT if "use_sequence_packing" in changes else 1, changes))
    )
    assert other[0] == pytest.approx(packed[0], rel=1e-5, abs=1e-6)
    assert_close(other[1], packed[1], 1e-5)


def test_only_what_is_saved_is_trained(tmp_path):
    """The loss begins near log 2, and the head that predicts tokens, which is not saved, is
    frozen.
    """
    model = tiny.llama(tie_word_embeddings=False)
    terms, gradients = one_step(
        tmp_path, rows(COUNT), "reward", {}, model=model, max_seq_length=2048
    )
    assert terms["loss"] == pytest.approx(math.log(2), rel=0.1)
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == model.state_dict().keys() - {"lm_head.weight"}


# --- runs
# ------------------------------------------------------------------------------------------------------------


def learnable(count):
    """The chosen answer says yes, whatever else it says."""
    return rows(count, seed=3)


def train(folder, given=None, model=None, **changes):
    usual = {"objective": "reward", "max_steps": 4, "learning_rate": 1e-3, **READY}
    return runs.train(folder, given or rows(24), model, **{**usual, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_it_learns_which_answer_was_chosen(changes, tmp_path):
    result = train(
        tmp_path, learnable(80), max_steps=20, validation_split=0.2, learning_rate=3e-3, **changes
    )
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert lines[-1]["loss"] < 0.3 < 0.6 < lines[0]["loss"]
    assert set(result.evaluation.others) >= SHOWN and result.evaluation.perplexity is None
    assert result.evaluation.others["rewards/accuracies"] > 0.9
    assert result.evaluation.others["rewards/margins"] > 1


def scores(model, documents):
    with torch.no_grad():
        return torch.cat(
            [
                model.eval()(input_ids=torch.tensor(np.asarray([ids]))).logits[:, 0]
                for ids in documents
            ]
        )


def own_scores(model, documents):
    with torch.no_grad():
        given = [torch.tensor(np.asarray([ids]), device=model.device) for ids in documents]
        whole = [model.eval().get_decoder()(input_ids=ids) for ids in given]
        return (
            score_of(model).of(torch.stack([out.last_hidden_state[0, -1] for out in whole])).cpu()
        )


def trained(folder, model, **changes):
    """Our scores of some documents after a short run, and the documents."""
    train(folder, model=model, **changes)
    chosen, rejected = sides_of(store_of(folder, rows(6)))
    return own_scores(model, documents := [*chosen, *rejected]), documents


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_transformers_classifier(tied, tmp_path):
    from transformers import AutoModelForSequenceClassification

    expected, documents = trained(tmp_path, tiny.llama(tie_word_embeddings=tied))
    folder = tmp_path / "run" / "model"
    assert not any("lm_head" in name for name in runs.weights(tmp_path))
    described = json.loads((folder / "config.json").read_text())
    assert described["architectures"] == ["LlamaForSequenceClassification"]
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert (
        loaded.config.num_labels == 1
        and not report["missing_keys"]
        and not report["unexpected_keys"]
    )
    torch.testing.assert_close(scores(loaded, documents), expected, rtol=1e-5, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == loaded.config.pad_token_id == PAD
    ids, mask = padded(documents, tokenizer.pad_token_id)
    with torch.no_grad():
        found = loaded(input_ids=ids, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_native_mixture_is_saved_as_a_classifier_of_its_own(tmp_path):
    from transformers import AutoModelForSequenceClassification

    expected, documents = trained(tmp_path, mixtures.mixture(vocab_size=300))
    folder = tmp_path / "run" / "model"
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "ChronicalsMoeForSequenceClassification"
    ]
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(scores(loaded, documents), expected, rtol=1e-5, atol=1e-6)


def test_a_classifier_is_written_with_the_values_that_are_given(tmp_path):
    """As a checkpoint gives them, which was copied before the model was trained further."""
    model = with_score()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        score_of(model).weight.zero_()
    save_model(tmp_path / "run" / "model", model, {}, {}, before)
    assert equal(runs.weights(tmp_path)["score.weight"], before["score.weight"])


@pytest.mark.slow
def test_saved_adapters_are_pefts_of_a_classifier(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    tiny.llama().save_pretrained(tmp_path / "base")
    expected, documents = trained(tmp_path, load_model(tmp_path / "base", torch.float32), **LORA)
    folder = tmp_path / "run" / "model"
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["task_type"] == "SEQ_CLS" and described["modules_to_save"] == ["score"]
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    torch.testing.assert_close(
        scores(peft.PeftModel.from_pretrained(base, folder), documents),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )
    pad = AutoTokenizer.from_pretrained(folder).pad_token_id
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, pad_token_id=pad
    )
    ids, mask = padded(documents)
    with torch.no_grad():
        found = loaded.eval()(input_ids=ids, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, LORA, {"mixed_precision": "bf16"}], ids=["full", "lora", "bf16"]
)
def test_a_resumed_run_is_bit_equal(changes, tmp_path):
    changes = {**changes, "save_steps": 2}
    train(tmp_path / "whole", **changes)
    train(tmp_path / "parts", max_steps=2, **changes)
    train(tmp_path / "parts", resume=True, **changes)
    assert runs.trajectory(tmp_path / "parts") == runs.trajectory(tmp_path / "whole")
    whole = runs.weights(tmp_path / "whole")
    parts = runs.weights(tmp_path / "parts")
    assert all(equal(tensor, parts[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_adapters_of_a_language_model_go_on_with_a_score(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    train(
        tmp_path / "first",
        tiny.chat_rows(),
        load_model(tmp_path / "base", torch.float32),
        objective="sft",
        **LORA,
    )
    model = SavedModel.find(tmp_path / "first" / "run").model(torch.float32)
    train(tmp_path, model=model, use_lora=True)
    described = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert described["modules_to_save"] == ["score"]
    assert "base_model.model.score.weight" in runs.weights(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_a_reward_model_is_evaluated_and_trained_further(changes, tied, tmp_path):
    """What is loaded scores as what was trained; a run of its own goes on from there, and is
    saved as the first.
    """
    tiny.llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    given = learnable(80)[:64]
    held_out = learnable(80)[64:]
    changes = {**changes, "learning_rate": 3e-3, "eval_rows": held_out, "keep": "last"}
    result = train(
        tmp_path / "first",
        given,
        load_model(tmp_path / "base", torch.float32),
        max_steps=20,
        **changes,
    )
    saved = SavedModel.find(tmp_path / "first" / "run")
    model = OBJECTIVES["reward"].load(saved, torch.float32)
    config = runs.config(tmp_path, objective="reward")
    found = evaluate_data(model, tiny.tokenizer(), held_out, config)
    assert found.loss == pytest.approx(result.evaluation.loss, rel=1e-5)
    assert found.others == pytest.approx(result.evaluation.others, rel=1e-4)
    further = train(tmp_path, given, model, max_steps=2, **{**changes, "learning_rate": 3e-4})
    assert further.loss < result.loss < 0.3 and further.evaluation.loss < result.evaluation.loss
    assert runs.weights(tmp_path).keys() == runs.weights(tmp_path / "first").keys()


@pytest.mark.slow
def test_the_padding_token_of_a_loaded_model_is_trained(tmp_path):
    """Prompts hold it; ``verify`` finds a model that leaves it out."""
    tiny.llama().save_pretrained(tmp_path / "base")
    train(tmp_path, model=load_model(tmp_path / "base", torch.float32))
    model = OBJECTIVES["reward"].load(SavedModel.find(tmp_path / "run"), torch.float32)
    pad = model.config.get_text_config().pad_token_id
    _, gradients = one_step(
        tmp_path / "further", rows(9), "reward", {}, model=model, max_seq_length=2048
    )
    assert gradients["model.embed_tokens.weight"][pad].any()


@pytest.mark.slow
def test_the_callers_tokenizer_pads_as_before(tmp_path):
    """It tells whether data is the same when the run goes on."""
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    changes = {"objective": "reward", "save_steps": 2, **READY}
    for steps, resume in ((2, False), (4, True)):
        config = runs.config(tmp_path, **changes, max_steps=steps)
        result = ChronicalsTrainer(tiny.llama(), tokenizer, config).train(rows(24), resume=resume)
        assert tokenizer.pad_token == tokenizer.eos_token
    assert result.steps == 4
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "run" / "model").pad_token != tokenizer.eos_token
    )


@pytest.mark.slow
def test_the_command_line_verifies_a_reward_run(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    train(tmp_path, model=load_model(tmp_path / "base", torch.float32))
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows(24, seed=5)))
    given = [
        "--data",
        data,
        "--cache-dir",
        tmp_path,
        "--objective",
        "reward",
        "--batch-size",
        1,
        "--max-steps",
        50,
    ]
    given += [
        "--max-seq-length",
        512,
        "--gradient-accumulation-steps",
        1,
        "--no-use-torch-compile",
        "--steps",
        5,
    ]
    command = ["verify", "--model", str(tmp_path / "run"), *map(str, given)]
    for text in ("[PAD]", "@pad"):
        done = CliRunner().invoke(app, [*command, "--reward.pad-token", text])
        assert f"reward.pad_token={text!r}: is no token of the model" in str(done.output) + str(
            done.exception
        )
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_the_command_line_evaluates_a_reward_run(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    train(tmp_path, model=load_model(tmp_path / "base", torch.float32))
    data = tmp_path / "held-out.jsonl"
    figures = tmp_path / "figures.json"
    data.write_text("\n".join(json.dumps(row) for row in rows(12, seed=5)))

    def run(command, *more):
        return CliRunner().invoke(app, [command, str(tmp_path / "run"), *map(str, more)])

    done = run("evaluate", "--data", data, "--cache-dir", tmp_path, "--output", figures)
    assert done.exit_code == 0, done.output
    assert json.loads(figures.read_text()).keys() >= SHOWN
    told = (
        "is a reward model (a sequence classifier with one label), which scores answers and "
        "predicts no tokens"
    )
    asked = ["--data", data, "--cache-dir", tmp_path]
    for refused in (
        run("evaluate", *asked, "--objective", "dpo"),
        run("generate", "--prompt", "hello"),
        CliRunner().invoke(
            app,
            [
                "train",
                "--model",
                f"{tmp_path}/run",
                *map(str, asked),
                "--objective",
                "dpo",
                "--output-dir",
                f"{tmp_path}/dpo",
            ],
        ),
    ):
        assert refused.exit_code != 0 and told in str(refused.output) + str(refused.exception)


@pytest.mark.slow
def test_added_tokens_are_saved_without_the_head(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    tiny.llama().save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", torch.float32)
    model.resize_token_embeddings(310)
    expected, documents = trained(tmp_path, model, **LORA)
    assert not any("lm_head" in name for name in runs.weights(tmp_path))
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    base.resize_token_embeddings(310)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "model")
    torch.testing.assert_close(scores(loaded, documents), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_it_answers_nothing_and_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    train(tmp_path, report_samples=2)
    assert (
        "the report has no sample answers: objective='reward' trains no language model"
        in caplog.text
    )
    assert not (tmp_path / "run" / "samples.json").exists()


# --- refusals
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_a_reward_model_is_no_language_model(changes, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", torch.float32)
    train(tmp_path, model=model, **changes)
    saved = SavedModel.find(tmp_path / "run")
    with pytest.raises(
        ValueError,
        match="is a reward model .* here give the language model that it was trained from",
    ):
        saved.model(torch.float32)
    assert saved.embedding_rows() == 300
    with pytest.raises(ConfigurationError, match="objective='dpo': the model is a reward model"):
        train(tmp_path / "other", model=model, objective="dpo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (
            {},
            "take the folder as it is, transformers loads it by AutoModelForSequenceClassification",
        ),
        (
            LORA,
            "load it by peft's AutoPeftModelForSequenceClassification with num_labels=1, and call "
            "its merge_and_unload()",
        ),
    ],
    ids=["full", "lora"],
)
def test_a_reward_model_is_not_exported_and_nothing_is_written(changes, remedy, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    train(tmp_path, model=load_model(tmp_path / "base", torch.float32), **changes)
    run = tmp_path / "run"
    commands = [["export", str(run), "--to", to] for to in FORMATS]
    if changes:
        commands.append(["merge", str(run), "--output", str(run / "export")])
    for command in commands:
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 1 and not (run / "export").exists()
        assert str(refused.exception).startswith(f"{run / 'model'}: is ") and str(
            refused.exception
        ).endswith(remedy), command


def test_a_reward_model_in_memory_is_not_exported(tmp_path):
    with pytest.raises(
        ExportError, match="^model: is a reward model, .*; save it with save_model$"
    ):
        export(with_score(), "merged", tmp_path / "export", tokenizer=tiny.tokenizer())
    assert not (tmp_path / "export").exists()


def test_an_architecture_without_a_class_is_refused(tmp_path):
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 300,
    }
    model = CohereForCausalLM(
        CohereConfig(
            **sizes, num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=0
        )
    )
    with pytest.raises(
        ConfigurationError, match="no class for a score of CohereForCausalLM's architecture"
    ):
        train(tmp_path, model=model)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": {"center_coefficient": -1}}, "center_coefficient"),
        ({"reward": {"pad_token": "<|im_end|>"}}, "reward.pad_token='<|im_end|>': is no token"),
        ({**LORA, "lora_target_modules": ["q_proj", "lm_head"]}, "'lm_head' predicts tokens"),
        (
            {**LORA, "lora_modules_to_save": ["lm_head"]},
            "'lm_head' predicts tokens, which a reward model",
        ),
        ({**LORA, "lora_trainable_tokens": [3]}, "lora_trainable_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(changes, reason, tmp_path):
    with pytest.raises(ValueError, match=reason.replace("|", r"\|")):
        train(tmp_path, model=tiny.llama(tie_word_embeddings=False), **changes)


def test_pefts_adapters_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny.llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    with pytest.raises(ConfigurationError, match="PEFT's adapters"):
        train(tmp_path, model=model)


def test_rows_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is of kind chat; the objective takes preference"):
        train(tmp_path, tiny.chat_rows())


def test_no_answer_ends_with_the_padding_token():
    tokenizer = tiny.tokenizer()
    assert tokenizer.pad_token == tokenizer.eos_token
    assert padding_token(tokenizer, 300) == PAD == tokenizer.pad_token_id
    assert (
        padding_token(tokenizer, 300, asked="hello" if "hello" in tokenizer.get_vocab() else "h")
        == tokenizer.pad_token_id
    )
    with pytest.raises(ConfigurationError, match="set reward.pad_token"):
        padding_token(tiny.tokenizer(), PAD)


# --- verification
# ------------------------------------------------------------------------------------------------------


def checked(folder, seed, **changes):
    given = {
        "objective": "reward",
        "reward": {"center_coefficient": 0.1},
        "learning_rate": 1e-4,
        "batch_size": 1,
        **READY,
    }
    config = runs.config(folder, **{**given, "seed": seed, "use_fused_kernels": False, **changes})
    return verify(with_score(), tiny.tokenizer(), config, rows(40))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, LORA, {"mixed_precision": "bf16"}], ids=["full", "adapters", "bf16"]
)
def test_a_healthy_run_passes_verification(changes, tmp_path, seed):
    found = checked(tmp_path, seed, **changes)
    assert found.passed, found.failures
    assert "score" in {row.module for row in found.gradients}


def with_another_sign(chosen, rejected):
    return -torch.nn.functional.logsigmoid(rejected - chosen)


def without_centering(self, pairs, right=reward.RewardObjective.terms):
    return right(self, pairs) | {"centering": Term(torch.zeros(()), 0.0)}


def of_the_token_before(model, states, batch, right=reward.document_scores):
    return right(model, states.roll(1, 0), batch)


FAULTS = {
    "sign": (reward, "bradley_terry_losses", with_another_sign),
    "token before the last": (reward, "document_scores", of_the_token_before),
    "centering left out": (reward.RewardObjective, "terms", without_centering),
}


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS)
def test_a_planted_fault_fails_verification(planted, tmp_path, seed, monkeypatch):
    monkeypatch.setattr(*FAULTS[planted])
    assert not checked(tmp_path, seed).passed


def test_a_router_loss_is_not_verified(tmp_path, seed):
    config = runs.config(tmp_path, objective="reward", **READY)
    model = families.mixture("mixtral", vocab_size=300, output_router_logits=True)
    with pytest.raises(
        ConfigurationError,
        match="objective='reward': .* adds a router loss, .* output_router_logits=False",
    ):
        verify(model, tiny.tokenizer(), config, rows(40))
