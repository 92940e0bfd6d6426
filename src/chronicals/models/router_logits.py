"""Router logits for transformers classes that do not record them, read by hooks on the routers.

Shapes: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from chronicals.models.routed_experts import (
    count_of,
    routed_experts,
    router_within,
    without_adapters,
)
from chronicals.versions import ROUTERS_RECORDED, transformers_before

_NAME = "router_logits"
"""Name of router logits among the outputs of transformers."""


def unrecorded_routers(model: Any) -> tuple[nn.Module, ...]:
    """Return the routers whose logits the decoder's class does not record, in the order of layers.

    Empty if the class records them, or if a layer has no recognisable router.
    """
    if not transformers_before(ROUTERS_RECORDED):
        return ()
    decoder = model.get_decoder()
    if _NAME in (getattr(decoder, "_can_record_outputs", None) or {}):
        return ()
    width = model.get_input_embeddings().weight.shape[1]
    routers = []
    for path, experts in routed_experts(model).items():
        block = decoder.get_submodule(without_adapters(path).rpartition(".")[0])
        router = router_within(block, count_of(experts), width)
        if router is None:
            return ()
        routers.append(block.get_submodule(without_adapters(router[0])))
    return tuple(routers)


@contextmanager
def reading_logits(routers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A context that yields a list; each call of these routers appends its logits ``[T, E]``."""
    logits: list[Tensor] = []

    def read(_: nn.Module, args: tuple, output: Any) -> None:
        # A router that returns several tensors returns the logits first.
        first = output if isinstance(output, Tensor) else output[0]
        logits.append(first.reshape(-1, first.shape[-1]))

    with ExitStack() as hooks:
        for router in routers:
            hooks.callback(router.register_forward_hook(read).remove)
        yield logits


def router_logits_of(output: Any, read: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the router logits that a class recorded in its output, else those that hooks read."""
    return output.get(_NAME) or read
