"""Whole GRPO steps by phase beside TRL's trainer, and one update on a very long answer, on a card.

    python benchmarks/grpo_rows.py OUT.json [--only 0.5b] [--arms ours] [--each 120] [--limit 560]
    python benchmarks/grpo_rows.py OUT.json --long
    python benchmarks/grpo_rows.py OUT.json --tiny      # the same at tiny sizes, also without a card

A step answers 64 prompts of 256 random tokens with 8 answers of 512 tokens each, drawn at
temperature 1; weights are random, so hardly an answer ends early. The reward counts even token ids.
Each arm runs in a process of its own; its first step compiles, and is not among the samples. What
is in OUT.json is not run again; each result is written as it comes, an error too.

TRL's trainer generates in its own process in two ways, with ``generate`` and with transformers'
continuous batching. Where its arm has no time for 512 new tokens, it makes ``--peer-tokens``, and
ours runs at that number, too. It has bf16, sdpa, Liger's layer kernels if they are installed, and
the largest micro-batch of which a trial fits, without gradient checkpointing if one fits so.
Unsloth draws with its own ``generate`` (``fast_inference=False``: without vLLM, a server's engine), and
has its own recomputation and the first of ``--peer-batches``. As in its notebooks, its process imports
it before torch, transformers and TRL.

``--long`` takes one update of an 8B in QLoRA on a recorded answer, with every memory policy on and
the allocator capped at an 80 GB card less its driver: the longest of ``LENGTHS`` that fits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from recipes_on_card import FULL, GIB, GIGA, LORA, NF4, OTHER_SIZES, TINY, forked, machine, model_of

from chronicals.benchmark.shapes import SHAPES, word_tokenizer, zipf_ids
from chronicals.config import ChronicalsConfig
from chronicals.data.packs.steps import Step
from chronicals.models import count_values, quantise_layers
from chronicals.objectives import build_objective
from chronicals.objectives.policy_gradient import DRAWN
from chronicals.planning.space import DRIVER_BYTES
from chronicals.training import Callback, ChronicalsTrainer
from chronicals.training.rollouts.answer_packs import AnswerGroup, AnswerPacks, DrawnAnswer
from chronicals.training.rollouts.rollout_maker import RolloutMaker
from chronicals.training.session import prepared

PROMPTS = 64
ANSWERS = 8
PROMPT = 256
NEW = 512
"""Prompts of a step, answers to each, and their tokens."""

STEPS = 3
"""Steps of an arm by default, of which the first compiles."""

PACK_STEP = 64
"""Packs are a multiple of so many tokens wide."""

LEARNING_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}


@dataclass(frozen=True)
class Row:
    """A model and how it is trained.

    Attributes:
        name: in tables.
        model: of ``recipes_on_card``.
        way: ``full``, ``lora`` or ``qlora``.
        packs: of a micro-batch of ours with 512 new tokens: as long documents as the rows of a
            benchmark of that size have, 17k to 35k tokens, which products no longer profit from.
    """

    name: str
    model: str
    way: str
    packs: int

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of our configuration."""
        return {"full": FULL, "lora": LORA, "qlora": NF4}[self.way]


ROWS = (
    Row("0.5b full", "0.5b", "full", 8),
    Row("8b LoRA", "8b", "lora", 4),
    Row("8b QLoRA", "8b", "qlora", 4),
)

ARMS = ("ours", "trl generate", "trl continuous batching", "unsloth")


