"""4-bit weights in files and layers, against bitsandbytes itself, both ways."""

import itertools
import json

import pytest
import torch

from chronicals.kernels.nf4 import BLOCK_SIZES
from chronicals.quantization import Packed, bitsandbytes
from chronicals.quantization.bitsandbytes import (
    BITSANDBYTES_DTYPES,
    read_weight,
    stored_tensors,
    weight_of_layer,
)
from mutants import mutant

NAME = "model.layers.0.q_proj.weight"
SHAPES = [(37, 96), (5, 7), (640, 128)]


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes")


def written(
    bnb, shape=(37, 96), dtype=torch.bfloat16, code="nf4", nested=True, block=64, device="cpu"
):
    """What bitsandbytes stores, by name, and the values that it reads from that."""
    packed, state = bnb.functional.quantize_4bit(
        torch.randn(shape, device=device).to(dtype),
        blocksize=block,
        quant_type=code,
        compress_statistics=nested,
    )
    entries = {f"{NAME}.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {NAME: packed, **entries}, bnb.functional.dequantize_4bit(packed, state)


def layer_of(bnb, shape=(48, 64), bias=True, dtype=torch.bfloat16, **options):
    layer = bnb.nn.Linear4bit(
        shape[1], shape[0], bias, compute_dtype=dtype, quant_type="nf4", **options
    )
    layer.weight = bnb.nn.Params4bit(
        torch.randn(shape, dtype=dtype),
        quant_type="nf4",
        module=layer,
        quant_storage=layer.quant_storage,
        compress_statistics=options.get("compress_statistics", True),
    )
    return layer.to("cpu")


def same_bytes(one, other):
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key].cpu(), other[key].cpu())
        for key in one
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("code", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_read_and_written_again_byte_for_byte(bnb, nested, code, block, device):
    for shape, dtype in itertools.product(SHAPES, BITSANDBYTES_DTYPES.values()):
        stored, expected = written(bnb, shape, dtype, code, nested, block, device)
        weight = read_weight(NAME, {**stored, "other.weight": torch.zeros(3)})
        assert (weight.shape, weight.dtype, weight.code, weight.block) == (
            shape,
            dtype,
            code,
            block,
        )
        if (
            device.type == "cuda" or not shape[1] % block
        ):  # else its kernel for the CPU takes scales of other blocks
            assert torch.equal(weight.dense(), expected)
        assert weight.codes.data_ptr() == stored[NAME].data_ptr()
        again = stored_tensors(NAME, weight)
        assert same_bytes(again, stored) and set(Packed.stored_weights(again)) == {NAME}


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_bitsandbytes_reads_what_is_written(bnb, nested):
    stored, expected = written(bnb, shape=(32, 128), nested=nested)
    again = stored_tensors(NAME, read_weight(NAME, stored))
    codes = again.pop(NAME)
    state = bnb.functional.QuantState.from_dict(
        {key.removeprefix(f"{NAME}."): x for key, x in again.items()}, torch.device("cpu")
    )
    assert state.nested == nested
    assert torch.equal(bnb.functional.dequantize_4bit(codes, state), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"compress_statistics": False}, {"quant_storage": torch.bfloat16}], ids=str
)
def test_a_layer_is_what_its_state_says_and_is_not_copied(bnb, options):
    layer = layer_of(bnb, **options)
    weight = weight_of_layer(layer)
    stored = read_weight("weight", layer.state_dict())
    for found in (weight, stored):
        assert (
            torch.equal(found.codes, stored.codes)
            and found.shape == (48, 64)
            and found.dtype == torch.bfloat16
        )
        assert torch.equal(
            found.dense(),
            bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state),
        )
    assert weight.codes.data_ptr() == layer.weight.data_ptr()
    assert weight.scales.absmax.data_ptr() == layer.weight.quant_state.absmax.data_ptr()
    if not options:
        assert same_bytes(
            stored_tensors("weight", weight),
            {k: v for k, v in layer.state_dict().items() if k != "bias"},
        )


def test_a_layer_that_is_not_quantized_yet_is_refused(bnb):
    with pytest.raises(ValueError, match="not quantized yet; move the model"):
        weight_of_layer(bnb.nn.Linear4bit(8, 8))


