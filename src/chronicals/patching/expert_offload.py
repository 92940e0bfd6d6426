"""``offload``: a mixture whose experts are in host memory, and in slots on the device.

The experts' modules of the model are replaced on the instance; all else is as it was. Products are
those of ``patch_model`` (``patching/experts.py``), which are proved for the class before.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from chronicals.kernels.host_memory import available_memory
from chronicals.lora.stacked_experts import TAKES_FACTORS, is_parallel
from chronicals.models.loading import (
    DEQUANTISED,
    load_config,
    load_model,
    load_without_weights,
    quantization_of,
)
from chronicals.models.loading import IN_FP8 as FP8_FILES
from chronicals.models.preparing import preparing
from chronicals.models.rows import SHARING_RANKS, STORED_ROWS
from chronicals.moe.offload.budget import Budgets, bytes_of, slots_within
from chronicals.moe.offload.engine import ExpertEngine
from chronicals.moe.offload.eviction import (
    POLICIES,
    ByTrace,
    EvictionPolicy,
    Expert,
)
from chronicals.moe.offload.files import ExpertFiles
from chronicals.moe.offload.kt_products import cpu_products_for
from chronicals.moe.offload.module import StreamedExperts, streamed_experts_of
from chronicals.moe.offload.prediction import Predictor
from chronicals.moe.offload.predictors import NamedPredictor, predictor_named
from chronicals.moe.offload.records import (
    describe_layers,
    expert_modules,
    experts_of_token,
    stream_experts,
)
from chronicals.moe.offload.report import OffloadReport, report_of
from chronicals.moe.offload.soft import (
    check_shared_experts,
    let_shared_experts_stand_in,
    shared_experts_of,
)
from chronicals.patching import experts
from chronicals.patching.forms import signature
from chronicals.patching.fp8_experts import IN_FP8
from chronicals.patching.plan import plan_for
from chronicals.quantization import FourBits, class_module, format_of_files
from chronicals.quantization.expert_records import StackFormat, formats_of
from chronicals.quantization.experts import TAKES_STACKS

logger = logging.getLogger(__name__)

NUMERICAL = "numerical"
SOFT = "soft"

MODES = ("exact", NUMERICAL, SOFT)
"""Values of ``mode``."""

EXPERTS_IN_FILES = r"\.experts\.(\d+\.|gate_up_proj|down_proj)"
"""Names of experts' tensors in files, which are read by ourselves."""

NO_DISK = (
    "disk={!r}: experts are read from host memory alone; leave it out, and take a smaller format "
    "(load_in_4bit) where they do not fit"
)

WERE_DEQUANTISED = (
    "experts: their files hold FP8, which was dequantised when the model was loaded, so they take "
    "twice the memory; %s"
)


class Offload:
    """The offloaded experts of a model, as its attribute ``offload``.

    Args:
        model: the model.
        engine: its experts.
        mode: see ``offload``.
        predictor: what was asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: ExpertEngine,
        mode: str,
        predictor: NamedPredictor | Predictor,
    ):
        self.engine = engine
        self.mode = mode
        self.predictor = predictor
        self._model = model

    def __deepcopy__(self, memo: dict) -> Offload:
        """Return the same engine for a copy of the model, which reads the same records."""
        return Offload(copy.deepcopy(self._model, memo), self.engine, self.mode, self.predictor)

    def report(self) -> OffloadReport:
        """Return hit rates, bytes that were copied, and what was waited for."""
        return report_of(self.engine, self.mode)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """A context in which ``mode="soft"`` waits for missing experts, as ``exact`` does.

        What soft mode costs is the difference of two evaluations, one of them within it.
        """
        before = self.engine.stands_in
        self.engine.stands_in = False
        try:
            yield
        finally:
            self.engine.stands_in = before

    def verify(self) -> None:
        """Compare all records with their checksums.

        Raises:
            ExpertRecordError: one is not what was loaded.
        """
        self.engine.verify()

    def close(self) -> None:
        """Free the slots and the records; the model's experts cannot run any more."""
        self.engine.close()


