"""A complete run without downloads, from text that is on every machine to a model that answers.

With preferences, the model is then trained to prefer a function's own description to that of
another function. With rewards it is trained on answers that it draws, to say short whole sentences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from chronicals.config import ChronicalsConfig
from chronicals.data.tokens.tokenizer_training import questions_and_answers, train_tokenizer
from chronicals.generation import generate_answer, load_trained
from chronicals.models import load_model, load_tokenizer
from chronicals.training.run.evaluation import Evaluation, evaluate_data
from chronicals.training.run.run_state import TrainingResult
from chronicals.training.trainer import ChronicalsTrainer

HELD_OUT = 0.05

WRITTEN = frozenset(
    {
        "train.jsonl",
        "held-out.jsonl",
        "untrained",
        "tokens",
        "model",
        "checkpoints",
        "metrics.jsonl",
        "report.html",
        "samples.json",
        "samples.jsonl",
        "train_dataset.json",
        "eval_dataset.json",
        "tensorboard",
        "trackers.json",
        "run.lock",
        "reference.json",
        "log.txt",
        "train-pairs.jsonl",
        "held-out-pairs.jsonl",
        "preference",
        "train-prompts.jsonl",
        "held-out-prompts.jsonl",
        "rewarded",
    }
)
"""Files that a quickstart writes to its folder; another quickstart deletes only these."""


@dataclass(frozen=True)
class Size:
    """Size of the model and of the run on a kind of machine."""

    width: int
    layers: int
    vocab_size: int
    epochs: int
    batch_size: int
    learning_rate: float
    mixed_precision: Literal["bf16", "fp16", "fp32"]


CPU = Size(
    width=128,
    layers=4,
    vocab_size=2048,
    epochs=4,
    batch_size=1,
    learning_rate=3e-3,
    mixed_precision="fp32",
)
CARD = Size(
    width=512,
    layers=8,
    vocab_size=4096,
    epochs=12,
    batch_size=8,
    learning_rate=1e-3,
    mixed_precision="bf16",
)


PREFERENCE_EPOCHS = 1
PREFERENCE_RATE = 0.1
"""Learning rate of preference tuning, as a fraction of the first run's."""


REWARDS = ["regex([.]$)", "length(48, 32)"]
"""Rewards of training on drawn answers: one that ends with a full stop, and soon."""

DRAWS = {"answers": 8, "prompts": 8, "max_new_tokens": 48}
REWARD_STEPS = 30
REWARD_RATE = 0.1
"""Learning rate of training on rewards, as a fraction of the first run's."""

HELD_OUT_PROMPTS = 64
"""Held-out questions that are answered, before and after."""


@dataclass(frozen=True)
class AnsweredQuestion:
    """Answers to a question before and after training, and what the documentation says."""

    question: str
    before: str
    after: str
    documented: str


@dataclass(frozen=True)
class Quickstart:
    """Result of a quickstart."""

    rows: int
    parameters: int
    before: Evaluation
    after: Evaluation
    answers: list[AnsweredQuestion]
    result: TrainingResult
    config: ChronicalsConfig


@dataclass(frozen=True)
class Preferences:
    """Result of preference tuning.

    Attributes:
        pairs: numbers of trained and of held-out pairs.
        before, after: metrics of held-out pairs. ``rewards/accuracies`` is the ratio of pairs whose
            chosen answer has the higher log-probability a token, ``rewards/margins`` the
            difference.
    """

    pairs: tuple[int, int]
    before: Evaluation
    after: Evaluation
    result: TrainingResult


