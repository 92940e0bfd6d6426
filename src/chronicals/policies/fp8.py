"""Products of fused decoder layers and of experts in FP8."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from chronicals.cards import FP8
from chronicals.config import ConfigurationError
from chronicals.kernels.fp8 import lacks_fp8
from chronicals.kernels.fp8_linear import FP8_MULTIPLE
from chronicals.models import input_device
from chronicals.moe.routers import experts_per_token
from chronicals.patching import experts, run_experts_in_fp8, run_in_fp8
from chronicals.patching.forms import signature
from chronicals.patching.layer_policies import MIN_FP8_WIDTH, is_large
from chronicals.patching.plan import plan_for
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Decision, MemoryLoad, OwnField, Stage, register_policy
from chronicals.policies.step_time import LayerPass, StepWork
from chronicals.quantization import FP8Base

logger = logging.getLogger(__name__)

FP8_BYTES = 6
"""Bytes moved to quantise a value for both products that read it: 2 to find the tensor's largest,
2 to quantise, 1 for each of two layouts (``kernels.fp8``).
"""

ADDED_BYTES = 4
"""Bytes moved for an output and for an input's gradient of a product in FP8 that has adapters: they
are read and written once more to add the adapters' products (``lora.merged_linear``).
"""


class ProductsInFP8(OwnField):
    """Frozen weights are quantised once, trained ones at each use."""

    name = "use_fp8"
    title = "FP8"
    runs_as = "frozen weights quantised once, trained ones at each use"
    setting = "use_fp8=True cannot be honoured here"
    before_memory = True
    stage = Stage.WEIGHTS

    def why_not(self, facts: Facts) -> str | None:
        """Return what the card, the number of tokens or the model lacks for FP8."""
        lacks = lacks_fp8(input_device(facts.model))
        if lacks:
            return f"{lacks}; leave it out"
        if facts.unfused is None:
            if facts.tokens % FP8_MULTIPLE:
                shared = " / context_parallel" if facts.context > 1 else ""
                return (
                    f"batch_size * max_seq_length{shared}={facts.tokens} is no multiple of "
                    f"{FP8_MULTIPLE}; leave it out"
                )
            return None
        config = facts.config
        if facts.on_card and config.use_fused_kernels and config.mixed_precision != "fp16":
            # Experts run as grouped products, also where no layer around them is fused.
            forms = plan_for(facts.model).forms
            for module in facts.model.modules():
                key = signature(module)
                if key in forms and forms[key][1].by == experts.FUSED_EXPERTS:
                    return None
        return (
            "only fused decoder layers and experts have FP8 products, and none run "
            f"({facts.unfused}); leave it out"
        )

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Frozen weights are there in FP8 too; trained products keep their inputs in 8 bits."""
        step = replace(load.step, in_fp8=facts.in_fp8)
        return replace(load, step=step, frozen=FP8Base.bytes_a_value(load.step.element))

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with large products in FP8, and with what quantises their operands."""
        adapted = work.job.rank > 0
        return replace(
            work,
            forward=with_products_in_fp8(work.forward, adapted),
            backward=with_products_in_fp8(work.backward, adapted),
            forwards=tuple(
                replace(each, layers=with_products_in_fp8(each.layers, each.job.rank > 0))
                if each.is_of_trained_model
                else each
                for each in work.forwards
            ),
        )

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Choose the products that run in FP8, by their size.

        Raises:
            ConfigurationError: none is large enough.
        """
        layers = run_in_fp8(model)
        try:
            each = experts_per_token(model)
        except ValueError:  # the configuration names no number, as where there are no experts
            each = 1
        stacked = run_experts_in_fp8(model, facts.tokens * each)
        if not layers.chosen and not stacked.layers:
            reason = (
                f"no product of this model has inputs and outputs of a harmonic mean of {MIN_FP8_WIDTH}, "
                "and FP8 does not pay for less"
            )
            if layers.left:
                reason = f"its layers do not run fused: {', '.join(layers.left)}"
            if stacked.left:
                reason += f"; its experts stay in 16 bit: {', '.join(stacked.left)}"
            raise ConfigurationError(f"{self.setting}: {reason}; leave it out")
        if layers.left:
            logger.warning(
                "use_fp8: some layers do not run fused and stay in 16 bit: %s",
                ", ".join(layers.left),
            )
        if stacked.left:
            logger.warning("use_fp8: some experts stay in 16 bit: %s", ", ".join(stacked.left))
        if layers.total:
            logger.info(
                "use_fp8: %d of %d products of fused layers, those whose inputs and outputs have "
                "a harmonic mean of at least %s",
                layers.chosen,
                layers.total,
                MIN_FP8_WIDTH,
            )
        if stacked.layers:
            logger.info(
                "use_fp8: both products of the experts of %d layers; gradients of their weights "
                "in 16 bit",
                stacked.layers,
            )


register_policy(ProductsInFP8())


def with_products_in_fp8(made: LayerPass, adapted: bool) -> LayerPass:
    """Return a pass whose large products are in FP8.

    Forward and for the gradient of inputs an activation is quantised, or its gradient; frozen
    weights are quantised once, and those that are trained in the product for their gradient.

    Args:
        made: the pass in 16 bits.
        adapted: True if products have adapters, which are added in 16 bits.
    """
    products = []
    moved = made.moved
    for each in made.products:
        one = each.product
        if is_large(one.inputs, one.outputs):
            each = replace(each, form=FP8)
            read = {
                "forward": one.rows * one.inputs,
                "dX": one.rows * one.outputs,
                "dW": one.inputs * one.outputs,
            }
            added = {"forward": one.rows * one.outputs, "dX": one.rows * one.inputs, "dW": 0}
            moved += each.times * FP8_BYTES * read[one.kind]
            moved += each.times * ADDED_BYTES * added[one.kind] * adapted
        products.append(each)
    return replace(made, products=tuple(products), moved=moved)