def offload(
    model_or_folder: Any,
    vram: int | str,
    ram: int | str | None = None,
    *,
    disk: str | None = None,
    mode: str = "exact",
    policy: str | EvictionPolicy = "lru",
    predictor: str | Path | Predictor | NamedPredictor | None = "last",
    trace: Mapping[Expert, int] | None = None,
    device: torch.device | str | None = None,
    io: str | Path | None = None,
    shared: str | None = None,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
) -> Any:
    """Return a mixture whose experts are in host memory, and in slots of ``vram`` on the device.

    It is the model that was given, an ordinary model of transformers: ``generate``, ``pipeline``,
    evaluation, adapters on it and the trainer work as before. ``model.offload.report()`` tells what
    happened, ``model.offload.close()`` frees the experts.

    Args:
        model_or_folder: a causal language model in host memory or on the device; or a folder, whose
            experts are read one by one.
        vram: memory of the slots, such as ``"16GiB"``; an int is bytes.
        ram: host memory that all experts may take; by default what is available.
        disk: refused: experts are read from host memory alone.
        mode: ``exact`` gives the same bits as the same kernels with all experts on the device;
            ``numerical`` lets the CPU compute a share of the missing experts of few tokens, without
            gradients, within 1e-5 in fp32; ``soft`` lets shared experts stand in for missing ones,
            which changes results and has no gradients.
        policy: which expert gives up its slot: ``lru``, ``lfu``, ``static`` (by ``trace``), or an
            object.
        predictor: which experts are fetched before they are chosen: ``last`` those of a layer's
            last pass, ``none`` or None none, a folder those that its heads predict (``chronicals moe
            predict-train``), ``heads`` those that a native model's own heads do; or an object.
        trace: for ``static``, how often each expert of each layer was chosen.
        device: device of the model; by default a card if there is one.
        io: file for a line an event (``io.jsonl`` of a folder that the web page shows).
        shared: name of host memory that several processes of this machine share.
        dtype: of a folder, dtype of the weights; bf16 by default.
        quantization: of a folder, ``nf4`` quantises linear layers and experts as they are read.

    Raises:
        ValueError: an argument is refused, the model has no experts of a known form, or a budget is
            too small; the message says the least that works.
    """
    if disk is not None:
        raise ValueError(NO_DISK.format(disk))
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    size = bytes_of(vram, "vram")
    chosen = policy_named(policy, trace)
    wanted = predictor if isinstance(predictor, Predictor) else predictor_named(predictor)
    host = available_memory() if ram is None else bytes_of(ram, "ram")
    budgets = Budgets(size, f"vram={vram!r}", host, f"ram={ram!r}")
    if isinstance(model_or_folder, (str, Path)):
        if mode == SOFT and Path(model_or_folder).is_dir():
            shared_experts_of(load_without_weights(Path(model_or_folder)))
        model, engine = load_held(model_or_folder, budgets, dtype, quantization, shared)
        with closing_if_refused(engine):
            _check(model, mode, wanted)
    else:
        if dtype is not None or quantization is not None:
            raise ValueError(
                "dtype and quantization are for a folder that is loaded; this model is loaded already"
            )
        model = model_or_folder
        _check(model, mode, wanted)
        engine = hold_experts(model, budgets, shared)
    model.to(place)
    file = None if io is None else Path(io)
    open_experts(model, engine, budgets, place, chosen, wanted, file, mode)
    return model


def _check(model: Any, mode: str, predictor: NamedPredictor | Predictor) -> None:
    """Raise ValueError if a model cannot be offloaded in that mode, or with that predictor."""
    if mode == SOFT:
        check_shared_experts(model)
    if isinstance(predictor, NamedPredictor):
        predictor.check(model)


@contextmanager
def closing_if_refused(engine: ExpertEngine) -> Iterator[None]:
    """A context that frees the experts of a model that is refused in it."""
    try:
        yield
    except ValueError:
        engine.close()
        raise


