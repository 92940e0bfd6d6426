"""Offloaded experts give the same bits as all of them on the device, whatever the budget."""

import copy

import pytest
import torch

import chronicals
import families
import mixtures
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models.four_bits import quantise_experts
from chronicals.moe.offload.prediction import Predictor
from chronicals.moe.offload.slot_table import ABSENT
from chronicals.patching.fp8_experts import IN_FP8
from chronicals.patching.patch import patch_parts
from chronicals.quantization import FP8Experts, PackedExperts
from chronicals.quantization.mxfp4 import MXFP4

FAMILIES = [*families.ROUTED, "native"]
COUNT = {
    "Mixtral": "num_local_experts",
    "GptOss": "num_local_experts",
    "DeepseekV2": "n_routed_experts",
    "DeepseekV3": "n_routed_experts",
    "Glm4Moe": "n_routed_experts",
}
EXPERTS = 8
EACH = 2


class AlwaysWrong(Predictor):
    """Expects the experts that were not chosen."""

    def expected(self, layer, told):
        chosen = set(self.last(layer - 1))
        return [expert for expert in range(EXPERTS) if expert not in chosen]


def build(name, **changes):
    if name == "native":
        sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 32}
        known = {key: changes[key] for key in changes if key != "intermediate_size"}
        return mixtures.mixture(**{**sizes, "num_experts": EXPERTS, **known})
    return families.routed(name, **{COUNT.get(name, "num_experts"): EXPERTS, **changes})


def resident(model):
    """The same model with all its experts in place, computed by the same products."""
    same = copy.deepcopy(model)
    patch_parts(same)
    return same


