"""Merged products whose adapters have magnitudes (DoRA), against the layers one by one in fp64."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import chronicals.lora.magnitude as norms_module
from chronicals.kernels.dropped_products import dropped_reference
from chronicals.kernels.linear_head import Adapter
from chronicals.lora import merged_linear as module
from chronicals.lora.merged_linear import (
    MergedWeights,
    Remake,
    merged_linear,
    merged_linear_reference,
)
from comparison import assert_as_exact_as_plain, equal
from mutants import mutant

SIZES = (24, 7, 13)
SCALES = (0.5, 1.5, 2.5)
WIDTH = 20
SEED = 1234567


def functions(ranks, biased, dropout=0.0, of=module, **options):
    """Ours and the plain one, of x, the weights, the biases, and the A, B and m of the layers
    that have them.
    """
    count = len(ranks)
    adapted = [n for n, rank in enumerate(ranks) if rank]

    def parts(tensors):
        weights = tensors[:count]
        rest = tensors[count:]
        biases, rest = (rest[:count], rest[count:]) if biased else ([None] * count, rest)
        adapters = [None] * count
        for n, *own in zip(adapted, *(rest[k * len(adapted) :] for k in range(3))):
            a, b, magnitude = own
            adapters[n] = Adapter(a, b, SCALES[n], dropout, magnitude)
        return weights, biases, adapters

    def seed(like):
        return torch.tensor([SEED], device=like.device)

    def ours(x, *tensors):
        weights, biases, adapters = parts(tensors)
        with mock.patch.object(of, "draw_seed", seed):
            return (
                of.merged_linear(
                    x * 1, of.MergedWeights.fused(weights, biases, ranks), adapters, **options
                )
                * 1
            )

    def plain(x, *tensors):
        weights, biases, adapters = parts(tensors)
        if not dropout:
            return merged_linear_reference(x, weights, biases, adapters)
        dropped = dropped_reference(x, seed(x), dropout)
        outputs = []
        for weight, bias, adapter in zip(weights, biases, adapters):
            y = F.linear(x, weight)
            if adapter is not None:
                y = (
                    y
                    + adapter.scale
                    * (dropped @ adapter.a.to(x.dtype).t())
                    @ adapter.b.to(x.dtype).t()
                )
                norms = (weight + adapter.scale * adapter.b @ adapter.a).detach().norm(dim=1)
                y = y * (adapter.magnitude / norms)
            outputs.append((y if bias is None else y + bias).to(x.dtype))
        return torch.cat(outputs, 1)

    return ours, plain


def draw(ranks, biased, dtype, device, rows=13):
    def drawn():
        def random(*shape, scale=1.0, kind=dtype):
            return (torch.randn(*shape, device=device) * scale).to(kind)

        sizes = SIZES[: len(ranks)]
        fp32 = torch.float32
        return [
            random(rows, WIDTH),
            *(random(size, WIDTH, scale=WIDTH**-0.5) for size in sizes),
            *(random(size) for size in sizes if biased),
            *(random(rank, WIDTH, scale=WIDTH**-0.5, kind=fp32) for rank in ranks if rank),
            *(random(size, rank, scale=0.3, kind=fp32) for size, rank in zip(sizes, ranks) if rank),
            *(1 + random(size, scale=0.2, kind=fp32) for size, rank in zip(sizes, ranks) if rank),
        ]

    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True], ids=["", "stays"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("ranks", [(3, 3, 3), (0, 5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_layers_one_by_one(dtype, ranks, biased, stays, device):
    ours, plain = functions(ranks, biased, output_is_saved=stays)
    assert_as_exact_as_plain(ours, plain, draw(ranks, biased, dtype, device))


@pytest.mark.parametrize(
    ("dtype", "biased"), [(torch.float32, True), (torch.float16, False)], ids=str
)
def test_under_dropout_equals_the_formula_with_its_mask(dtype, biased, device):
    assert_as_exact_as_plain(
        *functions((3, 0, 4), biased, 0.5), draw((3, 0, 4), biased, dtype, device)
    )


MUTATIONS = {
    "dm without the norm": (module, "sums / lengths", "sums"),
    "dx without the factor": (
        module,
        "_of_magnitudes(ctx, dz, outputs, factor, lengths)",
        "(in_rows(dz), _of_magnitudes(ctx, dz, outputs, factor, lengths)[1])",
    ),
    "dm of the result as if it were not scaled": (module, "factor * norms", "norms"),
    "the bias scaled, too": (module, "None if has_magnitudes else merged.bias", "merged.bias"),
    "the gradient of biases scaled": (module, "_bias_gradient(dz)", "_bias_gradient(dy)"),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(fault, device):
    of, old, new = MUTATIONS[fault]
    biased = "bias" in fault
    ours, plain = functions((3, 3), biased, of=mutant(of, old, new), output_is_saved=not biased)
    with pytest.raises(AssertionError):
        assert_as_exact_as_plain(ours, plain, draw((3, 3), biased, torch.float32, device))


def one_layer(device, kind=torch.float32, rank=3):
    x, w, a, b, m = (tensor.requires_grad_() for tensor in draw((rank,), False, kind, device)())
    return x, MergedWeights.fused([w.detach()], [None], (rank,)), w, a, b, m


def plain_of(x, w, a, b, m):
    return merged_linear_reference(x, [w.detach()], [None], [Adapter(a, b, 0.5, 0.0, m)])


def test_after_an_update_norms_are_those_of_the_new_adapter(device):
    """Once an update, not once a call."""
    x, merged, w, a, b, m = one_layer(device)
    with mock.patch.object(
        norms_module, "adapted_norms", wraps=norms_module.adapted_norms
    ) as computed:
        for step in range(3):
            for _ in range(2):
                y = merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)])
                torch.testing.assert_close(y, plain_of(x, w, a, b, m))
            assert computed.call_count == step + 1
            with torch.no_grad():
                a.mul_(1.5)
                b.add_(0.1)


def test_norms_stay_where_they_are(device):
    """Where a graph reads them."""
    x, merged, _, a, b, m = one_layer(device)
    places = set()
    for _ in range(3):
        merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)])
        places.add(merged.norms.of(merged.base, merged.padding).data_ptr())
        with torch.no_grad():
            b.add_(0.1)
    assert len(places) == 1


def test_a_graph_computes_its_norms_itself(device, monkeypatch, let_return):
    """Those from before it was captured would be the norms of a step that is over; but once in a
    graph.
    """
    x, merged, _, a, b, m = one_layer(device)
    merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)])
    let_return(norms_module, _is_captured=True)
    with mock.patch.object(
        norms_module, "adapted_norms", wraps=norms_module.adapted_norms
    ) as computed:
        for _ in range(2):
            merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)])
        assert computed.call_count == 1
    monkeypatch.undo()
    with mock.patch.object(
        norms_module, "adapted_norms", wraps=norms_module.adapted_norms
    ) as computed:
        merged_linear(
            x, merged, [Adapter(a, b, 0.5, 0.0, m)]
        )  # the capture may have failed, and nothing have run
        merged.norms.forget()
        merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)])
        assert computed.call_count == 2


def test_norms_that_are_never_computed_again_are_found(device):
    wrong = mutant(
        norms_module, "self._norms is not None and self._norms[0] == key", "self._norms is not None"
    )
    x, merged, w, a, b, m = one_layer(device)
    merged = MergedWeights(
        merged.storage, merged.base, merged.padding, merged.biases, merged.bias, wrong.RowNorms()
    )
    with pytest.raises(AssertionError):
        for _ in range(2):
            torch.testing.assert_close(
                merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)]), plain_of(x, w, a, b, m)
            )
            with torch.no_grad():
                b.add_(0.1)


def test_other_adapters_between_forward_and_backward_change_nothing(device):
    x, merged, _, a, b, m = one_layer(device)
    found = []
    for disturbed in (False, True):
        y = merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)])
        if disturbed:
            with torch.no_grad():
                merged_linear(x, merged, [Adapter(a * 2, b * 3, 0.5, 0.0, m)])
        found.append(torch.autograd.grad(y.square().sum(), (x, a, b, m)))
    assert all(equal(one, other) for one, other in zip(*found, strict=True))


def test_what_nobody_reads_is_computed_for_the_gradient_of_magnitudes(device):
    """``skip_output`` leaves the outputs uninitialised, of which that gradient is made."""
    x, merged, w, a, b, m = one_layer(device)
    upstream = torch.randn(len(x), SIZES[0], device=device)
    y = merged_linear(
        x,
        merged,
        [Adapter(a, b, 0.5, 0.0, m)],
        skip_output=True,
        remake=Remake(torch.clone, x.detach()),
    )
    found = torch.autograd.grad(y, (x, a, b, m), upstream)
    expected = torch.autograd.grad(plain_of(x, w, a, b, m), (x, a, b, m), upstream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stays", [False, True])
def test_frozen_magnitudes_get_no_gradient_and_rows_of_zeros_no_nan(stays, device):
    x, merged, _, a, b, m = one_layer(device)
    with torch.no_grad():
        merged.storage.matrix[0].zero_()
        b[0].zero_()
        m[0] = 0
    y = merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m.detach())], output_is_saved=stays)
    of_x, of_a = torch.autograd.grad(y.square().sum(), (x, a))
    y = merged_linear(x, merged, [Adapter(a, b, 0.5, 0.0, m)], output_is_saved=stays)
    again_x, again_a, of_m = torch.autograd.grad(y.square().sum(), (x, a, m))
    assert equal(of_x, again_x) and equal(of_a, again_a)
    assert not y[:, 0].any() and of_m.isfinite().all() and of_m[1:].all()


def test_fp8(device):
    """Rows of a frozen weight in FP8: as near to the layer in fp32 as without magnitudes."""
    from chronicals.quantization import FP8Base

    rows = 64
    width = 96
    size = 128
    rank = 4
    x = torch.randn(rows, width, device=device).bfloat16()
    w = (torch.randn(size, width, device=device) / width**0.5).bfloat16()
    a = torch.randn(rank, width, device=device) / width**0.5
    b = torch.randn(size, rank, device=device) * 0.3
    m = 1 + 0.2 * torch.rand(size, device=device)
    upstream = torch.randn(rows, size, device=device)
    off = []
    for magnitude in (None, m):
        leaves = [
            t.clone().requires_grad_() for t in (x, a, b, *(() if magnitude is None else (m,)))
        ]
        exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
        merged = MergedWeights.fused([w], [None], (rank,), FP8Base)
        y = merged_linear(leaves[0], merged, [Adapter(leaves[1], leaves[2], 0.5, 0.0, *leaves[3:])])
        found = [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(y.dtype))]
        z = merged_linear_reference(
            exact[0],
            [w.cpu().double()],
            [None],
            [Adapter(exact[1], exact[2], 0.5, 0.0, *exact[3:])],
        )
        expected = [z.detach(), *torch.autograd.grad(z, exact, upstream.cpu().double())]
        off.append(
            [
                float((p.cpu().double() - q).norm() / q.norm())
                for p, q in zip(found, expected, strict=True)
            ]
        )
    plain, own = off
    assert all(one <= 1.5 * other + 0.01 for one, other in zip(own, plain)), (own, plain)
    assert own[-1] <= 0.06, own