def load_held(
    folder: str | Path,
    budgets: Budgets,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
    shared: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, ExpertEngine]:
    """Load a model whose experts are read from its files one by one, into records.

    Beside the records, host memory holds the other weights and one expert at a time.

    Args:
        folder: a folder with safetensors files, in 16 or 32 bits, in FP8 with a scale a block, or
            with stacks in MXFP4.
        budgets: memory that experts may take.
        dtype: dtype of the weights; bf16 by default.
        quantization: ``nf4`` quantises linear layers and experts as they are read.
        shared: name of memory that processes share.
        trust_remote_code: run code that comes with the model.

    Returns:
        The model in host memory, and its experts, which have no slots yet.

    Raises:
        ValueError: it cannot be loaded, or its experts are not in the files under known names.
        ExpertRecordError: an expert cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"{folder}: is no folder; download the model first, or give a loaded one to offload"
        )
    kind = dtype or torch.bfloat16
    described = quantization_of(load_config(path, trust_remote_code))
    form = format_of_files(described)
    in_fp8 = described.get("quant_method") == FP8_FILES
    if described and not in_fp8 and (form is None or not form.STACK_PARTS):
        raise ValueError(
            f"{folder}: its files hold {described.get('quant_method')} weights, which are not read "
            "expert by expert; load it (chronicals.load_model), and give offload the model"
        )
    if quantization not in (None, "nf4"):
        raise ValueError(f"quantization={quantization!r}: expected nf4 or None")
    files = ExpertFiles(path, form)
    bits = FourBits() if quantization else None
    skeleton = load_without_weights(path, trust_remote_code)
    modules = expert_modules(skeleton)
    forms = {name: _form_of(skeleton, name, module) for name, module in modules.items()}
    formats = {name: files.formats(name, module, kind, bits) for name, module in modules.items()}
    budgets.check(describe_layers(formats, experts_of_token(skeleton.config)))
    held: list[ExpertEngine] = []

    def replace_experts(model: Any) -> None:
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {EXPERTS_IN_FILES}
        held.append(_replaced(model, budgets, forms, formats, shared))

    with preparing(replace_experts):
        model = load_model(path, kind, trust_remote_code, quantization)
    return model, held[0]


def open_experts(
    model: Any,
    engine: ExpertEngine,
    budgets: Budgets,
    device: torch.device,
    policy: EvictionPolicy,
    predictor: NamedPredictor | Predictor,
    io: Path | None = None,
    mode: str = "exact",
) -> None:
    """Make the slots of experts that ``hold_experts`` moved, on the model's device.

    Args:
        model: the model; its attribute ``offload`` is set.
        engine: its experts.
        budgets: memory that they may take.
        device: the device.
        policy: which expert gives up its slot.
        predictor: which experts are fetched early.
        io: file for a line an event.
        mode: see ``offload``.

    Raises:
        ValueError: the memory of the device is too small.
    """
    slots = slots_within(engine.layers, budgets.device, budgets.device_name)
    made = predictor if isinstance(predictor, Predictor) else predictor.made(model)
    cpu = cpu_products_for(engine, budgets.host) if mode == NUMERICAL else None
    engine.open(slots, device, policy, made, io, cpu)
    if mode == SOFT:
        let_shared_experts_stand_in(model, engine)
    model.offload = Offload(model, engine, mode, predictor)
    logger.info(
        "experts: %d of %d in slots, %.2f GiB on %s; all of them in %.2f GiB of host memory",
        engine.slots,
        engine.experts,
        engine.allocated_bytes / 2**30,
        device,
        engine.slab.bytes / 2**30,
    )


def policy_named(
    policy: str | EvictionPolicy, trace: Mapping[Expert, int] | None = None
) -> EvictionPolicy:
    """Return an eviction policy by its name, or the one given.

    Raises:
        ValueError: there is none of this name, or ``static`` has no trace.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    if policy == ByTrace.name:
        if trace is None:
            raise ValueError(
                "policy='static': give trace=, how often each expert was chosen "
                "(chronicals.moe.offload.trace_loads reads it from chronicals moe trace)"
            )
        return ByTrace(trace)
    return POLICIES[policy]()


