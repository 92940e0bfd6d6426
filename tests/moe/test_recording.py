"""What is recorded of routers, traces on disk, and heads that learn from them beside a model
that stays as it was.
"""

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch

import families
import runs
import tiny
from chronicals.batch import Batch
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import present, quantise_layers
from chronicals.moe.lookahead.distil_heads import HeadDistillation, distil, head_loss
from chronicals.moe.lookahead.predictor import (
    ExpertPredictor,
    HeadSizes,
    Recalls,
    hits,
    measure_recalls,
)
from chronicals.moe.lookahead.recording import Recorded, record, record_data
from chronicals.moe.lookahead.trace import (
    INDEX,
    Trace,
    TraceInfo,
    TraceWriter,
    checksum,
    read_trace,
)
from chronicals.moe.lookahead.train_predictor import TrainedPredictor, train_predictor
from chronicals.moe.routers import experts_per_token, mixture_layers
from comparison import equal
from mixtures import mixture

K = 2


def qwen3_moe():
    return families.mixture("qwen3_moe", vocab_size=300).eval()


def native():
    return mixture(vocab_size=300)


def in_4_bits():
    """With adapters on its experts."""
    model = qwen3_moe()
    quantise_layers(model)
    apply_lora(
        model,
        LoRAConfig(
            2, 4, 0.0, ["q_proj"], target_parameters=["experts.down_proj", "experts.gate_up_proj"]
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


FAMILIES = {
    "native": native,
    "qwen3_moe": qwen3_moe,
    "mixtral": lambda: families.mixture("mixtral", vocab_size=300).eval(),
}
FAMILIES |= {"qwen3_moe in 4 bits": in_4_bits}


def batch(lengths=(9, 5, 12), filler=6):
    """Documents, of which the second has no target, and filler."""
    ids = torch.randint(3, 300, (sum(lengths) + filler,))
    bounds = torch.tensor([0, *lengths, filler]).cumsum(0).int()
    targets = torch.full_like(ids, -100)
    targets[: lengths[0] - 1], targets[lengths[0] + lengths[1] : sum(lengths) - 1] = 7, 7
    positions = torch.cat([torch.arange(n) for n in (*lengths, filler)])
    return Batch(ids, targets, positions, bounds, max(*lengths, filler))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_the_routers_did(family):
    model = FAMILIES[family]()
    given = batch()
    before = checksum(model)
    (found,) = record(present(model), [given], features=True)
    assert checksum(model) == before and not any(
        module._forward_pre_hooks for module in model.modules()
    )
    kept = torch.cat([torch.arange(0, 9), torch.arange(14, 26)])
    assert equal(found.token_ids, given.input_ids[kept]) and found.documents.tolist() == [0, 9, 21]
    start = 0
    for part in (given.input_ids[:9], given.input_ids[14:26]):
        with torch.no_grad():
            out = model.get_decoder()(
                input_ids=part[None], output_router_logits=True, output_hidden_states=True
            )
        place = slice(start, start + len(part))
        for n, (layer, logits) in enumerate(zip(mixture_layers(model), out.router_logits)):
            logits = logits.view(len(part), -1)
            torch.testing.assert_close(found.logits[n, place], logits, rtol=1e-4, atol=1e-5)
            experts = logits.topk(K).indices
            assert equal(found.experts[n, place].sort(-1).values, experts.sort(-1).values)
            weights = logits.softmax(-1).gather(-1, found.experts[n, place])
            if "qwen3_moe" not in family:  # whose configuration leaves them as they are
                weights = weights / weights.sum(-1, keepdim=True)
            torch.testing.assert_close(found.weights[n, place], weights, rtol=1e-4, atol=1e-5)
            norm = model.get_decoder().layers[layer.number].input_layernorm
            features = norm(out.hidden_states[layer.number][0])
            torch.testing.assert_close(found.features[n, place], features, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(
            found.hidden[place], out.last_hidden_state[0], rtol=1e-3, atol=1e-4
        )
        start += len(part)
    assert found.follows(1).tolist() == [True] * 8 + [False] + [True] * 11
    assert not found.follows(3)[6:9].any()


def test_models_that_take_padded_rows_are_recorded_alike():
    model = qwen3_moe()
    given = batch()
    packed = present(model)
    (expected,) = record(packed, [given], features=True)
    packed.packed = False
    first, second = record(packed, [given], features=True)
    for name in ("experts", "logits", "features"):
        parts = torch.cat([getattr(first, name), getattr(second, name)], 1)
        torch.testing.assert_close(
            parts.float(), getattr(expected, name).float(), rtol=1e-4, atol=1e-5
        )


def test_a_trace_is_read_as_it_was_written(tmp_path):
    model = native()
    parts = list(record(present(model), [batch(), batch((4, 3, 11))], features=True))
    writer = TraceWriter(
        tmp_path / "trace", TraceInfo.of(model, experts_per_token(model), True, "a model")
    )
    for part in parts:
        writer.add(part)
    with pytest.raises(ValueError, match="no trace is there"):
        read_trace(tmp_path / "trace")
    writer.close()
    info, found = read_trace(tmp_path / "trace")
    assert (info.model, info.model_type, info.layers) == ("a model", "chronicals_moe", [0, 1, 2, 3])
    assert (info.num_experts, info.k, info.tokens) == (5, K, 21 + 15)
    for part, read in zip(parts, found, strict=True):
        for name in ("token_ids", "documents", "experts"):
            assert equal(getattr(part, name), getattr(read, name))
        for name in ("weights", "logits", "features", "hidden", "embeddings"):
            torch.testing.assert_close(
                getattr(read, name), getattr(part, name), rtol=1e-3, atol=1e-3
            )
    with np.load(tmp_path / "trace" / "trace-00000.npz") as arrays:
        assert arrays["experts"].dtype == np.uint8 and arrays["weights"].dtype == np.float16
        assert arrays["token_ids"].dtype == np.int32 and arrays["documents"].dtype == np.int64
    with pytest.raises(ValueError, match="holds a trace already"):
        TraceWriter(tmp_path / "trace", info)


def test_a_damaged_trace_is_said(tmp_path):
    model = native()
    writer = TraceWriter(tmp_path, TraceInfo.of(model, K, False))
    for part in record(present(model), [batch()]):
        writer.add(part)
    writer.close()
    whole = (tmp_path / "trace-00000.npz").read_bytes()
    (tmp_path / "trace-00000.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"trace-00000\.npz: the trace is damaged"):
        list(read_trace(tmp_path)[1])
    said = json.loads((tmp_path / INDEX).read_text())
    said["files"][0]["tokens"] += 1
    (tmp_path / "trace-00000.npz").write_bytes(whole)
    (tmp_path / INDEX).write_text(json.dumps(said))
    with pytest.raises(ValueError, match="experts of shape"):
        list(read_trace(tmp_path)[1])
    (tmp_path / INDEX).write_text(json.dumps({**said, "version": 9}))
    with pytest.raises(ValueError, match="version 9, known is 2"):
        read_trace(tmp_path)


def test_a_trace_without_features_has_none(tmp_path):
    model = native()
    (part,) = record(present(model), [batch()])
    with pytest.raises(ValueError, match="features, hidden, embeddings"):
        TraceWriter(tmp_path, TraceInfo.of(model, K, True)).add(part)


def test_recall_is_counted():
    model = native()
    parts = list(record(present(model), [batch(), batch()], features=True))
    predictor = ExpertPredictor.within(model)
    found = measure_recalls(predictor, parts, K)
    layer = 1
    d = 2
    tokens = sum(map(len, parts))
    totals = {"layer_ahead": 0.0, "layer_ahead_2k": 0.0, "gate_reuse": 0.0}
    for part in parts:
        features = part.features[layer]
        of_heads = predictor.layers(layer, features)[:, d]
        early = predictor.reuse(layer, features)[:, d]
        predicted = {
            "layer_ahead": (of_heads, K),
            "layer_ahead_2k": (of_heads, 2 * K),
            "gate_reuse": (early, K),
        }
        for name, (logits, among) in predicted.items():
            for t in range(len(part)):
                first = set(logits[t].topk(among).indices.tolist())
                totals[name] += len(first & set(part.experts[layer + d, t].tolist())) / K
    for name, total in totals.items():
        assert getattr(found, name)[layer][d] == pytest.approx(total / tokens, abs=1e-6), name
    assert found.tokens == tokens and len(set(totals.values())) > 1
    assert len(found.layer_ahead) == 4 and [len(row) for row in found.layer_ahead] == [4, 3, 2, 1]
    assert len(found.token_ahead) == 2 and len(found.token_ahead[0]) == 4
    total = tokens = 0
    for part in parts:
        for t in range(len(part) - 2):
            if not any(t < int(bound) <= t + 2 for bound in part.documents):
                predicted = predictor.tokens(part.hidden[t], part.embeddings[t + 1])[1, 3]
                total += (
                    len(
                        set(predicted.topk(K).indices.tolist())
                        & set(part.experts[3, t + 2].tolist())
                    )
                    / K
                )
                tokens += 1
    assert found.token_ahead[1][3] == pytest.approx(total / tokens, abs=1e-6)


def test_own_predictions_are_those_of_the_forward_pass():
    model = native()
    given = batch()
    presented = present(model)
    (part,) = record(presented, [given], features=True)
    with presented.attending_documents(), torch.no_grad():
        computed = presented.computed(given, lookahead=True)
    kept = torch.cat([torch.arange(0, 9), torch.arange(14, 26)])
    predictor = ExpertPredictor.within(model)
    for layer, expected in enumerate(computed.layers_ahead):
        torch.testing.assert_close(
            predictor.layers(layer, part.features[layer]), expected[kept], rtol=1e-3, atol=1e-4
        )


def test_hits_are_shares():
    predicted = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    experts = torch.tensor([[0, 1], [0, 3], [2, 3]])
    assert (
        hits(predicted, experts, 2).tolist() == [1.0, 0.5, 0.0]
        and hits(predicted, experts, 4).tolist() == [1.0] * 3
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_learn_and_the_model_stays(family, tmp_path):
    model = FAMILIES[family]()
    config = runs.config(tmp_path, objective="pretraining", batch_size=2)
    before = checksum(model)
    how = HeadDistillation(learning_rate=1e-2, rows=256)
    sizes = HeadSizes(1, 1, 16)
    found = train_predictor(
        model,
        tiny.tokenizer(),
        tiny.chat_rows(200),
        tiny.chat_rows(20),
        config,
        sizes,
        how,
        8000,
        400,
    )
    assert checksum(model) == before == found.unchanged and all(
        p.grad is None for p in model.parameters()
    )
    assert found.losses[-1] < 0.8 * found.losses[0]
    assert found.recalls.mean(1) > found.recalls.mean(1, "gate_reuse")
    found.predictor.save(tmp_path / "predictor", found.about())
    loaded = ExpertPredictor.load(tmp_path / "predictor")
    (part,) = record(present(model), [batch()], features=True)
    for layer, features in enumerate(part.features):
        assert equal(loaded.layers(layer, features), found.predictor.layers(layer, features))
    assert equal(
        loaded.tokens(part.hidden, part.embeddings),
        found.predictor.tokens(part.hidden, part.embeddings),
    )
    said = json.loads((tmp_path / "predictor" / "predictor.json").read_text())
    assert (
        said["layers"] == len(mixture_layers(model))
        and said["recalls"]["k"] == K
        and said["model_sha256"] == before
    )


def test_heads_are_trained_by_the_gradient_of_each_step_alone():
    """As by AdamW of torch without weight decay, step by step."""
    model = native()
    how = HeadDistillation(learning_rate=1e-2, rows=8)
    (part,) = record(present(model), [batch()], features=True)
    torch.manual_seed(0)
    predictor = ExpertPredictor.beside(model, HeadSizes(1, 1, 8))
    expected = copy.deepcopy(predictor)
    found = distil(predictor, [part], 3, how)
    heads = [*expected.layer_ahead.parameters(), *expected.token_ahead.parameters()]
    optimizer = torch.optim.AdamW(heads, weight_decay=0.0)
    losses = []
    for n, factor in enumerate((1.0, 1.0, 0.5)):  # a step of warm-up, then a cosine over two
        loss = head_loss(expected, part.part(8 * n, 8), how)
        gradients = torch.autograd.grad(loss, heads)
        for p, gradient in zip(heads, gradients):
            p.grad = gradient
        torch.nn.utils.clip_grad_norm_(heads, 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * factor
        optimizer.step()
        losses.append(loss.item())
    assert found == pytest.approx(losses, rel=1e-4)
    trained = [*predictor.layer_ahead.parameters(), *predictor.token_ahead.parameters()]
    for p, same in zip(trained, heads, strict=True):
        # A decay of 0.1 takes 2.5e-3 of each weight in these steps
        assert (p - same).norm() <= 1e-4 * same.norm()


@pytest.mark.parametrize(
    ("tokens", "steps"), [(1, 0), (4, 1), (5, 1), (6, 2), (8, 2), (9, 2), (10, 3)]
)
def test_a_last_token_by_itself_makes_no_step(tokens, steps):
    """It has no token behind it to predict for."""
    assert HeadDistillation(rows=4).steps_of(tokens) == steps


def test_what_is_said_of_heads_is_of_the_first_step_and_of_the_last_ten():
    said = TrainedPredictor(
        None, [float(n) for n in range(20)], Recalls(K), 5, "a model", "0123"
    ).about()
    assert (said["first_loss"], said["last_loss"]) == (0.0, 14.5)
    assert (said["trained_on_tokens"], said["model"], said["model_sha256"]) == (
        5,
        "a model",
        "0123",
    )


def recorded(tokens, experts):
    """Of two layers, one document."""
    chosen = torch.randint(0, experts, (2, tokens, K))
    chosen[:, -1] = experts - 1
    bounds = torch.tensor([0, tokens])
    return Recorded(
        torch.arange(tokens),
        bounds,
        chosen,
        torch.ones(2, tokens, K),
        torch.zeros(2, tokens, experts),
    )


@pytest.mark.parametrize(
    ("experts", "stored"), [(8, "uint8"), (256, "uint8"), (257, "uint16"), (300, "uint16")]
)
def test_numbers_of_experts_are_stored_as_they_are(experts, stored, tmp_path):
    info = TraceInfo("a model", "mixture", [0, 1], experts, K, 16, False, "", "")
    writer = TraceWriter(tmp_path, info)
    given = recorded(9, experts)
    writer.add(given)
    writer.close()
    with np.load(tmp_path / "trace-00000.npz") as arrays:
        assert arrays["experts"].dtype == stored
    (found,) = read_trace(tmp_path)[1]
    assert equal(found.experts, given.experts) and found.experts.max() == experts - 1


@pytest.mark.parametrize(
    ("tokens", "parts"), [(0, []), (1, [0]), (4, [0]), (5, [0, 1]), (8, [0, 1]), (99, [0, 1, 2])]
)
def test_no_more_parts_are_taken_than_have_so_many_tokens(tokens, parts, tmp_path):
    writer = TraceWriter(tmp_path, TraceInfo("a model", "mixture", [0, 1], 8, K, 16, False, "", ""))
    for _ in range(3):
        writer.add(recorded(4, 8))
    writer.close()
    assert Trace(tmp_path).first(range(3), tokens) == parts


@pytest.mark.slow
def test_heads_learn_from_a_trace(tmp_path):
    model = native()
    config = runs.config(tmp_path, objective="pretraining")
    writer = TraceWriter(tmp_path / "trace", TraceInfo.of(model, K, True))
    for part in record_data(model, tiny.tokenizer(), tiny.chat_rows(60), config, features=True):
        writer.add(part)
    assert writer.close().tokens > 1000
    predictor = ExpertPredictor.beside(model, HeadSizes(1, 0, 8))
    losses = distil(
        predictor, read_trace(tmp_path / "trace")[1], 20, HeadDistillation(learning_rate=1e-2)
    )
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="no head that predicts"):
        predictor.tokens(torch.zeros(1, 32), torch.zeros(1, 32))
    with pytest.raises(ValueError, match="no recording"):
        distil(predictor, [], 1, HeadDistillation())


def test_new_heads_are_the_routers_of_the_model():
    model = native()
    (part,) = record(present(model), [batch()], features=True)
    predictor = ExpertPredictor.beside(model, HeadSizes(2, 1, 8))
    for layer, features in enumerate(part.features):
        torch.testing.assert_close(
            predictor.layers(layer, features), predictor.reuse(layer, features)
        )
    assert float(head_loss(predictor, part, HeadDistillation())) > 0


def test_what_is_no_mixture_is_named():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layer with routed experts"):
        list(record(present(tiny.llama()), [batch()]))
    with pytest.raises(ValueError, match="no predictor is there"):
        ExpertPredictor.load(__import__("pathlib").Path("nowhere"))
    with pytest.raises(ValueError, match="rank=0"):
        HeadSizes(rank=0)


def seen_by(seen, _, args, out):
    seen.append(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [*families.ROUTED, *(f"{name} in groups" for name in families.GROUPED)]
)
def test_it_is_what_the_routers_of_any_family_did(family):
    """Beside what each router returns for the documents by themselves; biases that correct the
    choice are not zero.
    """
    name, _, in_groups = family.partition(" ")
    model = families.routed(name, vocab_size=300, **(families.GROUPED[name] if in_groups else {}))
    given = batch()
    layers = mixture_layers(model)
    (found,) = record(present(model), [given], features=True)
    for place, part in ((slice(0, 9), given.input_ids[:9]), (slice(9, 21), given.input_ids[14:26])):
        seen = []
        hooks = [layer.router.register_forward_hook(partial(seen_by, seen)) for layer in layers]
        with torch.no_grad():
            out = model.get_decoder()(input_ids=part[None], output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        for n, (logits, weights, experts) in enumerate(seen):
            torch.testing.assert_close(found.logits[n, place], logits, rtol=1e-3, atol=1e-4)
            order = experts.argsort(-1)
            own = found.experts[n, place].argsort(-1)
            assert equal(found.experts[n, place].gather(-1, own), experts.gather(-1, order))
            torch.testing.assert_close(
                found.weights[n, place].gather(-1, own),
                weights.gather(-1, order),
                rtol=1e-3,
                atol=1e-4,
            )
            norm = model.get_decoder().layers[layers[n].number].input_layernorm
            features = norm(out.hidden_states[layers[n].number][0])
            torch.testing.assert_close(found.features[n, place], features, rtol=1e-3, atol=1e-4)
    if name in ("DeepseekV3", "Glm4Moe"):
        largest = found.logits.topk(K).indices.sort(-1).values
        assert not equal(found.experts.sort(-1).values, largest)
