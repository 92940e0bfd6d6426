"""Grouped products of few tokens: as exact as those over dense weights in every format, from any
slots, and of no other experts than those that were chosen.
"""

import sys

import pytest
import torch
from test_expert_dispatch import drawn
from test_nf4_product import weight

from chronicals.kernels import weight_tile
from chronicals.kernels.expert_dispatch import Dispatch, dispatch_reference, dispatch_to_experts
from chronicals.kernels.expert_stacks import (
    StackIn4Bits,
    StackIn16Bits,
    StackInFP8,
    StackInGGUF,
    StackInMXFP4,
)
from chronicals.kernels.few_tokens_product import (
    are_few_tokens,
    few_tokens_launch,
    few_tokens_product,
    few_tokens_product_reference,
    rows_at_once,
)
from chronicals.kernels.gguf_blocks import GGUF_KINDS, dequantize_gguf_reference
from chronicals.kernels.low_rank_term import LowRankTerm
from chronicals.kernels.mxfp4 import dequantize_mxfp4_reference
from chronicals.kernels.nf4 import Scales, dequantize_4bit_reference
from drawn_blocks import random_blocks
from mutants import importing, mutant

module = sys.modules["chronicals.kernels.few_tokens_product"]

CASES = [
    (1, 1, 1, 64, 16),
    (1, 3, 5, 192, 70),
    (37, 2, 4, 128, 24),
    (64, 3, 8, 320, 67),
    (20, 4, 16, 64, 128),
]
"""Tokens, experts of a token, experts, columns, outputs."""


def in_16_bits(slots, outputs, columns, dtype, device):
    return StackIn16Bits(torch.randn(slots, outputs, columns, device=device).to(dtype))


def transposed(slots, outputs, columns, dtype, device):
    return StackIn16Bits(torch.randn(slots, columns, outputs, device=device).to(dtype).mT)


