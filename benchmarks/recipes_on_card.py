"""Runs short recipes on a card, for the comparison with their plans (``planned_recipes.py``).

    python benchmarks/recipes_on_card.py OUT.json [--only NAME ...] [--seconds 20] [--limit 560]
    python benchmarks/recipes_on_card.py OUT.json --presets
    python benchmarks/recipes_on_card.py OUT.json --recovery
    python benchmarks/recipes_on_card.py OUT.json --rates RATES.json
    python benchmarks/recipes_on_card.py OUT.json --tiny      # the same at tiny sizes, also without a card

A recipe is a built-in shape with random weights, fields of a configuration, and random documents.
Each runs in a process of its own, forked from one that has imported everything, so that no memory of
another is in its peak. What is in OUT.json is not run again; each result is written as it comes.

``--presets`` trains presets of a way and a card with the allocator capped at what the card has beside
its driver: three steps or more, with the tokens a second of the last ones, where the seconds went, and
what was planned, taken and said. Of one that runs out of memory the allocator's words are kept, too.
``--recovery`` lowers the cap in the middle of a forward pass, of the loss and of a backward pass, and
compares the losses with those of a run that never met it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

import chronicals.benchmark.card_rates
import chronicals.kernels.triton_kernels  # imported once, before all recipes fork
from chronicals.benchmark.shapes import (
    SHAPES,
    byte_tokenizer,
    random_documents,
    word_tokenizer,
    zipf_ids,
)
from chronicals.benchmark.work import MODES
from chronicals.config import ChronicalsConfig, preset
from chronicals.config.presets import CARDS
from chronicals.models import load_model, quantise_layers
from chronicals.planning.space import DRIVER_BYTES
from chronicals.training import Callback, ChronicalsTrainer, Interrupted, TrainingError

GIB = 2**30
GIGA = 10**9
WARM_UP = 4
FEWEST_STEPS = 7
MOST_STEPS = 12
"""Steps of a recipe, in which graphs are captured, and fewest and most of all."""

PRESET_STEPS = 3
PRESET_WARM_UP = 2
"""Steps of a preset from which on it is stopped, and those in which graphs are captured."""

AN_EPOCH = 34
"""Steps of the documents of a preset: with fewer, its batch would shrink so that an epoch has more."""

PACKS = 16
FEWER_PACKS = 8
"""Packs of a step of a preset, and of one of 8B and more, whose steps are long. So many documents are
there: then an epoch has few enough steps for that batch, in as many micro-batches as it needs."""

SPARE = 6
"""Steps beyond those measured, so that a run is stopped before its end, at which it would save."""

LORA = MODES["lora"]
FULL = {"use_lora": False, **MODES["full"]}
NF4 = MODES["qlora"]
HALF_STATES = {"optimizer_state_dtype": "bf16"}

OTHER_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.5b": (
        "qwen2.5-0.5b",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
    "3b": (
        "qwen2.5-0.5b",
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
    ),
    "14b": (
        "llama-3.1-8b",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
        },
    ),
    "32b": (
        "llama-3.1-8b",
        {
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
        },
    ),
}
"""Sizes that no built-in shape has, and the shape whose other fields they take: Qwen2.5's."""

BUILT_IN = {
    "0.5b": "qwen2.5-0.5b",
    "8b": "llama-3.1-8b",
    "olmoe": "olmoe-1b-7b",
    "30b-a3b": "qwen3-30b-a3b",
}

SMALL = ("0.5b", "1.5b", "3b")
"""Models of presets whose steps are short."""

TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "head_dim": 32,
}
"""Fields that make any shape tiny."""

TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Recipe:
    """A run that is short enough for a minute of a card.

    Attributes:
        name: in tables.
        model: key of ``BUILT_IN`` or ``OTHER_SIZES``.
        fields: of the configuration.
        batch: packs of a micro-batch.
        length: tokens of a pack.
        kind: of the rows: ``documents``, ``pairs`` or ``labelled`` answers.
        ragged: True for documents of lognormal lengths.
        teacher: key of the teacher's shape, for distillation.
        gguf: format of the file that the model is trained from, in which it is written first.
        card: GB of the card of a preset; the allocator may hold no more than that beside a driver.
        steps: most steps.
        packs: of an optimizer step of a preset.
    """

    name: str
    model: str
    fields: dict[str, Any]
    batch: int = 8
    length: int = 2048
    kind: str = "documents"
    ragged: bool = False
    teacher: str = ""
    gguf: str = ""
    card: int = 0
    steps: int = MOST_STEPS
    packs: int = PACKS


def recipes() -> list[Recipe]:
    """Return the recipes of the table, those that share kernels after each other."""
    memory = "memory"
    return [
        Recipe("0.5b full", "0.5b", FULL),
        Recipe("0.5b full, 2k tokens", "0.5b", FULL, batch=1),
        Recipe("0.5b full, ragged", "0.5b", FULL, ragged=True),
        Recipe("0.5b full, 64k tokens", "0.5b", FULL, batch=2, length=32768),
        Recipe("0.5b full, 8-bit states", "0.5b", {**FULL, "use_8bit_optimizer": True}),
        Recipe("0.5b full, fp32", "0.5b", {**FULL, "mixed_precision": "fp32"}, batch=2),
        Recipe("0.5b full, 4 micro-batches", "0.5b", {**FULL, "gradient_accumulation_steps": 4}),
        Recipe(
            "0.5b full, updates in the backward pass",
            "0.5b",
            {**FULL, memory: ["optimizer_in_backward"], "max_grad_norm": None},
        ),
        Recipe(
            "0.5b full, states offloaded", "0.5b", {**FULL, memory: ["offload_optimizer_states"]}
        ),
        Recipe("0.5b full, layers recomputed", "0.5b", {**FULL, memory: ["recompute_layers"]}),
        Recipe(
            "0.5b full, elementwise recomputed", "0.5b", {**FULL, memory: ["recompute_elementwise"]}
        ),
        Recipe(
            "0.5b full, activations offloaded", "0.5b", {**FULL, memory: ["offload_activations"]}
        ),
        Recipe(
            "0.5b full, tiles, 32k tokens",
            "0.5b",
            {**FULL, memory: ["recompute_layers", "tiled_mlp"]},
            batch=1,
            length=32768,
        ),
        Recipe("0.5b LoRA", "0.5b", LORA),
        Recipe(
            "0.5b LoRA, activations offloaded", "0.5b", {**LORA, memory: ["offload_activations"]}
        ),
        Recipe("0.5b DoRA", "0.5b", {**LORA, "use_dora": True}),
        Recipe("0.5b LoRA over GGUF Q8_0", "0.5b", LORA, gguf="gguf-q8_0"),
        Recipe("0.5b DPO", "0.5b", {**FULL, "objective": "dpo"}, 4, 4096, "pairs"),
        Recipe("0.5b LoRA, DPO", "0.5b", {**LORA, "objective": "dpo"}, 4, 4096, "pairs"),
        Recipe("0.5b LoRA, KTO", "0.5b", {**LORA, "objective": "kto"}, 4, 4096, "labelled"),
        Recipe("0.5b reward", "0.5b", {**FULL, "objective": "reward"}, 4, 4096, "pairs"),
        Recipe("0.5b from a teacher of 3b", "0.5b", {**FULL, "objective": "distill"}, teacher="3b"),
        Recipe("1.5b full", "1.5b", FULL),
        Recipe("1.5b NF4", "1.5b", NF4),
        Recipe("1.5b NF4, DPO", "1.5b", {**NF4, "objective": "dpo"}, 4, 4096, "pairs"),
        Recipe("8b full", "8b", {**FULL, **HALF_STATES}, batch=4),
        Recipe("8b full, FP8", "8b", {**FULL, **HALF_STATES, "use_fp8": True}, batch=4),
        Recipe("8b full, 8-bit states", "8b", {**FULL, "use_8bit_optimizer": True}, batch=4),
        Recipe("8b LoRA", "8b", LORA, batch=4),
        Recipe("8b LoRA, FP8", "8b", {**LORA, "use_fp8": True}, batch=4),
        Recipe("8b LoRA, 32k tokens", "8b", LORA, batch=1, length=32768),
        Recipe("8b DoRA", "8b", {**LORA, "use_dora": True}, batch=4),
        Recipe("8b NF4", "8b", NF4, batch=4),
        Recipe(
            "8b NF4, leanest",
            "8b",
            {
                **NF4,
                **HALF_STATES,
                memory: ["recompute_layers", "offload_activations"],
                "logits_chunk_size": 512,
            },
            batch=4,
        ),
        Recipe("OLMoE full", "olmoe", {**FULL, **HALF_STATES}, batch=4),
        Recipe("OLMoE LoRA", "olmoe", LORA, batch=4),
        Recipe("30B-A3B, 8 layers, LoRA", "30b-a3b", LORA),
        Recipe("30B-A3B, 8 layers, NF4", "30b-a3b", NF4),
    ]