@dataclass(frozen=True)
class Sizes:
    """Numbers of a step.

    Attributes:
        prompts, answers: prompts, and answers to each.
        prompt: tokens of a prompt.
        new: tokens of an answer.
        tiny: a tiny model.
        steps: steps of an arm.
    """

    prompts: int
    answers: int
    prompt: int
    new: int
    tiny: bool
    steps: int

    @classmethod
    def of(cls, new: int, tiny: bool, steps: int) -> Sizes:
        """Return the sizes with so many new tokens and steps."""
        if tiny:
            return cls(4, 4, 24, min(new, 16), True, steps)
        return cls(PROMPTS, ANSWERS, PROMPT, new, False, steps)

    @property
    def sequences(self) -> int:
        """Answers of a step."""
        return self.prompts * self.answers

    @property
    def width(self) -> int:
        """Tokens of a pack that holds a prompt with all its answers."""
        group = self.prompt + self.answers * (self.new + 1)
        return -(-group // PACK_STEP) * PACK_STEP

    def rows(self, vocabulary: int) -> list[dict[str, str]]:
        """Return prompts of all steps, and some more."""
        generator = np.random.default_rng(1)
        rows = []
        for _ in range(self.prompts * (self.steps + 1)):
            ids = zipf_ids(generator.random(self.prompt), vocabulary)
            rows.append({"prompt": " ".join(f"t{number}" for number in ids)})
        return rows


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the share of even token ids of each answer, its reward."""
    return [sum(number % 2 == 0 for number in ids) / max(len(ids), 1) for ids in completion_ids]


def now() -> float:
    """Return the time when the card has done all it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Phases:
    """Seconds of the phases of steps, and when to stop.

    Args:
        seconds: after which no other step begins.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.began = now()
        self.steps = list[dict[str, float]]()
        self._step_began = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._step_began = now()
        self.steps.append({})

    def end(self) -> None:
        """End the step."""
        step = self.steps[-1]
        step["whole"] = now() - self._step_began
        step["update"] = step["whole"] - step["draws"] - step["rewards"] - step["passes"]

    @property
    def is_late(self) -> bool:
        """Whether another step like the last one would end too late."""
        return now() - self.began + self.steps[-1]["whole"] > self.seconds

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds within to a phase of the step."""
        begun = now()
        yield
        step = self.steps[-1]
        step[name] = step.get(name, 0.0) + now() - begun

    def within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its seconds added to a phase."""

        def timed(*given: Any, **named: Any) -> Any:
            with self.timed(name):
                return function(*given, **named)

        return timed

    def samples(self) -> list[dict[str, float]]:
        """Return the steps after the first; that one, if it is alone."""
        whole = [step for step in self.steps if "whole" in step]
        return whole[1:] or whole


def reset_peak() -> None:
    """Measure the peak of memory from here on."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """Return most bytes that were held."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def result_of(
    row: Row,
    arm: str,
    sizes: Sizes,
    phases: Phases,
    lengths: list[int],
    metrics: list[dict],
    model: Any,
) -> dict[str, Any]:
    """Return the result of an arm as JSON values.

    Args:
        row: model and way.
        arm: of ``ARMS``.
        sizes: of a step.
        phases: seconds of the steps.
        lengths: tokens of all answers of a step, for each step.
        metrics: of each step, its first one included.
        model: the trained model.
    """
    samples = phases.samples()
    taken = {name: statistics.median(step[name] for step in samples) for name in samples[0]}
    tokens = statistics.median(lengths[-len(samples) :])
    return {
        "row": row.name,
        "arm": arm,
        "new": sizes.new,
        "steps": phases.steps,
        "seconds": taken,
        "tokens": tokens,
        "tokens_per_second": tokens / taken["whole"],
        "drawn_per_second": tokens / taken["draws"],
        "peak": peak(),
        "trained": trained_share(model),
        "metrics": metrics,
    }


