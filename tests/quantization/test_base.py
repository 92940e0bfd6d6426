"""A weight format of one's own, which nothing in the package knows, trains a step; and what the
formats say of themselves.
"""

import pytest
import torch

import families
from chronicals.kernels.products import linear, product
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.lora.merged_linear import MergedWeights
from chronicals.patching import decoder_layer, patch_parts, run_in_format, unfuse_weights
from chronicals.patching.decoder_layer import FUSED_LAYER
from chronicals.quantization import Base, Dense, FP8Base, FP8InHost


class Eighths(Base):
    """W in whole eighths, a byte a value."""

    def __init__(self, weight, device):
        super().__init__(weight.matrix.shape, weight.dtype, weight.parts)
        self.weight = weight
        self.version = None
        self.values = None

    def dense(self):
        version = [part._version for part in self.parts]
        if self.version != version:
            self.version = version
            self.values = (8 * self.weight.matrix).round().clamp(-128, 127).to(torch.int8)
        return self.values.to(self.dtype) / 8

    def forward(self, x, bias=None, dtype=None):
        y = linear(x.dense, self.dense(), dtype)
        return y if bias is None else y + bias

    def input_gradient(self, dy):
        return dy.dense @ self.dense()

    def weight_gradient(self, dy, x):
        return product(dy.dense.t(), x.dense, self.dtype) if self.trained else None

    @classmethod
    def bytes_a_value(cls, itemsize):
        return 1


def model_of(adapted):
    model = families.build("qwen2").double()
    if adapted:
        apply_lora(model, LoRAConfig(rank=4, dropout=0.0))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
    return model


def trained(model, batch):
    """Gradients of a step of SGD, and of the next."""
    first = families.states_and_gradients(model, batch)
    with torch.no_grad():
        for name in first.keys() - {"states"}:
            model.get_parameter(name).sub_(0.125 * first[name])
    return first | {
        f"then {name}": x for name, x in families.states_and_gradients(model, batch).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_a_format_of_ones_own_trains(adapted):
    """With adapters, two steps are those of the class whose weights are what the format makes of
    them; without, the first gradients are, and the weights themselves are updated."""
    model = model_of(adapted)
    batch = families.documents_batch()
    rounded = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if "_proj" in name and "weight" in name and p.ndim == 2
    }
    for p in rounded.values():
        p.copy_((8 * p).round().clamp(-128, 127) / 8)
    patch_parts(model, whole_layers=True)
    layers = len(model.get_decoder().layers)
    before = decoder_layer.runs[FUSED_LAYER]
    assert run_in_format(model, Eighths).chosen == 4 * layers
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = trained(model, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + 2 * layers
    unfuse_weights(model)
    assert all(torch.equal(p, own[name]) != (name in found) for name, p in model.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(rounded.get(name, own[name]))
    expected = trained(model, batch)
    compared = [name for name in expected if adapted or "then" not in name]
    families.assert_same(*({name: given[name] for name in compared} for given in (expected, found)))


def test_bytes_are_those_on_the_device_of_the_products():
    """As a frozen weight is held: 2 in 16 bit, with both layouts in FP8 2 more, in host memory
    but one of them.
    """
    weights = [torch.randn(32, 48, dtype=torch.bfloat16), torch.randn(16, 48, dtype=torch.bfloat16)]
    device = torch.device("cpu")
    held = [
        MergedWeights.fused(weights, [None, None], (4, 4), stands, at).base
        for stands, at in ((None, None), (FP8Base, None), (FP8InHost, device), (Eighths, None))
    ]
    assert [base.bytes / (48 * 48) for base in held] == [2, 4, 1, 1]
    assert isinstance(held[0], Dense) and all(base.dense().shape == (48, 48) for base in held)
    weights[0].requires_grad_()
    assert held[1].bytes == 2 * 48 * 48, "a trained weight is quantised at each use"