def test_codes_laid_out_for_the_cpu_are_put_in_order_first():
    class State:
        packing_format_for_cpu = True
        quant_type = "nf4"
        blocksize = 64
        dtype = torch.bfloat16
        shape = torch.Size((2, 64))
        state2 = None
        absmax = torch.ones(2)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(
                torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False
            )
            self.weight.quant_state = State()

        def _save_to_state_dict(self, *_):
            self.weight.data = torch.full((64, 1), 0x5A, dtype=torch.uint8)
            self.weight.quant_state.packing_format_for_cpu = False

    assert (weight_of_layer(Layer()).codes == 0x5A).all()


def described(stored, **changes):
    key = f"{NAME}.quant_state.bitsandbytes__nf4"
    told = json.loads(bytes(stored[key].tolist())) | changes
    return stored | {
        key: torch.tensor(
            list(json.dumps({k: v for k, v in told.items() if v is not None}).encode()),
            dtype=torch.uint8,
        )
    }


def other(stored, key, tensor):
    return stored | {f"{NAME}{key}": tensor}


DAMAGED = {
    "no JSON": (
        lambda s: other(
            s, ".quant_state.bitsandbytes__nf4", torch.full((9,), 200, dtype=torch.uint8)
        ),
        "is no JSON",
    ),
    "a list": (
        lambda s: other(
            s, ".quant_state.bitsandbytes__nf4", torch.tensor([91, 93], dtype=torch.uint8)
        ),
        "is list",
    ),
    "two": (
        lambda s: other(s, ".quant_state.bitsandbytes__fp4", torch.zeros(1)),
        "has .*fp4 and .*nf4",
    ),
    "type": (lambda s: described(s, quant_type="fp4"), "quant_type='fp4', not nf4"),
    "block": (lambda s: described(s, blocksize=48), "blocksize=48, not 32"),
    "no block": (lambda s: described(s, blocksize=None), "blocksize=None"),
    "dtype": (lambda s: described(s, dtype="float64"), "dtype='float64'"),
    "shape": (lambda s: described(s, shape=[2, 3, 4]), r"shape=\[2, 3, 4\]"),
    "no shape": (lambda s: described(s, shape=None), "shape=None"),
    "larger": (lambda s: described(s, shape=[74, 96]), "1776 bytes, its shape needs 3552"),
    "no offset": (lambda s: described(s, nested_offset=None), "nested_absmax: is there"),
    "nested block": (lambda s: described(s, nested_blocksize=None), "nested_blocksize=None"),
    "codes": (lambda s: other(s, "", s[NAME][:-1]), "weight: has 1775 bytes"),
    "scales": (
        lambda s: other(s, ".absmax", s[f"{NAME}.absmax"][1:]),
        "absmax: is torch.uint8 with 55 elements",
    ),
    "type of scales": (
        lambda s: other(s, ".absmax", s[f"{NAME}.absmax"].float()),
        "absmax: is torch.float32",
    ),
    "no number": (
        lambda s: other(s, ".nested_absmax", s[f"{NAME}.nested_absmax"] * torch.nan),
        "absmax: holds what is no",
    ),
    "map": (
        lambda s: other(s, ".quant_map", s[f"{NAME}.quant_map"].flip(0)),
        "quant_map: is not that of nf4",
    ),
    "nested map": (
        lambda s: other(s, ".nested_quant_map", torch.zeros(16)),
        "nested_quant_map: is torch.float32 with 16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_damaged_is_named(bnb, damage):
    change, message = DAMAGED[damage]
    with pytest.raises(ValueError, match=message):
        read_weight(NAME, change(written(bnb)[0]))


def test_what_is_missing_is_named(bnb):
    stored, _ = written(bnb)
    assert len(stored) == 6
    for key in stored:
        with pytest.raises(ValueError, match=f"^{key}: not in the checkpoint"):
            read_weight(NAME, {name: tensor for name, tensor in stored.items() if name != key})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('str(weight.dtype).removeprefix("torch.")', "str(weight.dtype)"),
        ("scales.offset.item()", "0.0"),
        ("float(offset)", "2 * float(offset)"),
        ("-(-rows * columns // block)", "rows * columns // block"),
        ("weight.codes.view(-1, 1)", "weight.codes"),
    ],
)
def test_a_planted_fault_is_found(bnb, old, new):
    wrong = mutant(bitsandbytes, old, new)
    stored, _ = written(bnb)
    try:
        weight = wrong.read_weight(NAME, stored)
    except ValueError:
        return
    assert not same_bytes(wrong.stored_tensors(NAME, weight), stored)