def layers_of(model):
    """Paths and modules of the experts of all layers."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if path.endswith(".experts") and hasattr(module, "down_proj")
    ]


def slot_bytes(model):
    streamed = chronicals.offload(copy.deepcopy(model), vram="1GiB", ram="1GiB", device="cpu")
    size = streamed.offload.engine.slot_bytes
    streamed.offload.close()
    return size


def offloaded(model, slots, **options):
    size = slots * slot_bytes(model)
    streamed = chronicals.offload(
        copy.deepcopy(model), vram=size, ram="1GiB", device="cpu", **options
    )
    assert streamed.offload.engine.slots == slots
    patch_parts(streamed)
    return streamed


def held_by(engine):
    """The slots of the experts that are in one."""
    return {
        (layer, expert): slot
        for layer, slots in enumerate(engine.residents.table.slots)
        for expert, slot in enumerate(slots)
        if slot != ABSENT
    }


def budgets(model):
    experts = EXPERTS * len(layers_of(model))
    return [EACH + 2, max(EACH + 2, experts // 4), experts // 2, experts]


def assert_same_bits(model, streamed, ids):
    with torch.no_grad():
        for _ in range(2):  # with empty slots, and with those of the pass before
            got = streamed(ids).logits
            assert torch.equal(got, model(ids).logits)


def ids_of(tokens, rows=2):
    return torch.randint(1, families.VOCABULARY, (rows, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bits_at_every_budget(name):
    model = build(name)
    expected = resident(model)
    for slots in budgets(model):
        streamed = offloaded(model, slots)
        for tokens in (23, 1):
            assert_same_bits(expected, streamed, ids_of(tokens))
        streamed.offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])
@pytest.mark.parametrize("predictor", [None, "last", "wrong"])
@pytest.mark.parametrize("name", FAMILIES)
def test_neither_policy_nor_predictor_changes_a_bit(name, policy, predictor):
    model = build(name)
    expected = resident(model)
    layers = len(layers_of(model))
    trace = {
        (layer, expert): 7 * expert % 5 for layer in range(layers) for expert in range(EXPERTS)
    }
    expects = AlwaysWrong() if predictor == "wrong" else predictor
    for slots in sorted({7, *budgets(model)}):
        streamed = offloaded(model, slots, policy=policy, trace=trace, predictor=expects)
        for tokens in (1, 19, 1, 1, 2, 1):
            assert_same_bits(expected, streamed, ids_of(tokens))
        report = streamed.offload.report()
        assert report.fallback_mass == 0 and report.hits + report.misses > 0
        streamed.offload.close()


@pytest.mark.parametrize("share", [0.3, 0.61, 0.97])
def test_slots_fill_the_budget_and_no_more(share):
    """Within 2 %, where an expert is less than that of it."""
    model = families.routed("Qwen3Moe", num_experts=128, num_hidden_layers=3)
    experts = sum(p.nbytes for _, module in layers_of(model) for p in module.parameters())
    budget = int(share * experts) + 77
    streamed = chronicals.offload(model, vram=budget, ram="1GiB", device="cpu")
    engine, report = streamed.offload.engine, streamed.offload.report()
    assert 0.98 * budget < report.slot_bytes <= budget
    assert report.slot_bytes == engine._memory.untyped_storage().nbytes()
    streamed.offload.close()


def test_slots_stay_within_the_budget():
    model = build("Qwen3Moe")
    size = slot_bytes(model)
    for slots in (EACH + 2, 7, 12):
        budget = int(size * (slots + 0.5))
        streamed = chronicals.offload(copy.deepcopy(model), vram=budget, ram="1GiB", device="cpu")
        report = streamed.offload.report()
        assert report.slots == slots and budget - size < report.slot_bytes <= budget
        streamed.offload.close()


def mxfp4_experts(model):
    """Replaces experts by MXFP4 codes of random values, as gpt-oss's files have them."""
    for path, module in layers_of(model):
        packed, shapes = {}, {}
        for name in ("gate_up_proj", "down_proj"):
            count, inner, outer = shape = tuple(module.get_parameter(name).shape)
            codes = torch.randint(0, 256, (count * inner * outer // 2,), dtype=torch.uint8)
            scales = torch.randint(118, 124, (count * inner * outer // 32,), dtype=torch.uint8)
            packed[name] = MXFP4(codes, scales, (count * outer, inner), torch.float32)
            shapes[name] = shape
        model.set_submodule(path, PackedExperts(module, packed, shapes, shapes))


def fp8_experts(model):
    """Lets products of experts run in FP8 where they are known, as ``run_experts_in_fp8`` does."""
    model.bfloat16()
    for _, module in layers_of(model):
        vars(module)[IN_FP8] = {
            name: FP8Experts(
                module.get_parameter(name), bool(module.is_transposed), torch.device("cpu")
            )
            for name in ("gate_up_proj", "down_proj")
        }


FORMATS = {"nf4": quantise_experts, "mxfp4": mxfp4_experts, "fp8": fp8_experts}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
"""MXFP4 has blocks of 32 along the inputs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Qwen3Moe", "nf4"),
        ("Mixtral", "nf4"),
        ("GptOss", "nf4"),
        ("GptOss", "mxfp4"),
        ("Olmoe", "bf16"),
        ("DeepseekV3", "bf16"),
        ("Qwen3Moe", "fp8"),
        ("DeepseekV3", "fp8"),
        ("GptOss", "fp8"),
    ],
)
def test_experts_in_the_format_that_they_have(name, form):
    model = build(name, **SIZES)
    if form in FORMATS:
        FORMATS[form](model)
    else:
        model = model.bfloat16()
    expected = resident(model)
    for slots in budgets(model)[:3]:
        streamed = offloaded(model, slots)
        for tokens in (1, 17):
            assert_same_bits(expected, streamed, ids_of(tokens))
        streamed.offload.close()


def gradients(model, given):
    """Hidden states, and gradients of adapters and routers."""
    return families.states_and_gradients(model, given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in FAMILIES for form in ("plain", "nf4")),
        ("Qwen3Moe", "fp8"),
        ("DeepseekV3", "fp8"),
    ],
)
def test_the_same_gradients(name, form):
    """Of adapters on attention, routers and experts."""
    model = build(name, **SIZES)
    if form in FORMATS:
        FORMATS[form](model)
    router = "router.weight" if name == "GptOss" else "mlp.gate.weight"
    parameters = ["gate_up_proj", "down_proj", router]
    config = LoRAConfig(
        rank=3, dropout=0.0, target_modules=["o_proj"], target_parameters=parameters
    )
    given = families.documents_batch()

    def adapted(one):
        torch.manual_seed(5)
        apply_lora(one, config)
        for parameter in one.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        return one.train()

    expected = gradients(adapted(resident(model)), given)
    assert any("experts" in name for name in expected)
    for slots in (EACH + 2, 5, 7):
        streamed = adapted(offloaded(model, slots))
        got = gradients(streamed, given)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(got[key], value), key
        streamed.offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "Qwen2Moe", "DeepseekV3"])
def test_the_same_gradients_of_all_other_weights(name):
    """Of attention, routers, shared experts, norms and embeddings, at every budget."""
    model = build(name)
    for _, module in layers_of(model):
        module.requires_grad_(False)
    given = families.documents_batch()
    expected = gradients(resident(model).train(), given)
    for words in ("attn", "gate.weight", "shared_expert", "norm", "embed_tokens"):
        assert any(words in path and value.any() for path, value in expected.items()), words
    for slots in budgets(model):
        streamed = offloaded(model, slots).train()
        got = gradients(streamed, given)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(got[key], value), key
        streamed.offload.close()