def in_fp8(slots, outputs, columns, dtype, device, high=128, wide=128):
    values = torch.randn(slots, outputs, columns, device=device).to(torch.float8_e4m3fn)
    shape = slots, -(-outputs // high), -(-columns // wide)
    scales = torch.empty(shape, device=device).uniform_(0.1, 2.0)
    return StackInFP8(values, scales, high, wide)


def in_fp8_of_experts(slots, outputs, columns, dtype, device):
    stack = in_fp8(slots, outputs, columns, dtype, device)
    return StackInFP8.of_experts(stack.values, stack.scales[:, 0, 0].contiguous())


def in_mxfp4(slots, outputs, columns, dtype, device):
    codes = torch.randint(0, 256, (slots, outputs, columns // 2), device=device)
    scales = torch.randint(122, 128, (slots, outputs, columns // 32), device=device)
    return StackInMXFP4(codes.to(torch.uint8), scales.to(torch.uint8))


def in_4_bits(slots, outputs, columns, dtype, device, nested=True, block=64, code="nf4"):
    packed, scales = weight(slots * outputs, columns, device, block=block, nested=nested, code=code)
    return StackIn4Bits.of_matrix(packed, scales, slots, outputs, block, code)


def in_4_bits_by_slot(slots, outputs, columns, dtype, device):
    """Each slot has scales of scales of its own, as in a record of one expert."""
    packed, scales = weight(slots * outputs, columns, device)
    absmax = scales.absmax.view(slots, -1)
    of_each = -(-absmax.shape[1] // scales.block2)
    second = torch.rand(slots, of_each, device=device) + 0.5
    return StackIn4Bits(
        packed.view(slots, -1), Scales(absmax, second, scales.code2, scales.offset), outputs
    )


def in_gguf(kind):
    def stack(slots, outputs, columns, dtype, device):
        columns = -(-columns // GGUF_KINDS[kind][0]) * GGUF_KINDS[kind][0]
        packed = random_blocks(slots * outputs, columns, kind, decades=2).to(device)
        return StackInGGUF(packed.view(slots, outputs, -1), kind)

    return stack


FORMATS = {
    "16 bit": in_16_bits,
    "transposed": transposed,
    "fp8 in blocks": in_fp8,
    "fp8, a scale an expert": in_fp8_of_experts,
    "mxfp4": in_mxfp4,
    "nf4": in_4_bits,
    "nf4, plain scales": lambda *of: in_4_bits(*of, nested=False),
    "nf4, scales by slot": in_4_bits_by_slot,
    "fp4 in blocks of 32": lambda *of: in_4_bits(*of, block=32, code="fp4"),
    **{kind: in_gguf(kind) for kind in GGUF_KINDS},
}


def apart(x):
    """The same values ``[slots, …]`` with something else between the slots."""
    between = 48 // x.element_size()
    room = torch.full((len(x), x[0].numel() + between), 77, device=x.device).to(x.dtype)
    view = room[:, : x[0].numel()].view(x.shape)
    return view.copy_(x)


def in_records(stack):
    """The same stack, its slots as far apart as those of records."""
    if isinstance(stack, StackIn16Bits):
        return StackIn16Bits(apart(stack.values.contiguous()))
    if isinstance(stack, StackInFP8):
        # no copy is filled in FP8
        values = apart(stack.values.view(torch.uint8)).view(torch.float8_e4m3fn)
        return StackInFP8(values, apart(stack.scales), stack.high, stack.wide)
    if isinstance(stack, StackInMXFP4):
        return StackInMXFP4(apart(stack.codes), apart(stack.scales))
    if isinstance(stack, StackInGGUF):
        return StackInGGUF(apart(stack.packed), stack.kind)
    scales = stack.scales
    second = scales.absmax2
    if second is not None and second.ndim == 2:
        second = apart(second)
    scales = Scales(apart(scales.absmax), second, scales.code2, scales.offset, scales.block2)
    return StackIn4Bits(apart(stack.packed), scales, stack.outputs, stack.block, stack.code)


def check(
    case,
    format,
    dtype,
    device,
    of=module,
    of_tokens=True,
    bias=False,
    rank=0,
    mapped=False,
    tall=None,
    one_sided=False,
):
    """Against fp64 of the values that the stack stands for, beside the plain product's own error.

    Args:
        mapped: experts are in slots in another order, beside others, those without rows in none.
        tall: rows of a tile of the dispatch.
        one_sided: all tokens but the last choose the first expert.
    """
    tokens, each, experts, columns, outputs = case
    chosen = drawn(tokens, each, experts, device)
    if one_sided:
        chosen = torch.zeros_like(chosen)
        chosen[-1] = experts - 1
    to = dispatch_to_experts(chosen, experts)
    if tall is not None:
        to = Dispatch(*dispatch_reference(chosen.reshape(-1), experts, tall), to.each, tall)
    slots = experts + 2 if mapped else experts
    stack = FORMATS[format](slots, outputs, columns, dtype, device)
    columns = stack.layout.columns
    slot_of_expert = None
    of_expert = torch.arange(experts, device=device)
    if mapped:
        stack = in_records(stack)
        of_expert = torch.randperm(slots, device=device)[:experts]
        has_rows = torch.isin(torch.arange(experts, device=device), chosen)
        slot_of_expert = torch.where(has_rows, of_expert, -1).int()
    shape = tokens if of_tokens else len(to.order_S), columns
    # values of GGUF are large, and sums must stay within fp16
    x = (torch.randn(*shape, device=device) / 256).to(dtype)
    given = torch.randn(slots, outputs, device=device).to(dtype) if bias else None
    adapted = None
    if rank:
        u = torch.randn(len(to.order_S), rank, device=device).to(dtype)
        adapted = LowRankTerm(u, torch.randn(experts, outputs, rank, device=device).to(dtype))
    arguments = x, stack, to, of_tokens, given, adapted, slot_of_expert
    got = of.few_tokens_product(*arguments)
    plain = few_tokens_product_reference(*arguments)

    of_row = chosen.reshape(-1)[to.order_S.long()]
    dense = torch.stack([stack.dense(slot, dtype).double() for slot in range(slots)])
    rows = x.double()[to.order_S.long() // to.each] if of_tokens else x.double()
    exact = torch.einsum("sk,snk->sn", rows, dense[of_expert[of_row]])
    if adapted is not None:
        exact += torch.einsum("sr,snr->sn", adapted.u_SR.double(), adapted.up_ENR.double()[of_row])
    if given is not None:
        exact += given.double()[of_expert[of_row]]
    assert got.shape == exact.shape and got.dtype == dtype
    ours, theirs = (float((y.double() - exact).norm() / exact.norm()) for y in (got, plain))
    assert ours <= 1.5 * theirs < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_over_shapes(case, format, dtype, device):
    check(case, format, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("of_tokens", [True, False], ids=["tokens", "sorted"])
def test_from_slots_with_a_bias_and_an_adapter(format, of_tokens, device):
    options = {"of_tokens": of_tokens, "bias": True, "rank": 5, "mapped": True}
    check((9, 2, 7, 192, 37), format, torch.bfloat16, device, **options)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["16 bit", "nf4"])
@pytest.mark.parametrize("tall", [16, 64])
def test_an_expert_with_more_rows_than_are_multiplied_at_once(tall, format, device):
    """39 of 40 tokens chose the same of four experts: four times the mean."""
    assert rows_at_once(40, 4, tall) == min(tall, 32)
    check((40, 1, 4, 64, 24), format, torch.bfloat16, device, tall=tall, one_sided=True)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [256, 1024])
def test_blocks_of_fp8_that_are_several_steps(wide, device):
    stack = in_fp8(2, 40, 640, torch.bfloat16, device, high=16, wide=wide)
    to = dispatch_to_experts(torch.tensor([[1], [0], [1]], device=device), 2)
    x = torch.randn(3, 640, device=device).bfloat16()
    got, expected = (
        f(x, stack, to, True).double() for f in (few_tokens_product, few_tokens_product_reference)
    )
    assert (got - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("format", ["16 bit", "transposed", "fp8, a scale an expert"])
def test_rows_of_any_length(format, device):
    check((9, 2, 4, 24, 40), format, torch.bfloat16, device, bias=True)
    check((9, 2, 4, 133, 1), format, torch.bfloat16, device, mapped=True)


def test_every_value_of_e4m3_is_exact(device):
    """Also those below the least normal number; NaN stays NaN."""
    bits = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256, 1)
    stack = StackInFP8.of_experts(
        bits.view(torch.float8_e4m3fn).expand(1, 256, 2).contiguous(), torch.ones(1, device=device)
    )
    to = dispatch_to_experts(torch.zeros(1, 1, dtype=torch.int64, device=device), 1)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([[1.0, 0.0]], device=device).to(dtype)
        got = few_tokens_product(x, stack, to)
        expected = stack.values[0, :, 0].float().to(dtype)
        nan = expected.isnan()
        assert torch.equal(got[0, ~nan], expected[~nan]) and got[0, nan].isnan().all()
        assert nan.sum() == 2


def test_values_of_a_stack_are_those_of_its_format(device):
    dtype = torch.bfloat16
    stack = in_mxfp4(3, 5, 64, dtype, device)
    whole = dequantize_mxfp4_reference(stack.codes, stack.scales, (15, 64), dtype)
    assert_values(stack, whole)
    packed, scales = weight(15, 64, device)
    whole = dequantize_4bit_reference(packed, scales, (15, 64), dtype)
    assert_values(StackIn4Bits.of_matrix(packed, scales, 3, 5, 64, "nf4"), whole)
    blocks = random_blocks(15, 256, "Q6_K").to(device)
    whole = dequantize_gguf_reference(blocks, (15, 256), dtype, "Q6_K")
    assert_values(StackInGGUF(blocks.view(3, 5, -1), "Q6_K"), whole)


def assert_values(stack, matrix):
    slots, outputs = stack.layout.slots, stack.layout.outputs
    for slot in range(slots):
        values = stack.dense(slot, matrix.dtype)
        assert torch.equal(values, matrix.view(slots, outputs, -1)[slot])


def of_two_experts(format, device):
    """Rows of experts 0 and 2 of four."""
    stack = FORMATS[format](4, 16, 64, torch.bfloat16, device)
    to = dispatch_to_experts(torch.tensor([[2, 0], [0, 2]], device=device), 4)
    x = torch.randn(2, stack.layout.columns, device=device).bfloat16()
    return x, stack, to


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_slots_change_no_bit(format, device):
    """Only slots that were chosen are read: what the others hold does not matter."""
    x, stack, to = of_two_experts(format, device)
    expected = few_tokens_product(x, stack, to, True)
    if stack.layout.blocks_before:
        return  # scales that go on from slot to slot cannot be moved
    order = [3, 1, 0, 2]  # the slot of each expert
    moved = in_records(stack)
    for tensor, own in zip(moved.tensors, stack.tensors):
        if tensor.ndim > 1:
            tensor.view(torch.uint8).fill_(255) if tensor.element_size() == 1 else tensor.fill_(
                float("nan")
            )
            for expert in (0, 2):
                tensor[order[expert]] = own[expert]
    slot_of_expert = torch.tensor([3, -1, 0, -1], dtype=torch.int32, device=device)
    got = few_tokens_product(x, moved, to, True, slot_of_expert=slot_of_expert)
    assert got.isfinite().all() and torch.equal(got, expected)


def test_no_other_experts_are_read(device):
    x, stack, to = of_two_experts("16 bit", device)
    expected = few_tokens_product(x, stack, to, True)
    stack.values[[1, 3]] = float("nan")
    got = few_tokens_product(x, stack, to, True)
    assert torch.equal(got, expected) and got.isfinite().all()


def test_an_expert_without_a_slot_is_refused_where_the_host_can_see_it(device):
    x, stack, to = of_two_experts("16 bit", device)
    slot_of_expert = torch.tensor([0, 1, -1, 2], dtype=torch.int32, device=device)
    few_tokens_product(x, stack, to, True, slot_of_expert=slot_of_expert)  # reads nothing there
    with pytest.raises(ValueError, match="expert 2 has 2 rows and slot -1 of 4: copy it"):
        few_tokens_product_reference(x, stack, to, True, slot_of_expert=slot_of_expert)


def test_rows_of_other_dtypes_take_the_reference(device):
    values = torch.randn(4, 16, 64, device=device)
    chosen = torch.tensor([[2, 0], [0, 2]], device=device)
    to = dispatch_to_experts(chosen, 4)
    x = torch.randn(2, 64, device=device)
    got = few_tokens_product(x, StackIn16Bits(values), to, True)
    expected = torch.einsum("tk,tjnk->tjn", x, values[chosen])
    assert torch.allclose(got[to.places_S.long()].view(2, 2, 16), expected, atol=1e-5)


def test_strided_rows_and_biases(device):
    x, stack, to = of_two_experts("16 bit", device)
    bias = torch.randn(4, 32, device=device).bfloat16()
    expected = few_tokens_product(x, stack, to, True, bias[:, ::2].contiguous())
    strided = torch.stack([x, x], 2)[..., 0]
    assert strided.stride(1) == 2
    assert torch.equal(few_tokens_product(strided, stack, to, True, bias[:, ::2]), expected)


def test_a_launch_fills_the_card(device):
    layout = StackIn16Bits(torch.empty(128, 1536, 2048, device="meta")).layout
    few = few_tokens_launch(2, 128, 64, layout, torch.device("cpu"))
    assert few.outputs == 64 and few.rows == 16
    small = layout._replace(outputs=48)
    assert few_tokens_launch(1, 128, 64, small, torch.device("cpu")).outputs == 16
    assert rows_at_once(8, 128, 64) == 16
    assert rows_at_once(128, 8, 64) == 32
    assert rows_at_once(128, 2, 64) == 32 and rows_at_once(128, 2, 16) == 16


def test_which_rows_are_few(device):
    def are_few(tokens, dtype=torch.bfloat16):
        to = dispatch_to_experts(torch.zeros(tokens, 2, dtype=torch.int64, device=device), 3)
        return are_few_tokens(torch.zeros(2 * tokens, 64, dtype=dtype, device=device), to)

    assert are_few(1) and are_few(64) and are_few(1, dtype=torch.float16)
    assert not are_few(65) and not are_few(0) and not are_few(1, dtype=torch.float32)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_kinds_that_take_many_instructions_are_for_fewer_tokens(kind, device):
    stack = FORMATS[kind](2, 4, 256, torch.bfloat16, device)
    assert stack.most_tokens == {"Q4_0": 16, "Q6_K": 8}.get(kind, 64)
    assert FORMATS["16 bit"](2, 4, 256, torch.bfloat16, device).most_tokens == 16


def test_sizes_that_do_not_fit(device):
    x, stack, to = of_two_experts("16 bit", device)
    with pytest.raises(ValueError, match=r"x is \(2, 64\): expected \(4, 64\)"):
        few_tokens_product(x, stack, to)
    with pytest.raises(ValueError, match="3 slots for 4 experts: give slot_of_expert"):
        few_tokens_product(x, StackIn16Bits(stack.values[:3]), to, True)
    slots = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"int64 \(4,\): expected torch.int32"):
        few_tokens_product(x, stack, to, True, slot_of_expert=slots)
    with pytest.raises(ValueError, match=r"bias is \(4, 8\): expected \(4, 16\)"):
        few_tokens_product(x, stack, to, True, stack.values[:, :8, 0])
    with pytest.raises(ValueError, match="weights or adapter {torch.float16}: give one"):
        few_tokens_product(x, StackIn16Bits(stack.values.half()), to, True)


def test_stacks_that_do_not_fit(device):
    byte = torch.uint8
    with pytest.raises(ValueError, match="expected \\[slots, N, K\\]"):
        StackIn16Bits(torch.zeros(4, 4))
    values = torch.zeros(2, 4, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"expected torch.float32 \(2, 1, 2\) for blocks"):
        StackInFP8(values, torch.zeros(2, 1, 1))
    with pytest.raises(ValueError, match="wide=32: give a multiple of 128, or all 256"):
        StackInFP8(values, torch.zeros(2, 1, 8), 128, 32)
    with pytest.raises(ValueError, match="beside \\[slots, N, K / 32\\]"):
        StackInMXFP4(torch.zeros(2, 4, 16, dtype=byte), torch.zeros(2, 4, 2, dtype=byte))
    with pytest.raises(ValueError, match="are not 3 rows of whole blocks of 64"):
        StackIn4Bits(torch.zeros(2, 64, dtype=byte), Scales(torch.zeros(2, 2)), 3)
    with pytest.raises(ValueError, match=r"absmax is \(2, 1\): expected \(2, 2\)"):
        StackIn4Bits(torch.zeros(2, 64, dtype=byte), Scales(torch.zeros(2, 1)), 2)
    with pytest.raises(ValueError, match="18 bytes for each block of Q4_0"):
        StackInGGUF(torch.zeros(2, 4, 20, dtype=byte), "Q4_0")
    with pytest.raises(ValueError, match="only slots may lie apart"):
        StackInGGUF(torch.zeros(2, 4, 36, dtype=byte)[..., ::2], "Q4_0")


@pytest.mark.parametrize("format", ["16 bit", "nf4"])
def test_it_is_an_operator_of_torch(format, device):
    x, stack, to = of_two_experts(format, device)
    slots = torch.arange(4, dtype=torch.int32, device=device)
    dispatch = to.order_S, to.bounds, to.tiles, to.each, to.rows
    given = x, stack.tensors, list(stack.layout), slots, *dispatch, True, None, None, None
    torch.library.opcheck(module._product, given)


@pytest.mark.gpu
def test_a_graph_captures_it_and_reads_the_map_when_it_is_replayed(device):
    x, stack, to = of_two_experts("16 bit", device)
    slots = torch.tensor([0, -1, 1, -1], dtype=torch.int32, device=device)
    few_tokens_product(x, stack, to, True, slot_of_expert=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = few_tokens_product(x, stack, to, True, slot_of_expert=slots)
    slots.copy_(torch.tensor([3, -1, 2, -1], dtype=torch.int32))
    graph.replay()
    assert torch.equal(got, few_tokens_product(x, stack, to, True, slot_of_expert=slots))


FAULTS = {
    "the slot of the expert before": (
        "slots_ptr + expert",
        "slots_ptr + tl.maximum(expert - 1, 0)",
    ),
    "one expert for all": ("w_ptr + slot * w_slot", "w_ptr"),
    "pairs for tokens": ("tl.load(order_ptr + taken) // each", "tl.load(order_ptr + taken)"),
    "a row too few": ("first + TALL", "first + TALL - 1"),
    "the bias of the expert": ("bias_ptr + slot * bias_slot", "bias_ptr + expert * bias_slot"),
    "the first rows alone": ("range(first, end, ROWS)", "range(first, first + 1, ROWS)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found(fault, device):
    wrong = mutant(module, *FAULTS[fault])
    with pytest.raises((AssertionError, IndexError)):
        case = 37, 2, 4, 128, 24
        check(case, "16 bit", torch.bfloat16, device, wrong, bias=True, tall=16, mapped=True)
        check((40, 1, 4, 64, 24), "16 bit", torch.bfloat16, device, wrong, tall=64, one_sided=True)


OF_SCALES = {
    "scales of fp8": ("fp8 in blocks", "at + step // BLOCK", "at"),
    "rows of scales": ("fp8 in blocks", "output // SECOND * scale_row", "output // SECOND * 0"),
    "scales through": ("nf4", "slot * blocks_before", "slot * 0"),
    "scales by slot": ("nf4, scales by slot", "second_ptr + slot * second_slot", "second_ptr"),
}

OF_TILES = {
    "halves of bytes": ("mxfp4", "codes & 15", "codes >> 4"),
    "groups": ("mxfp4", "in_group // BLOCK", "in_group // BLOCK * 0"),
    "groups of GGUF": ("Q4_K", "(in_group // SIZE)[None, :]", "0 * in_group[None, :]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*OF_SCALES, *OF_TILES])
def test_a_wrong_weight_is_found(fault, device):
    format, old, new = (OF_SCALES | OF_TILES)[fault]
    of_tiles = fault in OF_TILES
    wrong = mutant(weight_tile if of_tiles else module, old, new)
    if of_tiles:
        wrong = importing(module, wrong, weight_tile)
    with pytest.raises((AssertionError, IndexError)):
        check((12, 2, 5, 320, 150), format, torch.bfloat16, device, wrong, bias=True)
