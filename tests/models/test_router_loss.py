"""The router loss of mixture-of-experts classes: what each class itself adds to its loss."""

import logging

import pytest
import torch
import transformers

from chronicals.batch import IGNORED, Batch
from chronicals.models import present, times_trained
from chronicals.models.router_loss import RouterLoss

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "experts_implementation": "eager",
}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CLASSES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**QWEN, "head_dim": 8, "decoder_sparse_step": 2},
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 16},
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "head_dim": 8,
        "sliding_window": 4,
    },
    "Jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "mamba_d_state": 4,
    },
}
WIDTH = 24


def made(kind, **changes):
    torch.manual_seed(1)
    config = getattr(transformers, kind + "Config")(
        **{**SIZES, **CLASSES[kind], "output_router_logits": True, **changes}
    )
    return getattr(transformers, kind + "ForCausalLM")(config)


def packs(lengths):
    """Of ``WIDTH`` tokens each, documents of these lengths and filler."""
    ids = []
    targets = []
    positions = []
    bounds = [0]
    for pack in lengths:
        for length, real in [*((length, True) for length in pack), (WIDTH - sum(pack), False)]:
            document = (
                torch.randint(3, 61, (length,)) if real else torch.zeros(length, dtype=torch.long)
            )
            ids.append(document)
            targets.append(
                torch.cat([document[1:], torch.tensor([IGNORED])])[:length]
                if real
                else document - 100
            )
            positions.append(torch.arange(length))
            bounds.append(bounds[-1] + length)
    bounds = torch.tensor([*bounds, bounds[-1]], dtype=torch.int32)
    return Batch(torch.cat(ids), torch.cat(targets), torch.cat(positions), bounds, WIDTH)


def of_the_class(model, batch, lengths):
    """The sum over the packs of what the class itself gives for the documents of a pack as
    padded rows.
    """
    total = 0.0
    documents = iter(
        batch.input_ids.split([n for pack in lengths for n in (*pack, WIDTH - sum(pack))])
    )
    for pack in lengths:
        rows = [next(documents) for _ in pack]
        next(documents)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(pack)[:, None]).long()
        total = total + model(input_ids=ids, attention_mask=mask, use_cache=False).aux_loss
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_it_is_what_the_class_adds(kind):
    lengths = [(7, 12, 3), (20,), (9, 9)]
    model = made(kind, router_aux_loss_coef=0.25)
    batch = packs(lengths)
    presented = present(model)
    assert presented.router_loss is not None and presented.router_loss.coefficient == 0.25
    assert presented.packed == (kind != "Jamba")
    weights = [w for w in model.parameters() if w.requires_grad]
    expected = of_the_class(model, batch, lengths)
    wanted = torch.autograd.grad(expected, weights, allow_unused=True)
    with presented.attending_documents():
        router_logits = presented.router_logits(batch)
    ours = presented.router_loss.term(router_logits, batch, WIDTH).sum
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(ours, weights, allow_unused=True)
    assert any(g is not None and g.abs().max() > 0 for g in gradients)
    for own, exact in zip(gradients, wanted):
        if exact is not None and own is not None:
            torch.testing.assert_close(own, exact, rtol=1e-3, atol=1e-6)
        else:
            assert own is exact or not (own if exact is None else exact).any()


def test_tokens_of_documents_without_a_target_do_not_count():
    batch = packs([(7, 12), (5,)])
    batch.targets[:7] = IGNORED
    assert times_trained(batch).tolist() == [7 <= t < 19 or 24 <= t < 29 for t in range(2 * WIDTH)]
    assert not times_trained(packs([(), ()])).any()


def test_a_pack_without_documents_adds_nothing():
    loss = RouterLoss(1.0, 2)
    logits = [torch.randn(2 * WIDTH, 4) for _ in range(3)]
    half = torch.arange(2 * WIDTH) < WIDTH
    alone = loss.sum_over_packs([x[:WIDTH] for x in logits], half[:WIDTH], WIDTH)
    torch.testing.assert_close(loss.sum_over_packs(logits, half, WIDTH), alone)
    assert loss.sum_over_packs(logits, half & False, WIDTH) == 0


@pytest.mark.parametrize(
    "changes", [{"output_router_logits": False}, {"router_aux_loss_coef": 0.0}], ids=str
)
def test_what_the_class_does_not_train_is_not_trained(changes, caplog):
    assert present(made("Mixtral", **changes)).router_loss is None
    assert "router" not in caplog.text


def test_another_loss_is_left_out_by_name(monkeypatch, caplog):
    """As of a class that balances in another way."""
    from transformers.models.olmoe import modeling_olmoe

    right = modeling_olmoe.load_balancing_loss_func
    monkeypatch.setattr(
        modeling_olmoe, "load_balancing_loss_func", lambda *given: 1.1 * right(*given)
    )
    config = transformers.OlmoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    with caplog.at_level(logging.WARNING):
        assert present(transformers.OlmoeForCausalLM(config)).router_loss is None
    assert (
        "router loss: OlmoeForCausalLM asks for one (output_router_logits=True) that is left out"
        in caplog.text
    )


def test_no_tensor_holds_the_logits_of_all_layers():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            self.numel = max(
                [self.numel, *(x.numel() for x in (out if isinstance(out, tuple) else (out,)))]
            )
            return out

    layers = [torch.randn(24, 4) for _ in range(5)]
    counted = torch.rand(24) < 0.8
    with Largest() as largest:
        got = RouterLoss(1.0, 2).sum_over_packs(layers, counted, 12)
    assert largest.numel == 24 * 4
    logits = torch.stack(layers).view(5, 2, 12, 4)
    expected = 0.0
    for pack, there in enumerate(counted.view(2, 12)):
        p = logits[:, pack, there].flatten(0, 1).softmax(-1)
        f = torch.zeros_like(p).scatter(-1, p.topk(2).indices, 1.0).mean(0)
        expected += 4 * (f * p.mean(0)).sum()
    torch.testing.assert_close(got, expected)