def presets() -> list[Recipe]:
    """Return a dozen presets, spread over sizes, ways and cards."""
    chosen = (
        ("0.5b", "lora", 8),
        ("0.5b", "full", 16),
        ("1.5b", "qlora", 8),
        ("1.5b", "lora", 12),
        ("1.5b", "full", 24),
        ("3b", "qlora", 12),
        ("3b", "full", 48),
        ("8b", "qlora", 12),
        ("8b", "lora", 24),
        ("3b", "full", 80),
        ("14b", "qlora", 16),
        ("14b", "lora", 48),
        ("8b", "qlora", 16),
        ("32b", "qlora", 48),
    )
    made = []
    for model, way, card in chosen:
        made.append(
            Recipe(
                f"{model} {way}, {card} GB",
                model,
                {"preset": f"{way}-{card}gb"},
                batch=0,
                length=0,
                ragged=True,
                card=card,
                steps=PRESET_STEPS,
                packs=PACKS if model in SMALL else FEWER_PACKS,
            )
        )
    dpo = {"preset": "qlora-24gb", "objective": "dpo"}
    made.append(
        Recipe(
            "8b qlora, DPO, 24 GB",
            "8b",
            dpo,
            batch=0,
            length=0,
            kind="pairs",
            card=24,
            steps=PRESET_STEPS,
            packs=FEWER_PACKS,
        )
    )
    return made


def shape_of(key: str, length: int, tiny: bool) -> tuple[str, dict[str, Any]]:
    """Return the configuration's class and the sizes of a model with that many positions."""
    base, sizes = OTHER_SIZES.get(key, (BUILT_IN.get(key, ""), {}))
    built_in = SHAPES[base]
    sizes = {**built_in.sizes, **sizes}
    if tiny:
        sizes = {**sizes, **TINY}
        if "num_experts" in sizes:
            sizes = {**sizes, **TINY_EXPERTS}
    positions = max(sizes["max_position_embeddings"], length)
    return built_in.config_class, {**sizes, "max_position_embeddings": positions}