def trained_share(model: Any) -> float:
    """Return the share of a model's values that are trained."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained / count_values(model)


class Enough(Exception):
    """Ends a run after its last sample."""


class Watch(Callback):
    """Collector of the metrics of a run of ours; peaks are measured from its beginning."""

    def __init__(self) -> None:
        self.metrics = list[dict[str, float]]()
        self.trainer: ChronicalsTrainer | None = None
        self.said: dict[str, Any] = {}

    def run_began(self, run: Any) -> None:
        """Note what was decided."""
        assert self.trainer is not None and self.trainer._session is not None
        session = self.trainer._session
        config = session.config
        names = ("batch_size", "gradient_accumulation_steps", "max_seq_length", "memory")
        self.said = {name: getattr(config, name) for name in names}
        self.said["decisions"] = {
            name: one.how for name, one in session.decisions.items() if one.runs
        }
        if session.planned is not None:
            self.said["planned"] = session.planned.held
        reset_peak()

    def step_done(self, metrics: Any) -> None:
        """Note the metrics of a step."""
        self.metrics.append(metrics.to_dict())


def config_of(row: Row, sizes: Sizes, folder: Path, packs: int | None) -> ChronicalsConfig:
    """Return our configuration of a row."""
    fit = row.packs * (NEW + 1) // (sizes.new + 1)
    size = packs or min(fit, sizes.prompts)
    return ChronicalsConfig(
        **{
            **row.fields,
            "learning_rate": LEARNING_RATES[row.way],
            "objective": "grpo",
            "grpo": {
                "answers": sizes.answers,
                "prompts": sizes.prompts,
                "max_new_tokens": sizes.new,
            },
            "rewards": [even],
            "batch_size": size,
            "max_seq_length": sizes.width,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "save_steps": None,
            "trackers": [],
            "report_samples": 0,
            "max_steps": sizes.steps + 1,
            "cache_dir": folder / "tokens",
            "output_dir": folder / "run",
        }
    )


def ours(row: Row, sizes: Sizes, seconds: float, packs: int | None) -> dict[str, Any]:
    """Run steps of ours."""
    folder = Path(tempfile.mkdtemp())
    phases = Phases(seconds)
    lengths = list[int]()
    own = RolloutMaker.rollout

    def rollout(maker: RolloutMaker, *given: Any) -> Any:
        if phases.steps:
            phases.end()
            if len(phases.steps) == sizes.steps or phases.is_late:
                raise Enough
        phases.begin()
        made = own(maker, *given)
        lengths.append(len(made.tokens))
        for name in ("draws", "rewards", "passes"):
            phases.steps[-1][name] = made.shown[f"seconds/{name}"]
        return made

    try:
        config = config_of(row, sizes, folder, packs)
        model = model_of(row.model, sizes.prompt + sizes.new, sizes.tiny)
        if row.way == "qlora":
            quantise_layers(model)
        vocabulary = model.config.vocab_size
        watch = Watch()
        trainer = ChronicalsTrainer(model, word_tokenizer(vocabulary), config, callbacks=[watch])
        watch.trainer = trainer
        RolloutMaker.rollout = rollout  # type: ignore[method-assign]
        with contextlib.suppress(Enough):
            trainer.train(sizes.rows(vocabulary))
        found = result_of(row, "ours", sizes, phases, lengths, watch.metrics, model)
        gaps = [line["gap"] for line in watch.metrics if "gap" in line]
        if gaps:  # they come a step later: none, where there was time for one step only
            found["gap"] = statistics.fmean(gaps)
        return {**found, "said": watch.said}
    finally:
        RolloutMaker.rollout = own  # type: ignore[method-assign]
        shutil.rmtree(folder, ignore_errors=True)


# --- TRL

PEER_BATCHES = (64, 32, 16, 8, 4, 2, 1)
"""Answers of a micro-batch that are tried, without gradient checkpointing and then with it."""


def peer_model(row: Row, sizes: Sizes, folder: Path) -> Any:
    """Return the model of a row as a peer has it."""
    model = model_of(row.model, sizes.prompt + sizes.new, sizes.tiny)
    if row.way == "full":
        return model
    if row.way == "qlora":
        from chronicals.models import load_by_bitsandbytes

        saved = folder / "weights"
        model.save_pretrained(saved)
        device = model.device
        del model
        model = load_by_bitsandbytes(
            transformers.AutoModelForCausalLM, saved, torch.bfloat16, device
        )
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )


UNSLOTH_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Linear layers of a decoder layer, which are all that the other arms adapt."""