def run_preferences(
    folder: Path, seed: int = 42, size: Size | None = None
) -> tuple[Quickstart, Preferences]:
    """Run a quickstart, then DPO on pairs of its answers; its model is the reference policy."""
    size = size or default_size()
    done = run_quickstart(folder, seed, size)
    files = []
    counts = []
    for name in ("train", "held-out"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        pairs = preference_rows([json.loads(line) for line in lines], seed)
        files.append(_write_rows(folder / f"{name}-pairs.jsonl", pairs))
        counts.append(len(pairs))
    usual = done.config.replace(output_dir=folder / "preference", num_epochs=PREFERENCE_EPOCHS)
    config = usual.replace(objective="dpo", learning_rate=PREFERENCE_RATE * size.learning_rate)
    by_token = usual.replace(
        objective="simpo", simpo={"beta": 1.0, "gamma": 0.0}
    )  # rewards are log-probabilities by token
    model = load_model(done.result.model_dir, torch.float32)
    tokenizer = load_tokenizer(done.result.model_dir)
    with fastest_threads():
        before = evaluate_data(model, tokenizer, files[1], by_token)
        result = ChronicalsTrainer(model, tokenizer, config).train(*files)
    after = evaluate_data(
        load_model(result.model_dir, torch.float32), tokenizer, files[1], by_token
    )
    return done, Preferences((counts[0], counts[1]), before, after, result)


@dataclass(frozen=True)
class Rewarded:
    """Result of training on rewards.

    Attributes:
        prompts: numbers of trained and of held-out prompts.
        before, after: of held-out prompts; ``reward`` is the mean reward of greedy answers.
    """

    prompts: tuple[int, int]
    before: Evaluation
    after: Evaluation
    result: TrainingResult


def run_rewards(
    folder: Path, seed: int = 42, size: Size | None = None, steps: int = REWARD_STEPS
) -> tuple[Quickstart, Rewarded]:
    """Run a quickstart, then GRPO on answers that its model draws to the same questions."""
    size = size or default_size()
    done = run_quickstart(folder, seed, size)
    files = []
    counts = []
    for name in ("train", "held-out"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        prompts = [{"prompt": row["messages"][:1]} for row in rows]
        prompts = prompts if name == "train" else prompts[:HELD_OUT_PROMPTS]
        files.append(_write_rows(folder / f"{name}-prompts.jsonl", prompts))
        counts.append(len(prompts))
    config = ChronicalsConfig(
        objective="grpo",
        sections={"grpo": DRAWS},
        rewards=REWARDS,
        learning_rate=REWARD_RATE * size.learning_rate,
        max_steps=steps,
        batch_size=4,
        max_seq_length=1024,
        mixed_precision=size.mixed_precision,
        seed=seed,
        output_dir=folder / "rewarded",
        cache_dir=folder / "tokens",
    )
    model = load_model(done.result.model_dir, torch.float32)
    tokenizer = load_tokenizer(done.result.model_dir)
    with fastest_threads():
        before = evaluate_data(model, tokenizer, files[1], config)
        result = ChronicalsTrainer(model, tokenizer, config).train(files[0])
        trained = load_model(result.model_dir, torch.float32)
        after = evaluate_data(trained, tokenizer, files[1], config)
    return done, Rewarded((counts[0], counts[1]), before, after, result)


def preference_rows(rows: list[dict], seed: int) -> list[dict]:
    """Return preference pairs: chosen is a question's own answer, rejected another question's."""
    order = np.random.default_rng(seed).permutation(len(rows))
    answers = [row["messages"][1] for row in rows]
    others = dict(zip(order, np.roll(order, 1)))
    pairs = [
        {"prompt": row["messages"][:1], "chosen": [answers[n]], "rejected": [answers[others[n]]]}
        for n, row in enumerate(rows)
    ]
    return [pair for pair in pairs if pair["chosen"] != pair["rejected"]]


def operations_in(threads: int, seconds: float = 0.3) -> int:
    """Return how many small products ``threads`` threads compute in ``seconds`` seconds.

    The products have the sizes of a layer of the quickstart's model on a CPU.
    """
    x = torch.randn(1024, CPU.width)
    weight = torch.randn(CPU.width, CPU.width)
    torch.set_num_threads(threads)
    count = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.tanh(x @ weight)
        count += 1
    return count


@contextmanager
def fastest_threads(operations: Callable[[int], int] = operations_in) -> Iterator[int]:
    """Compute with the number of threads that is fastest now; yield it.

    Threads of one operation wait for the slowest of them, so one that shares its core with another
    program makes all wait: two threads with one core to themselves compute a third of what one
    computes.
    """
    usual = torch.get_num_threads()
    counts = sorted({usual, max(usual - 1, 1), max(usual // 2, 1), 1}, reverse=True)
    try:
        fastest = max(counts, key=operations)
        torch.set_num_threads(fastest)
        yield fastest
    finally:
        torch.set_num_threads(usual)


def default_size() -> Size:
    """Return the size for this machine."""
    return CARD if torch.cuda.is_available() else CPU


def run_quickstart(folder: Path, seed: int = 42, size: Size | None = None) -> Quickstart:
    """Write data and an untrained model to ``folder``, train it there, and ask it before and after.

    The steps are those of ``chronicals train`` on files of one's own: a JSONL file, a model folder,
    a configuration.
    """
    size = size or default_size()
    rows = questions_and_answers()
    order = np.random.default_rng(seed).permutation(len(rows))
    count = round(HELD_OUT * len(rows))
    train_rows = [rows[number] for number in order[count:]]
    held_rows = [rows[number] for number in order[:count]]
    folder.mkdir(parents=True, exist_ok=True)
    data = _write_rows(folder / "train.jsonl", train_rows)
    held = _write_rows(folder / "held-out.jsonl", held_rows)
    untrained = folder / "untrained"
    parameters = _write_model(untrained, train_rows, size, seed)

    config = ChronicalsConfig(
        learning_rate=size.learning_rate,
        batch_size=size.batch_size,
        gradient_accumulation_steps=1,
        max_seq_length=1024,
        num_epochs=size.epochs,
        mixed_precision=size.mixed_precision,
        adam_beta2=0.98,
        weight_decay=0.1,
        seed=seed,
        output_dir=folder,
        cache_dir=folder / "tokens",
    )
    model = load_model(untrained, torch.float32)
    tokenizer = load_tokenizer(untrained)
    with fastest_threads():
        before = evaluate_data(model, tokenizer, held, config)
        result = ChronicalsTrainer(model, tokenizer, config).train(data, held)
    assert result.evaluation is not None
    asked = load_trained(untrained)
    trained = load_trained(result.model_dir)
    answers = []
    for row in (train_rows[len(train_rows) // 2], held_rows[0]):
        question, documented = (message["content"] for message in row["messages"])
        answers.append(
            AnsweredQuestion(
                question,
                generate_answer(asked, question, max_new_tokens=80),
                generate_answer(trained, question, max_new_tokens=80),
                documented,
            )
        )
    return Quickstart(
        len(train_rows) + len(held_rows),
        parameters,
        before,
        result.evaluation,
        answers,
        result,
        config,
    )


def _write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _write_model(folder: Path, rows: list[dict], size: Size, seed: int) -> int:
    """Write an untrained Llama and a tokenizer trained on the rows.

    It returns the number of parameters.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(
        (m["content"] for row in rows for m in row["messages"]), size.vocab_size
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=size.width,
            intermediate_size=size.width * 3,
            num_hidden_layers=size.layers,
            num_attention_heads=size.width // 64,
            num_key_value_heads=size.width // 64,
            vocab_size=len(tokenizer),
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