def model_of(key: str, length: int, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model with random weights on the card, or on the CPU without one."""
    name, sizes = shape_of(key, length, tiny)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, name)(**sizes), dtype=dtype
        )
    model.config.use_cache = False
    return model


def from_gguf(recipe: Recipe, folder: Path, tiny: bool) -> Any:
    """Return the model of a GGUF file, which is written here from random weights."""
    from chronicals.export import export

    tokenizer = byte_tokenizer()
    # as GPT-2 splits texts, which GGUF files have a name for
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made = export(
        model_of(recipe.model, recipe.length, tiny),
        recipe.gguf,
        folder / "gguf",
        tokenizer=tokenizer,
    )
    model = load_model(made[0].path, torch.bfloat16)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def rows_of(recipe: Recipe, config: ChronicalsConfig, vocabulary: int, steps: int) -> list[dict]:
    """Return random rows for the steps of a recipe.

    Pairs and answers have all one length, so that the graphs of the first steps are replayed in the
    few others.
    """
    width = config.max_seq_length
    packs = config.batch_size * config.gradient_accumulation_steps
    if recipe.card:
        packs = recipe.packs
    tokens = packs * width * steps
    if recipe.kind == "documents":
        kind = "ragged" if recipe.ragged else "fixed"
        return [{"input_ids": ids} for ids in random_documents(kind, tokens, width, vocabulary)]
    generator = np.random.default_rng(1)
    prompt, answer = width // 10, width // 14

    def words(count: int) -> str:
        return " ".join(f"t{id}" for id in zipf_ids(generator.random(count), vocabulary))

    count = tokens // (prompt + 2 * answer)
    if recipe.kind == "pairs":
        return [
            {"prompt": words(prompt), "chosen": words(answer), "rejected": words(answer)}
            for _ in range(count)
        ]
    return [
        {"prompt": words(prompt), "completion": words(answer), "label": number % 2 == 0}
        for number in range(count)
    ]


def mean_length(rows: list[dict]) -> float:
    """Return the tokens of the document that a token is in, in the mean over all tokens.

    A text of ``word_tokenizer`` has a token a word.
    """
    lengths = []
    for row in rows:
        if "input_ids" in row:
            lengths.append(len(row["input_ids"]))
            continue
        answers = [row[name] for name in ("chosen", "rejected", "completion") if name in row]
        lengths += [len(f"{row['prompt']} {answer}".split()) for answer in answers]
    return sum(length**2 for length in lengths) / sum(lengths)


class Watch(Callback):
    """Collector of a run's steps, which ends it after so many steps or seconds.

    Args:
        steps: to be trained.
        seconds: after the first step from which on the fewest steps are enough.
    """

    def __init__(self, steps: int, seconds: float):
        self.steps = list[Any]()
        self.most = steps
        self.seconds = seconds
        self.trainer: ChronicalsTrainer | None = None
        self.begun = time.perf_counter()
        self.at: dict[str, float] = {}
        self.planned: dict[str, Any] = {}
        self.taken: dict[str, Any] = {}

    def run_began(self, run: Any) -> None:
        """Note what was decided, and measure peaks from here on."""
        self.at["prepared"] = time.perf_counter()
        assert self.trainer is not None and self.trainer._session is not None
        session = self.trainer._session
        if session.planned is not None:
            self.planned = {
                "held": session.planned.held,
                "moment": session.planned.name,
                "parts": dict(session.planned.parts),
            }
        self.decisions = {
            name: {"runs": one.runs, "how": one.how, "layers": one.layers}
            for name, one in session.decisions.items()
        }
        self.backend = session.facts.backend
        self.taken = {
            name: getattr(session.config, name)
            for name in ("batch_size", "gradient_accumulation_steps", "max_seq_length", "memory")
        }
        self.taken["logits_chunk_size"] = session.config.logits_chunk_size
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def step_done(self, metrics: Any) -> None:
        """Keep the metrics, and stop the run when enough was seen."""
        self.steps.append(metrics)
        self.at[f"step {len(self.steps)}"] = time.perf_counter()
        if len(self.steps) == 1:
            self.begun = time.perf_counter()  # kernels are compiled
        late = time.perf_counter() - self.begun > self.seconds
        if len(self.steps) >= self.most or (late and len(self.steps) >= FEWEST_STEPS):
            assert self.trainer is not None
            self.trainer.stop(save=False)


def measured(recipe: Recipe, seconds: float, tiny: bool) -> dict[str, Any]:
    """Run a recipe, and return what it took."""
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    records = _Records()
    try:
        config, length = config_of(recipe, folder, tiny)
        if recipe.teacher:
            teacher = folder / "teacher"
            model_of(recipe.teacher, length, tiny).save_pretrained(teacher)
            byte_tokenizer().save_pretrained(teacher)
            torch.cuda.empty_cache()
        watch = Watch(recipe.steps, seconds)
        watch.at["started"] = began
        model = made_model(recipe, config, folder, length, tiny)
        watch.at["model"] = time.perf_counter()
        if recipe.card and torch.cuda.is_available():
            torch.cuda.empty_cache()
            whole = torch.cuda.get_device_properties(0).total_memory
            share = (recipe.card * GIGA - DRIVER_BYTES) / whole
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
        vocabulary = model.config.get_text_config().vocab_size
        tokenizer = byte_tokenizer() if recipe.kind == "documents" else word_tokenizer(vocabulary)
        steps = AN_EPOCH if recipe.card else recipe.steps + SPARE
        rows = rows_of(recipe, config, vocabulary, steps)
        watch.at["documents"] = time.perf_counter()
        trainer = ChronicalsTrainer(model, tokenizer, config, callbacks=[watch])
        watch.trainer = trainer
        try:
            with records, contextlib.suppress(Interrupted):
                trainer.train(rows)
        except TrainingError as error:
            return {
                **failure(error),
                **noted(watch, records),
                "preset": recipe.fields.get("preset"),
            }
        result = described(recipe, config, watch, tiny, time.perf_counter() - began)
        return {**result, **noted(watch, records), "mean_length": mean_length(rows)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


SAID = ("fit: ", "memory: ", "use_cuda_graphs: ", "in use: ", "without ", "training: ")
"""Beginnings of lines of the log that say what a run decided, and what it could not do."""


def noted(watch: Watch, records: _Records) -> dict[str, Any]:
    """Return what was planned, taken and said of a run, and the seconds between its stages."""
    stages = list(watch.at.items())
    seconds = {
        name: round(at - before, 3) for (_, before), (name, at) in itertools.pairwise(stages)
    }
    return {
        "planned": watch.planned,
        "taken": watch.taken,
        "said": [line for line in records.lines if line.startswith(SAID)],
        "seconds": seconds,
    }


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error in words, with its cause: the allocator says what is reserved, and where."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    first = traceback.format_exception(causes[-1])
    return {
        "error": f"{type(error).__name__}: {error}"[:2000],
        "cause": f"{type(causes[-1]).__name__}: {causes[-1]}"[:2000],
        "trace": "".join(first)[-3000:],
    }


def config_of(recipe: Recipe, folder: Path, tiny: bool) -> tuple[ChronicalsConfig, int]:
    """Return the configuration of a recipe, and the tokens of its packs."""
    fields = dict(recipe.fields)
    name = fields.pop("preset", None)
    length = recipe.length
    if recipe.batch:
        length = min(length, 256) if tiny else length
        sizes = {"batch_size": recipe.batch, "max_seq_length": length}
        fields = {"gradient_accumulation_steps": 1, **sizes, **fields}
    if recipe.teacher:
        section = {"divergence": "jsd", "beta": 0.5, "teacher": str(folder / "teacher")}
        fields["sections"] = {"distill": section}
    fields |= {
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "save_steps": None,
        "trackers": [],
        "report_samples": 0,
        "max_steps": recipe.steps + SPARE,
        "cache_dir": folder / "tokens",
        "output_dir": folder / "run",
    }
    if name is not None:
        config = preset(name, **fields)
        return config, config.max_seq_length
    return ChronicalsConfig(**fields), length


def made_model(
    recipe: Recipe, config: ChronicalsConfig, folder: Path, length: int, tiny: bool
) -> Any:
    """Return the model that a recipe trains, on its device."""
    if recipe.gguf:
        return from_gguf(recipe, folder, tiny)
    dtype = torch.float32 if config.mixed_precision == "fp32" else torch.bfloat16
    model = model_of(recipe.model, length, tiny, dtype)
    if config.quantization:
        quantise_layers(model)
    return model


def described(
    recipe: Recipe, config: ChronicalsConfig, watch: Watch, tiny: bool, seconds: float
) -> dict[str, Any]:
    """Return the result of a recipe as JSON values."""
    name, sizes = shape_of(recipe.model, config.max_seq_length, tiny)
    steps = watch.steps
    timed = steps[PRESET_WARM_UP if recipe.card else WARM_UP :] or steps[-1:]
    step_seconds = [step.tokens / step.tokens_per_second for step in timed]
    fields = {
        name: value
        for name, value in recipe.fields.items()
        if name != "preset" and not isinstance(value, Path)
    }
    if recipe.batch:
        for field_name in ("batch_size", "max_seq_length", "gradient_accumulation_steps"):
            fields[field_name] = getattr(config, field_name)
    result = {
        "name": recipe.name,
        "config_class": name,
        "sizes": sizes,
        "preset": recipe.fields.get("preset"),
        "fields": fields,
        "kind": recipe.kind,
        "ragged": recipe.ragged,
        "gguf": recipe.gguf,
        "card": recipe.card,
        "backend": watch.backend,
        "decisions": watch.decisions,
        "taken": watch.taken,
        "planned": watch.planned,
        "peak": max(step.memory_gib for step in steps) * GIB,
        "reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        "step_seconds": step_seconds,
        "tokens": [step.tokens for step in steps],
        "targets": [step.targets for step in steps],
        "fill": [step.fill for step in steps],
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "seconds_in_all": seconds,
    }
    if recipe.teacher:
        name, sizes = shape_of(recipe.teacher, config.max_seq_length, tiny)
        result["teacher"] = {"config_class": name, "sizes": sizes}
    return result


RECOVERY = Recipe(
    "0.5b LoRA, 8 packs",
    "0.5b",
    # Graphs replay without asking for memory; a step that is not captured asks everywhere.
    {**LORA, "fit": "auto", "use_cuda_graphs": False, "use_torch_compile": False},
    steps=8,
)
PLACES = ("forward", "loss", "backward")
AT_STEP = 3
"""The step in which memory gets short, after graphs were captured."""


def recovered(place: str, seconds: float, tiny: bool) -> dict[str, Any]:
    """Run the recipe of recoveries, with the allocator capped at ``place`` of a step.

    Args:
        place: of ``PLACES``; empty for a run that never meets a cap.
        seconds: after which no other step begins.
        tiny: run a tiny shape.
    """
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    records = _Records()
    try:
        config, length = config_of(RECOVERY, folder, tiny)
        model = model_of(RECOVERY.model, length, tiny)
        watch = Watch(RECOVERY.steps, seconds)
        cap = Cap(place, watch)
        cap.hook(model)
        rows = rows_of(RECOVERY, config, model.config.vocab_size, RECOVERY.steps + SPARE)
        trainer = ChronicalsTrainer(model, byte_tokenizer(), config, callbacks=[watch])
        watch.trainer = trainer
        with records, contextlib.suppress(Interrupted):
            trainer.train(rows)
        result = described(RECOVERY, config, watch, tiny, time.perf_counter() - began)
        said = [line for line in records.lines if "out of memory" in line or "becomes" in line]
        result |= noted(watch, records)
        return {**result, "name": f"recovery: {place or 'none'}", "place": place, "said": said}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Cap:
    """A cap on the allocator that is lowered once, at a place of a step.

    From then on it is what the process held there, and what half of a step's further memory takes.

    Args:
        place: of ``PLACES``; empty for none.
        watch: knows how many steps are done.
    """

    def __init__(self, place: str, watch: Watch):
        self.place = place
        self.watch = watch
        self.lowered = False

    def hook(self, model: Any) -> None:
        """Watch the layer in the middle, and the last norm, after which the loss comes."""
        layers = model.get_decoder().layers
        layers[len(layers) // 2].register_forward_hook(self.passed)
        model.get_decoder().norm.register_forward_hook(self.normed)

    def passed(self, module: Any, given: Any, output: Any) -> None:
        """Lower the cap now, or when the gradient of this output is there."""
        hidden = output[0] if isinstance(output, tuple) else output
        if not torch.is_grad_enabled():
            return
        if self.place == "forward":
            self.lower()
        elif self.place == "backward" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.lower())

    def normed(self, module: Any, given: Any, output: Any) -> None:
        """Lower the cap before the loss."""
        if self.place == "loss" and torch.is_grad_enabled():
            self.lower()

    def lower(self) -> None:
        """Lower the cap to what is held, in the step that is to run out of memory."""
        if self.lowered or len(self.watch.steps) < AT_STEP:
            return
        self.lowered = True
        if not torch.cuda.is_available():
            raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / whole)


class _Records:
    """Lines that the package logs within a ``with`` block."""

    def __init__(self) -> None:
        self.lines = list[str]()

    def __enter__(self) -> _Records:
        import logging

        class Handler(logging.Handler):
            def emit(handler, record: Any) -> None:
                self.lines.append(record.getMessage())

        self.handler = Handler()
        self.logger = logging.getLogger("chronicals")
        self.logger.addHandler(self.handler)
        # a run lets its lines through only where nobody listens yet
        self.level = self.logger.level
        self.logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.handler)
        self.logger.setLevel(self.level)


def in_process(run: Any, out: Path) -> None:
    """Write the result of ``run``, or its error, to a file. Runs in a process of its own."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        result = run()
    except BaseException as error:
        result = failure(error)
    out.write_text(json.dumps(result, default=str))


def forked(run: Any, limit: float) -> dict[str, Any]:
    """Return the result of ``run`` from a process that has at most ``limit`` seconds."""
    out = Path(tempfile.mkdtemp()) / "result.json"
    process = multiprocessing.get_context("fork").Process(target=in_process, args=(run, out))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return {"error": f"not done within {limit:.0f} s"}
    if not out.exists():
        return {"error": f"ended with status {process.exitcode}"}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def machine() -> dict[str, Any]:
    """Return the card and the versions, in a process of its own."""
    from chronicals.benchmark.rates import described_machine

    return described_machine()


def jobs(given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield name and function of each run that was asked for."""
    if given.recovery:
        for place in ("", *PLACES):
            yield (
                f"recovery: {place or 'none'}",
                partial(recovered, place, given.seconds, given.tiny),
            )
        return
    for recipe in presets() if given.presets else recipes():
        if not given.only or any(part in recipe.name for part in given.only):
            yield recipe.name, partial(measured, recipe, given.seconds, given.tiny)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--presets", action="store_true")
    parser.add_argument("--recovery", action="store_true")
    parser.add_argument("--rates", type=Path, help="measure the rates of the card first")
    parser.add_argument("--seconds", type=float, default=8, help="of the steps of a recipe")
    parser.add_argument("--each", type=float, default=60, help="seconds of a process")
    parser.add_argument("--limit", type=float, default=540, help="seconds of all")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    begun = time.perf_counter()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    if given.rates is not None:
        rates = forked(chronicals.benchmark.card_rates.measure_card, 120)
        rates["seconds"] = time.perf_counter() - begun
        given.rates.write_text(json.dumps(rates, indent=1))
        print(f"rates: {rates['seconds']:.0f} s {rates.get('error', '')}", flush=True)
    results["machine"] = forked(machine, 60)
    for name, run in jobs(given):
        left = given.limit - (time.perf_counter() - begun)
        if name in results and "error" not in results[name]:
            continue
        if left < 15:
            print(f"{name}: not reached", flush=True)
            continue
        results[name] = forked(run, min(given.each, left))
        given.out.write_text(json.dumps(results))
        print(line_of(name, results[name]), flush=True)


def line_of(name: str, result: dict[str, Any]) -> str:
    """Return a line on a result for the terminal."""
    if "error" in result:
        return f"{name}: {result['error'][:300]}; {result.get('seconds', '')}"
    median = statistics.median(result["step_seconds"])
    planned = result["planned"].get("held", math.nan)
    return (
        f"{name}: {result['peak'] / GIB:.2f} GiB, planned {planned / GIB:.2f} "
        f"({planned / result['peak'] - 1 if result['peak'] else 0:+.1%}), {median * 1000:.1f} ms, "
        f"{result['tokens'][-1] / median:,.0f} tokens/s, {result['seconds_in_all']:.0f} s in all: "
        f"{result['seconds']}"
    )


assert set(CARDS) >= {recipe.card for recipe in presets()}

if __name__ == "__main__":
    main()
