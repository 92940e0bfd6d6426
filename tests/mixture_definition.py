"""The native model by its formulas: loops over heads, queries and experts, whole masks, no
cache.
"""

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """``[T, d]``: pair i of a position's channels (i and i + d/2) turned by position ·
    theta^(−2i/d).
    """
    d = x.shape[-1]
    angle = positions[:, None].double() * theta ** (-torch.arange(0, d, 2).double() / d)
    a = x[:, : d // 2]
    b = x[:, d // 2 :]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One head, ``[T, d]`` each."""
    out = []
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        weights = (k[first : t + 1] @ q[t] * scale).softmax(0)
        out.append(weights @ v[first : t + 1])
    return torch.stack(out)


def latent(w: dict[str, Tensor], x: Tensor, c, positions: Tensor) -> Tensor:
    n = c.qk_nope_head_dim
    p = c.qk_rope_head_dim
    width = c.v_head_dim
    theta = c.rope_parameters["rope_theta"]
    heads = []
    queries = (x @ w["q_proj.weight"].T).unflatten(-1, (c.num_attention_heads, -1))
    found = x @ w["kv_a_proj_with_mqa.weight"].T
    compressed = norm(found[:, : c.kv_lora_rank], w["kv_a_layernorm.weight"], c.rms_norm_eps)
    shared = rotated(found[:, c.kv_lora_rank :], positions, theta)
    up = w["kv_b_proj.weight"].unflatten(0, (c.num_attention_heads, -1))
    for h in range(c.num_attention_heads):
        q = torch.cat((queries[:, h, :n], rotated(queries[:, h, n:], positions, theta)), -1)
        k = torch.cat((compressed @ up[h, :n].T, shared), -1)
        heads.append(attention(q, k, compressed @ up[h, n : n + width].T, (n + p) ** -0.5, None))
    return torch.cat(heads, -1) @ w["o_proj.weight"].T


def sliding(w: dict[str, Tensor], x: Tensor, c, positions: Tensor) -> Tensor:
    theta = c.rope_parameters["rope_theta"]
    heads = []
    q, k, v = ((x @ w[f"{name}_proj.weight"].T).unflatten(-1, (-1, c.head_dim)) for name in "qkv")
    group = c.num_attention_heads // c.num_key_value_heads
    for h in range(c.num_attention_heads):
        query = rotated(norm(q[:, h], w["q_norm.weight"], c.rms_norm_eps), positions, theta)
        key = rotated(norm(k[:, h // group], w["k_norm.weight"], c.rms_norm_eps), positions, theta)
        heads.append(attention(query, key, v[:, h // group], c.head_dim**-0.5, c.sliding_window))
    return torch.cat(heads, -1) @ w["o_proj.weight"].T


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(w: dict[str, Tensor], x: Tensor, c) -> Tensor:
    out = []
    for row in x:
        p = (w["gate.weight"] @ row).softmax(0)
        chosen = p.topk(c.num_experts_per_tok)
        total = chosen.values.sum() if c.norm_topk_prob else 1.0
        y = gated(
            row, *(w[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
        )
        for share, e in zip(chosen.values, chosen.indices):
            gate, up = w["experts.gate_up_proj"][e].chunk(2)
            y = y + share / total * gated(row, gate, up, w["experts.down_proj"][e])
        out.append(y)
    return torch.stack(out)


def logits(model, ids: Tensor) -> Tensor:
    """``[T, V]`` in fp64, of one document ``[T]``."""
    c = model.config
    state = {name: value.double() for name, value in model.state_dict().items()}
    x = state["model.embed_tokens.weight"][ids]
    positions = torch.arange(len(ids))
    for n, kind in enumerate(c.layer_types):
        at = f"model.layers.{n}."
        w = {name.removeprefix(at): value for name, value in state.items() if name.startswith(at)}
        attn = {name.removeprefix("self_attn."): value for name, value in w.items()}
        mlp = {name.removeprefix("mlp."): value for name, value in w.items()}
        attend = latent if kind == "full_attention" else sliding
        x = x + attend(attn, norm(x, w["input_layernorm.weight"], c.rms_norm_eps), c, positions)
        x = x + experts(mlp, norm(x, w["post_attention_layernorm.weight"], c.rms_norm_eps), c)
    return norm(x, state["model.norm.weight"], c.rms_norm_eps) @ state["lm_head.weight"].T