def hold_experts(
    model: Any, budgets: Budgets, shared: str | None = None, in_fp8: bool = False
) -> ExpertEngine:
    """Move the experts of a loaded model into records; the engine has no slots yet.

    Args:
        model: a causal language model.
        budgets: memory that they may take.
        shared: name of memory that processes share.
        in_fp8: products of 16-bit experts run in FP8.

    Raises:
        ValueError: the model has no experts of a known form, or they do not fit.
    """
    modules = expert_modules(model)
    _check_whole(model)
    if hasattr(model, DEQUANTISED):
        logger.warning(WERE_DEQUANTISED, "chronicals.offload(folder) keeps them in FP8")
    forms = {path: _form_of(model, path, module) for path, module in modules.items()}
    in_fp8 = in_fp8 or any(IN_FP8 in vars(module) for module in modules.values())
    formats = {path: formats_of(module, in_fp8) for path, module in modules.items()}
    del modules
    return _replaced(model, budgets, forms, formats, shared)


def _replaced(
    model: Any,
    budgets: Budgets,
    forms: Mapping[str, Any],
    formats: Mapping[str, Mapping[str, StackFormat]],
    shared: str | None,
) -> ExpertEngine:
    """Put streamed experts in the place of a model's, given forms and formats by path."""
    engine = stream_experts(model, budgets, formats, shared)
    for path, module in streamed_experts_of(model):
        _install(module, forms[path])
    model.save_pretrained = MethodType(_save_pretrained, model)
    return engine


def _check_whole(model: Any) -> None:
    """Refuse a model whose weights are divided among processes."""
    divided = any(hasattr(p, SHARING_RANKS) for p in model.parameters())
    if divided or STORED_ROWS in vars(model) or next(model.parameters()).is_meta:
        raise ValueError(
            "sharding='weights': every process has a share of the weights, and experts are "
            "offloaded whole; take sharding='optimizer' or 'none'"
        )


def _form_of(model: Any, path: str, module: nn.Module) -> Any:
    """Return the forward that computes a module of experts by products.

    Raises:
        ValueError: its class has no known form.
    """
    inner = class_module(module)
    plan = plan_for(model)
    _, form = plan.forms.get(signature(inner), (None, None))
    if form is None or form.by != experts.FUSED_EXPERTS:
        reason = plan.seen.get(signature(inner)) or plan.reasons.get("model") or "unknown form"
        raise ValueError(
            f"{path}: the experts of {type(inner).__name__} are computed by no product that reads "
            f"them from slots ({reason}); this model cannot be offloaded"
        )
    if is_parallel(inner):
        raise ValueError(f"{path}: its experts are on several ranks; offload them on one")
    return form.forward


def _install(module: StreamedExperts, forward: Any) -> None:
    """Let streamed experts be computed by the products of a form; ``unpatch_model`` leaves it."""
    streamed = partial(forward)
    setattr(streamed, TAKES_FACTORS, True)
    setattr(streamed, TAKES_STACKS, True)
    inner = module.inner
    vars(inner).pop("forward", None)
    inner.forward = MethodType(streamed, inner)
    implementation = getattr(getattr(inner, "config", None), "_experts_implementation", None)
    vars(inner)[experts.IMPLEMENTATION] = implementation


def _save_pretrained(model: Any, *given: Any, **named: Any) -> Any:
    """Save adapters; refuse to save the model itself, whose experts are in no parameter."""
    save = type(model).save_pretrained
    if save.__module__.startswith("transformers."):
        raise ValueError(
            f"save_pretrained: the experts of this {type(model).__name__} are offloaded and would "
            "be missing in the files; save its adapters, or load the model without offload"
        )
    return save(model, *given, **named)
