"""AdapterLayer: the base class of all adapted layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig


class AdapterLayer(nn.Module, ABC):
    """A frozen ``base_layer`` with a trained product ``s · B A`` beside one of its weights. A ``[r,
    in]`` and B ``[out, r]`` are fp32 whatever the base is.

    Attributes:
        MATRICES: names of A and B.
        scale: s.
        dropout: probability with which an element of the input of A is dropped in training.
        enabled: whether the adapter is on (``without_adapters``).
    """

    MATRICES = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Module, config: LoRAConfig):
        super().__init__()
        self.base_layer = base_layer
        if not isinstance(base_layer, AdapterLayer):  # the matrices of another adapter stay trained
            base_layer.requires_grad_(False)
        self.scale = config.scale
        self.dropout = config.dropout
        self.enabled = True

    def _make_matrices(
        self, a_shape: tuple[int, int], b_shape: tuple[int, int], device: torch.device
    ) -> None:
        """Register A and B as parameters, uninitialised."""
        for name, shape in zip(self.MATRICES, (a_shape, b_shape), strict=True):
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))
            )

    @property
    def pair(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B."""
        a, b = (self.get_parameter(name) for name in self.MATRICES)
        return a, b

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that are trained and saved."""
        return self.MATRICES

    def named_at(self, path: str) -> str:
        """Return the name of the adapted weight in patterns of ranks and in PEFT's configuration.

        Args:
            path: path of the layer.
        """
        return path

    @property
    def is_fresh(self) -> bool:
        """True if the layer computes the same as without its adapter, as one of A and B is zero.
        The host waits for the device.
        """
        return not all(bool(matrix.any()) for matrix in self.pair)

    @abstractmethod
    def merge(self) -> None:
        """Add ``s · B A`` to the base's weight, summed in at least fp32 and rounded once."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "base_layer" and type(value).__module__.startswith("peft."):
            raise ValueError(
                f"PEFT's {type(value).__name__} would go into an adapter of ours: call "
                "merge_and_unload() first"
            )
        super().__setattr__(name, value)


def exact(weight: Tensor) -> Tensor:
    """Return the weight in at least fp32."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


@torch.no_grad()
def draw(matrix: nn.Parameter, initialise: Callable[[Tensor], Any]) -> None:
    """Fill a matrix with random numbers.

    They are drawn on the host, so that a seed gives the same adapters on every device, and for a
    model that is still in host memory before it is sharded.

    Args:
        initialise: fills a tensor in place, such as ``nn.init.normal_``.
    """
    values = torch.empty_like(matrix, device="cpu")
    initialise(values)
    matrix.copy_(values)


def in_file(name: str) -> str:
    """Return the name of a trained parameter in PEFT's files, where A and B of a linear layer are
    layers themselves.
    """
    return f"{name}.weight" if name in AdapterLayer.MATRICES else name
