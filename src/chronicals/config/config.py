"""ChronicalsConfig: everything about a run except its model and its data, checked when made."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from chronicals.config.agreement import IMPLIED, RULES
from chronicals.config.checked_class import AUTO, STRICT, Heading, configuration, is_auto
from chronicals.config.explanations import raise_together
from chronicals.config.memory_entries import ALIASES, EXPERT_PREDICTOR, MemoryPolicy
from chronicals.config.reward_entries import (
    DROP,
    as_entries,
    as_reward_on_error,
    as_rewards,
    reward_text,
)
from chronicals.config.sections import SECTIONS_FIELD, gathered, merged
from chronicals.config.strict_yaml import read_mapping
from chronicals.config.values import (
    OwnPath,
    as_gigabytes,
    as_lora_init,
    as_names,
    as_numbers,
    as_pattern,
    as_patterns,
    as_shares,
    as_tokens,
    as_value_list,
    infinity_as_none,
    none_as_empty,
    not_foreign,
    off_as_text,
)

LONGEST_TIMEOUT = 604_800.0
"""Seconds: a week, which torch is told to wait for a collective."""

TARGET_FIELDS = (
    "train_on",
    "train_on_roles",
    "train_on_turns",
    "train_after_stop",
    "completions_as_chat",
    "max_seq_length",
    "overlong",
    "gate",
)
"""Fields that decide which rows are accepted, and which of their tokens are targets."""


Positive = Annotated[int, Field(gt=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
PositiveFinite = Annotated[Finite, Field(gt=0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Turns = Literal["all", "last"]
TrainOn = Literal["answers", "all"]
Overlong = Literal["cut", "split", "drop"]
RopeScaling = Literal["yarn", "llama3", "off"]
Fit = Literal["off", "settings", "auto"]
"""What ``fit`` may change so that a run fits its card, before the first step and after it."""

EXCLUSIVE_PAIRS = (("max_steps", "num_epochs"), ("warmup_steps", "warmup_ratio"))
"""Pairs of fields of which a run has one."""


def laid_over(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` overridden by ``others``, setting by setting in sections.

    If ``others`` have one field of an exclusive pair, ``fields`` lose the other one; if they have
    ``memory``, ``fields`` lose the switches that are entries of it.
    """
    result = dict(fields)
    if others.get("memory") is not None:
        result = {name: value for name, value in result.items() if name not in ALIASES}
    if SECTIONS_FIELD in result and SECTIONS_FIELD in others:
        others = {**others, SECTIONS_FIELD: merged(result[SECTIONS_FIELD], others[SECTIONS_FIELD])}
    for first, second in EXCLUSIVE_PAIRS:
        if others.get(first) not in (None, AUTO):
            result.pop(second, None)
        if others.get(second) not in (None, AUTO):
            result.pop(first, None)
    return {**result, **others}


