"""The residual in fp32 between layers of generation, and what it does to its log-probabilities."""

import itertools

import pytest
import torch

import families
import mixtures
from chronicals.generation import Engine, EngineSettings, Request, Sampling
from chronicals.models import PresentedModel
from chronicals.patching import patch_model, patch_parts, residual_dtypes, wide_residuals
from chronicals.patching.halves import FusedHalf
from chronicals.quantization import Linear4bit
from interpreted import counted_launches, kernels_run, only_interpreted

HALF, FULL = torch.bfloat16, torch.float32


def fused(family="llama", layers=4, **changes):
    model = families.build(family, num_hidden_layers=layers, **changes).to(HALF).eval()
    model.generation_config.eos_token_id = None
    patch_parts(model, whole_layers=True)
    return model


def dtypes(model):
    """Of what each layer hands on, None for one that only computes as its class."""
    found = residual_dtypes(model)
    return [found.get(layer) for layer in model.model.layers]


@pytest.fixture
def after_one(set_constants):
    """All layers but the first keep it in fp32."""
    set_constants(wide_residuals, ROUNDED_LAYERS=1)


def test_later_layers_hand_on_fp32_and_the_last_one_rounds():
    rounded = wide_residuals.ROUNDED_LAYERS - 1
    assert dtypes(fused(layers=rounded + 3)) == [HALF] * rounded + [FULL] * 2 + [HALF]
    assert dtypes(fused(layers=rounded)) == [HALF] * rounded


def test_none_is_handed_to_a_layer_that_cannot_take_it(after_one):
    model = fused(layers=5)
    model.model.layers[2].mlp.register_forward_hook(lambda *_: None)
    assert dtypes(model) == [FULL, HALF, None, FULL, HALF]
    assert dtypes(families.build("llama").to(HALF)) == [None, None]
    norms_behind = fused("olmo2")
    assert dtypes(norms_behind) == [None] * 4
    mixture = mixtures.mixture().to(HALF)
    patch_model(mixture)
    assert set(dtypes(mixture)) == {None}


def test_packed_layers_take_it(after_one):
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model = families.build("llama", **sizes).to(HALF).eval()
    patch_parts(families.replaced(model, Linear4bit.of), whole_layers=True)
    assert dtypes(model) == [FULL, HALF]


def noted(model, tokens=1):
    """What layers and the last norm are given by passes of so many tokens, within ``Engine.generate``.

    One token is a decode step's, two are a prompt's.
    """
    seen = {}

    def note(module, given, named):
        states = given[0] if given else named["hidden_states"]
        if states.shape[1] == tokens:
            seen[module] = states

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in (*model.model.layers, model.model.norm)
    ]
    Engine(model).generate([Request([5, 6], 3)])
    for handle in handles:
        handle.remove()
    return [seen[module] for module in (*model.model.layers, model.model.norm)]


def test_prompts_are_rounded_as_in_training(after_one):
    assert {x.dtype for x in noted(fused("qwen2"), tokens=2)} == {HALF}


def test_it_is_not_rounded_between_layers(after_one):
    given = noted(fused("qwen2"))
    assert [x.dtype for x in given] == [HALF, FULL, FULL, FULL, HALF]
    first, *others = given[1:-1]
    assert torch.equal(first.to(HALF).float(), first), "the first layer rounds as in training"
    assert all(not torch.equal(x.to(HALF).float(), x) for x in others)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_what_is_added_to_it_is_not_rounded(family, after_one, monkeypatch):
    """Neither by the output and down products, nor by norms behind them."""
    seen = {}
    own, own_sum = FusedHalf._norm_after, FusedHalf._norm_before
    sums = []

    def summing(half, x, branch, *options):
        normed, total, remake = own_sum(half, x, branch, *options)
        if branch is not None and x.dtype == FULL:
            sums.append(torch.equal(total, x + branch))
        return normed, total, remake

    monkeypatch.setattr(FusedHalf, "_norm_before", summing)

    def noting(half, branch):
        out = own(half, branch)
        if len(out) == 1:  # a decode step
            seen.setdefault(half.layer, []).append(out)
        return out

    monkeypatch.setattr(FusedHalf, "_norm_after", noting)
    model = fused(family)
    Engine(model).generate([Request([5, 6, 7], 2)])
    assert sums and all(sums)
    first, *others = (seen[layer] for layer in model.model.layers)
    assert {x.dtype for x in first} == {HALF}
    for branch in itertools.chain(*others):
        assert branch.dtype == FULL and not torch.equal(branch.to(HALF).float(), branch)


def by_a_step(model, texts):
    """Log-probabilities ``[T, V]`` of each text by the pass of a training step."""
    batch = families.hand_made_batch(texts)
    with torch.no_grad(), PresentedModel(model, True, True).attending_documents() as presented:
        logits = presented.head.logits(presented.hidden_states(batch))
    return logits.float().log_softmax(-1).split([len(text) for text in texts])


def distances(seed):
    """Mean difference of generation from a step and from fp32, and of the step from fp32."""
    torch.manual_seed(seed)
    model = fused(layers=12, hidden_size=64, intermediate_size=128)
    plain = families.build("llama", num_hidden_layers=12, hidden_size=64, intermediate_size=128)
    plain.load_state_dict(model.state_dict())
    requests = [
        Request(torch.randint(1, families.VOCABULARY, (12,)).tolist(), 12, Sampling(1.0), 1, n)
        for n in range(24)
    ]
    answers = Engine(model, EngineSettings(slots=24)).generate(requests)
    texts = [torch.tensor([*r.prompt, *a.tokens]) for r, (a,) in zip(requests, answers)]

    def of_answers(rows):
        return torch.cat(
            [
                some[11:-1].gather(-1, torch.tensor(a.tokens)[:, None])[:, 0]
                for some, (a,) in zip(rows, answers)
            ]
        )

    step, true = (of_answers(by_a_step(one, texts)) for one in (model, plain.eval()))
    ours = torch.cat([torch.tensor(a.full_log_probabilities) for (a,) in answers])
    return torch.stack([(ours - step).abs(), (ours - true).abs(), (step - true).abs()], 1).mean(0)


@pytest.mark.slow
def test_generation_comes_nearer_to_fp32_and_no_further_from_a_step_than_that_is(set_constants):
    found = {}
    for rounded in (1, 12):
        set_constants(wide_residuals, ROUNDED_LAYERS=rounded)
        found[rounded] = torch.stack([distances(seed) for seed in range(3)]).mean(0)
    gap, ours, step = found[1].tolist()
    assert ours < 0.9 * found[12][1], found
    assert gap <= 1.05 * step, found


@only_interpreted
@pytest.mark.slow
def test_kernels_of_a_card_take_it(set_constants):
    """As plain torch does, but for roundings; in as many launches as without it."""
    model = fused("qwen3", layers=2)
    asked = [Request([5, 6, 7], 2), Request(list(range(9, 16)), 2, Sampling(1.0), number=1)]
    counts = []
    for rounded in (2, 1):
        set_constants(wide_residuals, ROUNDED_LAYERS=rounded)
        with kernels_run(), counted_launches() as launches:
            by_kernels = Engine(model).generate(asked)
        counts.append(launches)
    assert counts[0] == counts[1] and counts[0]["_rmsnorm_forward_kernel"]
    plain = Engine(model).generate(asked)
    for (ours,), (expected,) in zip(by_kernels, plain):
        assert ours.tokens[0] == expected.tokens[0]
        first, wanted = (one.full_log_probabilities[0] for one in (ours, expected))
        assert first == pytest.approx(wanted, abs=0.05)