def unsloth_model(row: Row, sizes: Sizes, folder: Path) -> Any:
    """Return the model of a row as Unsloth loads it, with its own recomputation."""
    from unsloth import FastLanguageModel

    saved = folder / "weights"
    own = model_of(row.model, sizes.prompt + sizes.new, sizes.tiny)
    own.save_pretrained(saved)
    word_tokenizer(own.config.vocab_size).save_pretrained(saved)
    del own
    model, _ = FastLanguageModel.from_pretrained(
        str(saved),
        max_seq_length=sizes.prompt + sizes.new,
        dtype=torch.bfloat16,
        load_in_4bit=row.way == "qlora",
        full_finetuning=row.way == "full",
        fast_inference=False,
    )
    if row.way == "full":
        return model
    return FastLanguageModel.get_peft_model(
        model,
        r=32,
        lora_alpha=32,
        target_modules=UNSLOTH_TARGETS,
        use_gradient_checkpointing="unsloth",
    )


def peer_trainer(
    row: Row, sizes: Sizes, arm: str, folder: Path, batch: int, recompute: bool
) -> Any:
    """Return TRL's trainer with a micro-batch of so many answers; Unsloth's is a class of it."""
    make = unsloth_model if arm == "unsloth" else peer_model
    model = make(row, sizes, folder)
    # after Unsloth's import, which replaces the trainer
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    vocabulary = model.config.vocab_size
    on_card = torch.cuda.is_available()
    with_liger = on_card and find_spec("liger_kernel") is not None and arm != "unsloth"
    args = GRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=sizes.sequences // batch,
        num_generations=sizes.answers,
        max_completion_length=sizes.new,
        temperature=1.0,
        use_transformers_continuous_batching=arm == "trl continuous batching",
        use_liger_kernel=with_liger,
        learning_rate=LEARNING_RATES[row.way],
        lr_scheduler_type="constant",
        max_steps=sizes.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=on_card,
        use_cpu=not on_card,
        optim="adamw_torch_fused" if on_card else "adamw_torch",
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=even,
        args=args,
        train_dataset=Dataset.from_list(sizes.rows(vocabulary)),
        processing_class=word_tokenizer(vocabulary),
    )