@configuration
@dataclass(kw_only=True, config=STRICT)
class ChronicalsConfig:
    """Configuration of a training run, apart from its model and data.

    The ``use_*`` switches that are on by default *permit*: card, model and memory decide what runs,
    and the first lines of the log say what and why. A switch that was set and cannot be honoured
    raises. Fields whose default depends on something (``DECIDED``) also take ``"auto"``, which
    leaves the decision to the run, as leaving them out does.

    Assigning to a field is the same as passing it: the value and the fields it must agree with are
    checked at once, and a refused value changes nothing. Fields that agree only together are
    changed together, by ``replace``.

    Raises:
        ConfigurationError: a field is unknown, of the wrong type, out of range, or not available in
            this version.
    """

    _length: ClassVar = Heading("Length, batch and learning rate")
    learning_rate: Finite = Field(default=2e-4, gt=0, description="Peak learning rate")
    batch_size: Positive = Field(default=4, description="Packs in one forward pass, on each GPU")
    max_seq_length: Positive = Field(
        default=2048, description="Tokens in a pack; longer rows are cut or split"
    )
    gradient_accumulation_steps: Positive = Field(
        default=4, description="Forward passes in one optimizer step"
    )
    max_steps: Positive | None = Field(
        default=None, description="Optimizer steps, instead of num_epochs"
    )
    num_epochs: Positive | None = Field(
        default=None, description="Passes over the data (default: one, without max_steps)"
    )
    warmup_steps: int = Field(
        default=100, ge=0, description="Steps of rising learning rate (default: at most a tenth)"
    )
    warmup_ratio: ShareBelowOne | None = Field(
        default=None,
        description="Share of the run's steps with a rising learning rate, instead of warmup_steps",
    )
    warmup_from_zero: bool = Field(
        default=False,
        description="Rate of 0 in the first step of the warm-up, as transformers has it, instead of "
        "the peak over its steps",
    )
    lr_scheduler: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Learning rate after the warm-up; wsd is warm-up, stable, decay",
    )
    min_lr_ratio: ShareBelowOne = Field(
        default=0.0, description="Final learning rate as a share of the peak"
    )
    wsd_decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.2, description="Share of the steps in which wsd decays"
    )

    _speed: ClassVar = Heading("Speed")
    use_flash_attention: bool = Field(default=True, description="Permit a FlashAttention backend")
    use_fused_kernels: bool = Field(
        default=True, description="Permit the loss without whole logits, and fused kernels"
    )
    use_sequence_packing: bool = Field(
        default=True, description="Several documents in a pack; off: one in each"
    )
    use_gradient_checkpointing: bool = Field(
        default=True,
        description="Permit recomputation where memory needs it; set to true: in every layer",
    )
    use_torch_compile: bool = Field(
        default=True,
        description="Permit compilation of the decoder layers where they do not run fused, on CUDA",
    )
    use_cuda_graphs: bool = Field(
        default=True, description="Permit replaying whole steps as CUDA graphs"
    )

    _lora: ClassVar = Heading("LoRA")
    use_lora: bool = Field(
        default=False, description="Train low-rank adapters instead of the weights"
    )
    lora_rank: Positive = Field(default=64, description="Rank of the adapters")
    lora_alpha: Finite = Field(default=16, gt=0, description="Adapters are scaled by alpha / rank")
    lora_dropout: ShareBelowOne = Field(
        default=0.05, description="Dropout on the input of an adapter"
    )
    lora_target_modules: Annotated[
        list[str] | str | None,
        BeforeValidator(as_names),
        BeforeValidator(none_as_empty),
        AfterValidator(as_pattern),
        BeforeValidator(not_foreign("lora_target_modules")),
    ] = Field(
        default=None,
        description="Linear layers (or the embedding) to adapt: names, or one regular expression "
        "(default: all but the head); "
        "none adapts lora_target_parameters alone",
    )
    lora_target_parameters: Annotated[list[str] | None, BeforeValidator(as_value_list)] = Field(
        default=None,
        description="Stacked weights of experts to adapt, as mlp.experts.down_proj; sets "
        "lora_dropout to 0",
    )
    lora_rank_pattern: Annotated[
        dict[str, Positive], BeforeValidator(as_shares), AfterValidator(as_patterns)
    ] = Field(
        default_factory=dict,
        description="Ranks of some layers, NAME=RANK: the end of their path, or a regular "
        "expression",
    )
    lora_alpha_pattern: Annotated[
        dict[str, PositiveFinite], BeforeValidator(as_shares), AfterValidator(as_patterns)
    ] = Field(default_factory=dict, description="Alphas of some layers, NAME=ALPHA, likewise")
    lora_layers: Annotated[list[int] | None, BeforeValidator(as_numbers)] = Field(
        default=None, description="Numbers of the decoder layers to adapt, as 0-7,20 (default: all)"
    )
    lora_modules_to_save: Annotated[list[str] | None, BeforeValidator(as_value_list)] = Field(
        default=None,
        description="embed_tokens, lm_head: trained whole beside the adapters, and saved with them",
    )
    lora_trainable_tokens: Annotated[
        list[int | str] | dict[str, list[int | str]] | None, BeforeValidator(as_tokens)
    ] = Field(
        default=None,
        description="Tokens, by id or text, whose rows of the embedding are trained beside the "
        "adapters",
    )
    lora_init: Annotated[str, AfterValidator(as_lora_init)] = Field(
        default="default",
        description="Where adapters start: default, gaussian, pissa, pissa_niter_N, olora, or "
        "loftq with quantization",
    )
    use_rslora: bool = Field(default=False, description="Scale adapters by alpha / sqrt(rank)")
    use_dora: bool = Field(
        default=False, description="Train the length of each row of an adapted weight, too (DoRA)"
    )
    use_lora_plus: bool = Field(
        default=True, description="With LoRA: matrix B learns faster than A"
    )
    lora_plus_ratio: Finite = Field(
        default=16.0, ge=1, description="How many times faster B learns"
    )

    _four_bits: ClassVar = Heading("Memory and precision")
    quantization: Literal["nf4"] | None = Field(
        default=None,
        description="Hold the decoder's linear layers and experts in 4 bits, frozen, under "
        "adapters (docs/quantization.md)",
    )
    load_in_4bit: bool = Field(default=False, description="Another way to say quantization='nf4'")

    _optimizer: ClassVar = Heading("Optimizer")
    weight_decay: Finite = Field(
        default=0.0, ge=0, description="Decoupled weight decay of matrices"
    )
    adam_beta1: ShareBelowOne = Field(default=0.9, description="Decay of the first moment")
    adam_beta2: ShareBelowOne = Field(default=0.999, description="Decay of the second moment")
    adam_epsilon: Finite = Field(
        default=1e-8, gt=0, description="Added to the root of the second moment"
    )
    max_grad_norm: Annotated[float | None, BeforeValidator(infinity_as_none)] = Field(
        default=1.0, gt=0, description="Gradients are clipped to this norm; inf does not clip"
    )
    use_8bit_optimizer: bool = Field(
        default=False,
        description="AdamW with moments in 8 bits, 2 bytes a weight; those of embeddings and "
        "vectors in fp32",
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Type of the optimizer states; bf16 is rounded stochastically"
    )
    master_weights: bool = Field(
        default=True,
        description="Keep trained bf16 weights as exact fp32 masters; false: matrices are rounded "
        "stochastically, 2 bytes less",
    )

    _memory: ClassVar = Heading("Memory and precision")
    activation_offload: bool = Field(
        default=False, description="Keep activations in host memory until they are needed"
    )
    memory: Annotated[list[MemoryPolicy] | None, BeforeValidator(as_value_list)] = Field(
        default=None,
        description="What saves memory, any of them together; auto is what the card decides "
        "(default: recomputation where it needs that)",
    )
    logits_chunk_size: Positive = Field(
        default=4352,
        description="Rows of logits that exist at a time in the loss; fewer take less memory and "
        "more time",
    )
    fit: Annotated[Fit, BeforeValidator(off_as_text)] = Field(
        default="off",
        description="Take before the first step what a card needs: settings takes the fastest "
        "that fit among those that change no result; auto does too, rehearses the longest "
        "documents, and goes on after an out-of-memory",
    )
    gpu_memory: Annotated[float | None, BeforeValidator(as_gigabytes)] = Field(
        default=None,
        description="Memory of a card that a run may fill, in GB: 24, 24GB or 16GiB (default: all "
        "of it; 80 where a plan is made)",
    )
    cache_memory: Annotated[float | None, BeforeValidator(as_gigabytes)] = Field(
        default=None,
        description="Most memory for keys and values where a run generates (the report's "
        "answers), in GB: 2, 2GB or 512MiB (default: what training's peak leaves, or what a step "
        "gives back)",
    )
    expert_memory: Annotated[float | None, BeforeValidator(as_gigabytes)] = Field(
        default=None,
        description="Memory of the card for experts with memory=['offload_experts'], in GB: 8, 8GB "
        "or 8GiB; at least those of a token and two more",
    )
    expert_predictor: str = Field(
        default=EXPERT_PREDICTOR,
        description="Which experts in host memory are fetched before a layer chooses: last, those "
        "that it chose the last time, none, heads of the native model, or a folder of chronicals "
        "moe predict-train; no result depends on it",
    )
    generation_exact: bool = Field(
        default=False,
        description="Where a run generates, give the same bits as packed_log_probabilities "
        "(docs/generation.md), which takes longer: in 16 bits on a card, in fp32 on the CPU",
    )
    check_memory: bool = Field(
        default=True,
        description="End the run before its first step where it is expected to hold more than the "
        "card has",
    )
    mixed_precision: Literal["bf16", "fp16", "fp32"] = Field(
        default="bf16", description="Type of the products"
    )
    use_fp8: bool = Field(
        default=False,
        description="Products large enough for it to pay in FP8 (docs/fp8.md): all of full "
        "fine-tuning, or a frozen base",
    )

    _objective: ClassVar = Heading("Objective")
    objective: str = Field(
        default="sft",
        description="sft trains what the rows mark (answers, completions); pretraining every "
        "token; distill on a teacher's "
        "predictions; the others on preferences",
    )
    sections: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Settings of the objective by name: --distill.alpha 0.5, or in a recipe "
        "distill: {alpha: 0.5}; --teacher "
        "is --distill.teacher",
    )

    _rewards: ClassVar = Heading("Rewards")
    rewards: (
        Annotated[
            list[Annotated[Any, PlainSerializer(reward_text, return_type=str)]],
            BeforeValidator(as_entries),
            AfterValidator(as_rewards),
        ]
        | None
    ) = Field(
        default=None,
        description="What scores generated answers, each with its weight: module:function=0.5, "
        "arithmetic, exact, regex(PATTERN), length(TOKENS), math, or the folder of a reward model "
        "(docs/rewards.md)",
    )
    reward_timeout: PositiveFinite = Field(
        default=1.0,
        description="Seconds that a reward may take for each answer it is called with; a call that "
        "takes longer is ended",
    )
    reward_on_error: Annotated[str | float, BeforeValidator(as_reward_on_error)] = Field(
        default=DROP,
        description="What becomes of an answer whose reward fails: drop leaves it out of its "
        "group, a number is its reward",
    )
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="Whether several rewards are summed by their weights before a group is "
        "normalised, or each is normalised by itself",
    )

    _tokens: ClassVar = Heading("Data")
    train_on: TrainOn | None = Field(
        default=None,
        description="The answers, completions and texts of rows, or all tokens (default: the "
        "objective's)",
    )
    train_on_roles: Annotated[list[Role], Field(min_length=1), BeforeValidator(as_value_list)] = (
        Field(default=["assistant"], description="Whose messages of a conversation are trained")
    )
    train_on_turns: Turns = Field(
        default="all", description="All messages of those roles, or the last of a conversation"
    )
    train_after_stop: bool = Field(
        default=False,
        description="Train what a chat template writes behind the stop token of an answer, too, "
        "as TRL does: a newline, which "
        "is never generated",
    )
    completions_as_chat: bool = Field(
        default=False,
        description="Render rows of prompt and completion by the chat template, as a question and "
        "its answer",
    )
    packing_strategy: Literal["best-fit", "first-fit", "in-order"] = Field(
        default="best-fit",
        description="best-fit and first-fit take the longest documents first, and packs are "
        "shuffled; in-order keeps the order "
        "of the data, within a step and from step to step",
    )
    max_documents: Positive | None = Field(
        default=None, description="Most documents in a pack (default: as they fit)"
    )
    resize_embeddings: bool = Field(
        default=False,
        description="Give embedding and head rows for tokens of the tokenizer that have none, and "
        "train them",
    )

    _evaluation: ClassVar = Heading("Evaluation")
    validation_split: ShareBelowOne = Field(
        default=0.0, description="Share of the rows held out, instead of data of their own"
    )
    validation_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None,
        description="Seed that draws the rows which validation_split holds out (default: seed)",
    )
    eval_steps: Positive | None = Field(
        default=None, description="Evaluate every so many steps (default: at the end)"
    )
    early_stopping_patience: Positive | None = Field(
        default=None, description="Stop after so many evaluations without a better loss"
    )
    keep: Literal["best", "last"] | None = Field(
        default=None,
        description="Whose weights the run leaves: best, of the step with the lowest held-out "
        "loss, for which every better "
        "evaluation writes a whole checkpoint, which takes time and space; or last (default: best "
        "where something is held out)",
    )

    _rows: ClassVar = Heading("Data")
    overlong: Overlong | None = Field(
        default=None,
        description="What becomes of rows longer than max_seq_length (default: texts are split, "
        "others cut)",
    )
    rope_scaling: RopeScaling | None = Field(
        default=None,
        description="Documents longer than the model's positions: yarn stretches its rotary "
        "embedding by the factor that they need, llama3 that of Llama 3.1; off trains beyond as it "
        "is (default: an error)",
    )
    dataset_num_proc: Positive | None = Field(
        default=None,
        description="Processes that tokenise where there is much to do (default: one a core; 1: "
        "none but this)",
    )
    gate: Annotated[dict[str, Finite], BeforeValidator(as_shares)] = Field(
        default_factory=dict,
        description="Largest share of the rows a finding may touch before it is an error, by its "
        "name",
    )

    _output: ClassVar = Heading("Run and output")
    save_steps: Positive | None = Field(
        default=500, description="Checkpoint every so many steps; one always at the end"
    )
    save_total_limit: Positive = Field(
        default=2, description="Checkpoints kept; the last and the best always are"
    )
    trackers: Annotated[
        list[Literal["tensorboard", "wandb", "mlflow"]] | None,
        BeforeValidator(as_value_list),
        BeforeValidator(none_as_empty),
    ] = Field(
        default=None,
        description="Experiment trackers, or none (default: TensorBoard where it is installed)",
    )
    project: str | None = Field(
        default=None, description="Project in W&B, experiment in MLflow (default: theirs)"
    )
    run_name: str | None = Field(
        default=None, description="Name of the run in W&B and MLflow (default: theirs)"
    )
    report_samples: Annotated[int, Field(ge=0)] = Field(
        default=2,
        description="Prompts that the report shows answers to, before and after training, where "
        "that takes seconds",
    )
    output_dir: OwnPath = Field(
        default=Path("chronicals-output"), description="Where the run is written"
    )
    overwrite: bool = Field(
        default=False,
        description="Replace the run that is in output_dir, once the new one has its first "
        "checkpoint; only files of runs are "
        "replaced",
    )
    cache_dir: OwnPath | None = Field(
        default=None, description="Where token stores are kept (default: ~/.cache/chronicals)"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=42, description="Seed of order, adapters and dropout"
    )

    _cards: ClassVar = Heading("Several cards")
    sharding: Literal["none", "optimizer", "weights"] = Field(
        default="optimizer",
        description="Of several processes: what each has only a share of: nothing; gradients' "
        "sums and optimizer states; the "
        "weights, too, as is chosen where they would not fit",
    )
    sharding_ranks: Positive | None = Field(
        default=None,
        description="With sharding=weights: how many neighbours share one copy of the weights; by "
        "default those of a machine "
        "where that fits, else all",
    )
    context_parallel: Positive = Field(
        default=1,
        description="Of several processes: how many share each pack; documents stay whole on one, "
        "those longer than its share "
        "are split over all",
    )
    context_heads: Positive | None = Field(
        default=None,
        description="With context_parallel: how many neighbours exchange heads to attend to split "
        "documents; keys are gathered "
        "from others (default: those of a machine, where their number divides the key heads)",
    )
    pack_parts: Positive | None = Field(
        default=None,
        description="Parts of a pack; a document that fits in one stays in one (default: "
        "context_parallel). Runs with the same "
        "number take the same documents in each step, however many processes share packs",
    )
    rank_timeout: Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT)] = Field(
        default=300.0,
        description="Of several processes: seconds in which none of them is done with a "
        "micro-batch, in a step or while "
        "evaluating, or in which all wait for each other elsewhere, before all end and say where "
        "each is; at most a week",
    )

    explicit = frozenset[str]()
    """Names of the fields that were set."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field as if it had been passed: the value is checked and becomes explicit."""
        changed = self.replace(**{name: value})
        name = name if hasattr(changed, name) else SECTIONS_FIELD
        for changed_name in (name, "explicit", *IMPLIED):
            object.__setattr__(self, changed_name, getattr(changed, changed_name))

    def check(self) -> None:
        """Check rules that concern more than one field. One error has all mistakes."""
        raise_together(*(functools.partial(rule, self) for rule in RULES))

    @property
    def epochs(self) -> int | None:
        """Passes over the data; one by default, None if the number of steps is set."""
        return None if self.max_steps is not None else self.num_epochs or 1

    @property
    def held_out_seed(self) -> int:
        """``validation_seed``, or the seed of the run."""
        return self.seed if self.validation_seed is None else self.validation_seed

    @property
    def trained_tokens(self) -> TrainOn:
        """``train_on``, or the default of the objective."""
        return self.train_on or ("all" if self.objective == "pretraining" else "answers")

    @property
    def card_decides(self) -> bool:
        """True if the card decides what is recomputed, besides what ``memory`` asks for."""
        return self.memory is None or AUTO in self.memory

    @property
    def card_bytes(self) -> int | None:
        """Bytes of a card that the run may fill; None for all of it."""
        return None if self.gpu_memory is None else round(self.gpu_memory * 10**9)

    @property
    def cache_bytes(self) -> int | None:
        """Most bytes of keys and values where the run generates; None if the run decides."""
        return None if self.cache_memory is None else round(self.cache_memory * 10**9)

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of the slots of experts; None without."""
        return None if self.expert_memory is None else round(self.expert_memory * 10**9)

    @property
    def memory_policies(self) -> frozenset[MemoryPolicy]:
        """The entries of ``memory``, or those that its aliases ask for."""
        if self.memory is not None:
            return frozenset(self.memory) - {AUTO}
        return frozenset(
            entry
            for switch, entry in ALIASES.items()
            if switch in self.explicit and getattr(self, switch)
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values, which become explicit beside those that are."""
        explicit = {name: getattr(self, name) for name in self.explicit}
        return type(self)(**{**explicit, **changes})

    def fitted(self, **values: Any) -> Self:
        """Return a copy with other values that the user did not set: ``explicit`` is unchanged."""
        fitted = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(fitted, name, value)
        return fitted

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        return pydantic.TypeAdapter(type(self)).dump_python(self, mode="json")

    def to_yaml(self, path: str | Path, without: Collection[str] = ()) -> None:
        """Write the fields that were set. Others have their defaults when the file is read.

        Args:
            path: of the file.
            without: names of fields that are left out.
        """
        names = self.explicit - set(without)
        chosen = {name: value for name, value in self.to_dict().items() if name in names}
        chosen |= chosen.pop(SECTIONS_FIELD, {})
        Path(path).write_text(yaml.safe_dump(chosen, sort_keys=False))

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> Self:
        """Read a YAML mapping of fields, which ``overrides`` win over.

        They also win over the other field of an exclusive pair, as ``max_steps`` over
        ``num_epochs``.

        Raises:
            ConfigurationError: the file is missing, is not a mapping, or holds a wrong field.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**laid_over(cls.read_yaml(path), gathered(overrides, names)))

    @classmethod
    def read_yaml(cls, path: str | Path) -> dict[str, Any]:
        """Return the fields in a YAML file, with sections under the field ``sections``.

        Raises:
            ConfigurationError: the file is missing or is not a mapping.
        """
        fields = read_mapping(path)
        for name in ("learning_rate", "adam_epsilon"):  # YAML 1.1 reads 2e-4 as text
            if isinstance(fields.get(name), str) and not is_auto(name, fields[name]):
                # A text that is no number is reported later, with all other mistakes.
                with contextlib.suppress(ValueError):
                    fields[name] = float(fields[name])
        return gathered(fields, {field.name for field in dataclasses.fields(cls)})
