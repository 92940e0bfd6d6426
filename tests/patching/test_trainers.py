"""Under the trainers people use: step by step the same losses with and without patch_model."""

import pytest
import torch

import tiny
from chronicals import patch_model
from chronicals.patching import attention

STEPS = 4


def logged(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_trl_sft(packing, tmp_path, caplog):
    """Losses, token accuracy and evaluation of a real SFT run, whose loss is TRL's own."""
    Dataset = pytest.importorskip("datasets").Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list(tiny.chat_rows(24))
    found = []
    before = attention.runs[0]
    for patched in (False, True):
        model = tiny.llama(pad_token_id=0)
        if patched:
            report = patch_model(model)
            assert report.counts()["linear_cross_entropy"] == 1 and "TRL's SFTTrainer" in str(
                report
            )
        config = SFTConfig(
            output_dir=str(tmp_path / str(patched)),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            logging_steps=1,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            max_length=64,
            packing=packing,
            gradient_checkpointing=False,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=2,
        )
        trainer = SFTTrainer(
            model,
            args=config,
            train_dataset=data,
            eval_dataset=data.select(range(8)),
            processing_class=tiny.tokenizer(),
        )
        losses = logged(trainer)
        history = trainer.state.log_history
        evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        accuracy = [
            entry["mean_token_accuracy"] for entry in history if "mean_token_accuracy" in entry
        ]
        found.append((losses, evaluated, accuracy))
    (losses, evaluated, accuracy), others = found
    assert caplog.text.count("TRL computes the loss by a fused head of its own") == 1
    assert attention.runs[0] > before
    assert (
        len(losses) == STEPS
        and losses[-1] < losses[0]
        and len(evaluated) == STEPS // 2
        and len(accuracy) >= STEPS
    )
    for plain, ours in zip((losses, evaluated, accuracy), others):
        assert ours == pytest.approx(plain, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_transformers_trainer(tmp_path):
    """With accumulation, whose loss is divided by ``num_items_in_batch``, and evaluation, which
    looks at the logits.
    """
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": (ids := torch.randint(1, 300, (12,))), "labels": ids} for _ in range(16)]
    found = []
    for patched in (False, True):
        model = tiny.llama()
        if patched:
            patch_model(model)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(patched)),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            logging_steps=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows[:4],
            compute_metrics=lambda p: {
                "shape": list(p.predictions.shape),
                "sum": float(abs(p.predictions).sum()),
            },
        )
        losses = logged(trainer)
        found.append((losses, trainer.evaluate()))
    (losses, evaluated), (others, evaluated_too) = found
    assert others == pytest.approx(losses, rel=1e-4)
    assert evaluated["eval_shape"] == evaluated_too["eval_shape"] == [4, 12, 300]
    assert evaluated_too["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)
    assert evaluated_too["eval_sum"] == pytest.approx(evaluated["eval_sum"], rel=1e-3)