def tried(trainer: Any, sizes: Sizes, batch: int) -> None:
    """Compute the loss and the gradients of a made-up micro-batch, and forget them.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    device = trainer.accelerator.device
    ids = torch.full((batch, sizes.prompt + sizes.new), 7, device=device)
    mask = torch.ones_like(ids)
    trainer.current_gradient_accumulation_steps = sizes.sequences // batch
    trainer.model.train()
    with trainer.compute_loss_context_manager():
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": ids[:, : sizes.prompt],
                "prompt_mask": mask[:, : sizes.prompt],
                "completion_ids": ids[:, sizes.prompt :],
                "completion_mask": mask[:, sizes.prompt :],
                "advantages": torch.ones(batch, device=device),
                "num_items_in_batch": mask[:, sizes.prompt :].sum() * sizes.sequences // batch,
            },
        )
    loss.backward()
    trainer.model.zero_grad(set_to_none=True)
    for values in trainer._metrics["train"].values():
        values.clear()


def largest_that_fits(
    row: Row, sizes: Sizes, arm: str, folder: Path, batches: Sequence[int]
) -> tuple[Any, dict]:
    """Return TRL's trainer with the largest micro-batch that fits, and what that is.

    Unsloth's has its own recomputation, and the first size.
    """
    if arm == "unsloth":
        (batch, *_) = batches
        return peer_trainer(row, sizes, arm, folder, batch, True), {"batch": batch}
    for recompute in (False, True):
        for batch in batches:
            if batch > sizes.sequences:
                continue
            trainer = peer_trainer(row, sizes, arm, folder, batch, recompute)
            fits = True
            try:
                tried(trainer, sizes, batch)
            except torch.OutOfMemoryError:
                fits = False
            if fits:
                return trainer, {"batch": batch, "gradient_checkpointing": recompute}
            del trainer
            gc.collect()
            torch.cuda.empty_cache()
    raise RuntimeError("no micro-batch fits")


def completions_of(out: tuple[Any, ...]) -> list[list[int]]:
    """Return the answers' tokens of what TRL's ``_generate_single_turn`` returns.

    In newer versions it is ``(completions, log_probabilities)``, in older ones
    ``(prompts, completions, log_probabilities, more)``.
    """
    completions: list[list[int]] = out[0] if len(out) == 2 else out[1]
    return completions


def trl(row: Row, sizes: Sizes, seconds: float, arm: str, batches: Sequence[int]) -> dict[str, Any]:
    """Run steps of TRL's trainer."""
    folder = Path(tempfile.mkdtemp())
    phases = Phases(seconds)
    lengths = list[int]()

    class Marks(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            phases.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            step = phases.steps[-1]
            step["passes"] = step.pop("scored") - step["draws"] - step["rewards"]
            phases.end()
            control.should_training_stop = phases.is_late or state.global_step == sizes.steps

    try:
        trainer, said = largest_that_fits(row, sizes, arm, folder, batches)
        own = trainer._generate_single_turn

        def drawn(*given: Any, **named: Any) -> Any:
            with phases.timed("draws"):
                out = own(*given, **named)
            lengths.append(sum(map(len, completions_of(out))))
            return out

        trainer._generate_single_turn = drawn
        trainer._calculate_rewards = phases.within("rewards", trainer._calculate_rewards)
        trainer._generate_and_score_completions = phases.within(
            "scored", trainer._generate_and_score_completions
        )
        trainer.add_callback(Marks())
        reset_peak()
        trainer.train()
        lines = [line for line in trainer.state.log_history if "grad_norm" in line]
        found = result_of(row, arm, sizes, phases, lengths, lines, trainer.model)
        return {**found, "said": {**said, "liger": trainer.args.use_liger_kernel}}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(
    row: Row, arm: str, new: int, seconds: float, given: argparse.Namespace
) -> dict[str, Any]:
    """Run steps of an arm, and return their seconds by phase."""
    sizes = Sizes.of(new, given.tiny, given.steps)
    if arm == "ours":
        return ours(row, sizes, seconds, given.packs)
    if arm == "unsloth":
        return unsloth(row, sizes, seconds, given)
    return trl(row, sizes, seconds, arm, given.peer_batches)


UNSLOTH_FIRST = """
import sys

import unsloth

sys.path.insert(0, sys.argv[1])
import grpo_rows

grpo_rows.work_of_unsloth(sys.argv[2])
"""
"""Program of Unsloth's process: what is imported before it is not all replaced."""

WRITING = 5.0
"""Seconds before the limit of an arm in which its process has ended and its result is read."""


def unsloth(row: Row, sizes: Sizes, seconds: float, given: argparse.Namespace) -> dict[str, Any]:
    """Run steps of Unsloth's trainer in a process that has imported it first.

    Raises:
        RuntimeError: the process failed; the message has its last words.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = {"row": row.name, "sizes": asdict(sizes), "seconds": seconds}
        (folder / "work.json").write_text(json.dumps({**work, "batches": given.peer_batches}))
        program = [sys.executable, "-c", UNSLOTH_FIRST, str(Path(__file__).parent), name]
        ended = subprocess.run(
            program, capture_output=True, text=True, timeout=given.each - WRITING
        )
        if ended.returncode:
            raise RuntimeError(ended.stderr.strip()[-2000:])
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found


def work_of_unsloth(name: str) -> None:
    """Run the steps that a folder's ``work.json`` asks for, and write ``result.json`` there."""
    folder = Path(name)
    work = json.loads((folder / "work.json").read_text())
    row = next(row for row in ROWS if row.name == work["row"])
    found = trl(row, Sizes(**work["sizes"]), work["seconds"], "unsloth", work["batches"])
    (folder / "result.json").write_text(json.dumps(found, default=str))


# --- one update on a very long answer

LENGTHS = (110_000, 96_000, 80_000, 64_000, 48_000, 32_000)
"""Tokens of the answer that are tried, the longest first: 110k is what Unsloth publishes for an 8B
in QLoRA on 80 GB."""

LONG_CARD = 80
"""GB of the card that the allocator is capped at."""

LONG_MODEL = "qwen3-8b"

EVERY_POLICY = {
    "memory": ["recompute_layers", "offload_activations", "tiled_mlp"],
    "logits_chunk_size": 512,
    "use_8bit_optimizer": True,
}
"""Fields that save memory where adapters are trained, all together. 512 rows of logits are 0.15 GiB
in bf16 at 152k tokens."""

WITHOUT_A_CARD = {**EVERY_POLICY, "memory": ["recompute_layers", "tiled_mlp"]}
"""The same where activations are in host memory anyway."""


def long_model(length: int, tiny: bool) -> Any:
    """Return an 8B in NF4 with so many positions, and random weights."""
    OTHER_SIZES[LONG_MODEL] = LONG_MODEL, TINY if tiny else {}
    assert LONG_MODEL in SHAPES
    model = model_of(LONG_MODEL, length, tiny)
    quantise_layers(model)
    return model


def long_step(config: ChronicalsConfig, length: int, vocabulary: int) -> Step:
    """Return a step of one recorded answer of so many tokens."""
    generator = np.random.default_rng(1)
    prompt = np.array(zipf_ids(generator.random(PROMPT // 4), vocabulary), np.int32)
    tokens = np.array(zipf_ids(generator.random(length), vocabulary), np.int32)
    drawn = np.full(length, -np.log(vocabulary), np.float32)
    answer = DrawnAnswer(0, tokens, True, 1.0, 0.7, {DRAWN: drawn})
    packs = AnswerPacks(config, pin=torch.cuda.is_available())
    batches, counts = packs.batches([AnswerGroup(prompt, [answer])], age=0)
    return Step(batches, counts, None, None)


def updated(length: int, tiny: bool, most: float) -> dict[str, Any]:
    """Take an update on an answer of so many tokens under the cap, and a second one for its time.

    Args:
        length: of the answer.
        tiny: a tiny model, and a hundredth of the length.
        most: seconds after which the second one would end too late.
    """
    began = now()
    folder = Path(tempfile.mkdtemp())
    length = length // 100 if tiny else length
    on_card = torch.cuda.is_available()
    width = -(-(length + PROMPT) // PACK_STEP) * PACK_STEP
    config = ChronicalsConfig(
        **{
            **NF4,
            **(EVERY_POLICY if on_card else WITHOUT_A_CARD),
            "learning_rate": LEARNING_RATES["qlora"],
            "objective": "grpo",
            "grpo": {"max_new_tokens": length},
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
            "max_seq_length": width,
            "max_steps": 2,
            "warmup_steps": 0,
            "gpu_memory": LONG_CARD,
            "output_dir": folder / "run",
            "cache_dir": folder / "tokens",
        }
    )
    model = long_model(width, tiny)
    if on_card:
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory
        share = (LONG_CARD * GIGA - DRIVER_BYTES) / whole
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    objective = build_objective(config)
    step = long_step(config, length, model.config.vocab_size)
    tokenizer = word_tokenizer(model.config.vocab_size)
    seconds, norms, losses = [], [], []
    try:
        with prepared(model, config, objective, tokenizer=tokenizer) as session:
            decisions = {name: one.how for name, one in session.decisions.items() if one.runs}
            planned = 0 if session.planned is None else session.planned.held
            with session.stepping():
                model.train()
                reset_peak()
                for _ in range(2):
                    begun = now()
                    scalars = session.train_once(step)
                    seconds.append(now() - begun)
                    norms.append(float(scalars["grad_norm"]))
                    losses.append(float(scalars["loss"]))
                    if now() - began + seconds[-1] > most:
                        break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "length": length,
        "cap": LONG_CARD * GIGA - DRIVER_BYTES,
        "peak": peak(),
        "reserved": torch.cuda.max_memory_reserved() if on_card else 0,
        "planned": planned,
        "decisions": decisions,
        "update_seconds": seconds,
        "grad_norms": norms,
        "losses": losses,
    }


# --- the rows


def long_jobs(given: argparse.Namespace, results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and function of each length, until one fits."""
    for length in LENGTHS:
        key = f"long, {length}"
        yield key, partial(updated, length, given.tiny, 0.8 * given.each)
        if "error" not in results.get(key, {"error": ""}):
            return


def jobs(given: argparse.Namespace, seconds: float) -> Iterator[tuple[str, Any]]:
    """Yield name and function of each arm that was asked for."""
    for row in ROWS:
        if given.only and not any(part in row.name for part in given.only):
            continue
        for arm in ARMS:
            if not any(part in arm for part in given.arms):
                continue
            counts = (NEW, given.peer_tokens) if arm == "ours" else (given.peer_tokens,)
            for new in dict.fromkeys(counts):
                run = partial(measured, row, arm, new, seconds, given)
                yield f"{row.name}, {arm}, {new}", run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="parts of the names of arms")
    parser.add_argument("--peer-tokens", type=int, default=64, help="new tokens of TRL's answers")
    parser.add_argument(
        "--peer-batches", type=int, nargs="*", default=PEER_BATCHES, help="that TRL's arms try"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of an arm")
    parser.add_argument("--packs", type=int, default=None, help="of a micro-batch of ours")
    parser.add_argument("--each", type=float, default=150, help="seconds of a process")
    parser.add_argument("--limit", type=float, default=560, help="seconds of all")
    parser.add_argument("--long", action="store_true", help="one update on a very long answer")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    begun = time.perf_counter()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    results["machine"] = forked(machine, 60)
    # Samples end early enough for the model to be let go, and the result to be written.
    wanted = long_jobs(given, results) if given.long else jobs(given, 0.8 * given.each)
    for key, run in wanted:
        left = given.limit - (time.perf_counter() - begun)
        if "error" not in results.get(key, {"error": ""}):
            continue
        if left < 20:
            print(f"{key}: not reached", flush=True)
            continue
        results[key] = forked(run, min(given.each, left))
        given.out.write_text(json.dumps(results))
        print(line_of(key, results[key]), flush=True)


def line_of(key: str, result: dict[str, Any]) -> str:
    """Return a line on a result for the terminal."""
    if "error" in result:
        return f"{key}: {result['error'][:300]}"
    held = f"{result['peak'] / GIB:.1f} GiB"
    if "update_seconds" in result:
        return (
            f"{key}: {held} of {result['cap'] / GIB:.1f}, planned {result['planned'] / GIB:.1f}, "
            f"{result['update_seconds'][-1]:.1f} s, gradient norm {result['grad_norms'][-1]:.3g}"
        )
    seconds = ", ".join(f"{name} {taken:.2f} s" for name, taken in result["seconds"].items())
    gap = f", mean gap {result['gap']:.2g}" if "gap" in result else ""
    last = result["metrics"][-1] if result["metrics"] else {}
    norm, loss = (float(last.get(name, "nan")) for name in ("grad_norm", "loss"))
    return (
        f"{key}: {result['tokens_per_second']:,.0f} tokens/s ({result['drawn_per_second']:,.0f} "
        f"drawn), {seconds}, {held}, {result['tokens']:,.0f} tokens of answers a step, trained "
        f"{result['trained']:.2%}, loss {loss:.3g}, gradient norm {norm:.3g}{gap}"
    )


if __name__ == "__main__":
    main()
