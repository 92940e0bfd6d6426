"""Kernels by their names, and the gaps between them."""

import pytest

from chronicals.benchmark.measurement import breakdown, category_of

NAMES = {
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NTN": "products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "products",
    "triton_tem_fused_mm_3": "products",
    "_passing_kernel": "products",
    "_product_kernel": "products",
    "_weight_gradient_kernel": "products",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>": "attention",
    "_loss_and_gradient_kernel": "loss",
    "liger_cross_entropy_kernel": "loss",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>": "loss",
    "_adamw_kernel": "optimizer",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<LpNormFunctor<c10::BFloat16>>": "optimizer",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "copies",
    "_rmsnorm_backward_kernel": "elementwise",
    "_glu_forward_kernel": "elementwise",
    "_qk_rope_kernel": "elementwise",
    "triton_poi_fused_mul_silu_2": "elementwise",
    "void at::native::embedding_backward_feature_kernel<c10::BFloat16>": "elementwise",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
    "unheard_of": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_a_kernel_does(name):
    assert category_of(name) == NAMES[name]


def kernel(name, ts, dur, cat="kernel"):
    return {"name": name, "cat": cat, "ts": ts, "dur": dur}


def test_time_by_kind_and_the_gaps():
    events = [
        kernel("nvjet_a", 0, 400),
        kernel("_adamw_kernel", 600, 200),
        kernel("Memcpy DtoH", 850, 50, cat="gpu_memcpy"),
        kernel("aten::mm", 0, 10_000, cat="cpu_op"),
    ]
    found = breakdown(events, steps=1, step_seconds=1000e-6)
    times = {kind: time for kind, time in found["milliseconds_a_step"].items() if time}
    assert times == pytest.approx({"products": 0.4, "optimizer": 0.2, "copies": 0.05, "gaps": 0.35})
    assert found["share"]["gaps"] == pytest.approx(0.35)
    assert found["kernels"][0] == {
        "name": "nvjet_a",
        "kind": "products",
        "calls_a_step": 1,
        "milliseconds_a_step": 0.4,
    }


def test_kernels_that_run_at_once_share_the_time():
    found = breakdown(
        [kernel("nvjet_a", 0, 100), kernel("_adamw_kernel", 0, 100)], steps=1, step_seconds=100e-6
    )
    assert found["share"]["products"] == found["share"]["optimizer"] == pytest.approx(0.5)
    assert found["share"]["gaps"] == 0


def test_without_a_card_there_is_nothing_to_say():
    assert breakdown([kernel("aten::mm", 0, 100, cat="cpu_op")], 1, 1.0) == {}
