"""Does training in FP8 train what training in bf16 does? A model of about 1B, width 2048, real
text.

    python benchmarks/fp8_proof.py OUTPUT.json [--steps 300] [--pretraining 300] [--commit HASH]

The weights that all begin from were trained in bf16 from random ones on every other document: what
is fine-tuned has been trained, and from random weights the first steps part any two runs for good.
Then four runs over the other documents in the same order: bf16; bf16 with other kernels (plain
norms, MLPs and loss), whose difference is the measure; FP8; FP8 with a planted fault, gradients
scaled by 1.1 in every product. At steps 1, 100 and 300 the gradient of each layer is set beside
plain transformers in fp32 at the same weights.

It holds when over steps 200 to 300 the mean paired difference of the losses is at most 0.5 % of the
loss and at most twice that of the two bf16 runs, every layer's cosine is at least 0.99, and every
layer's norm is within 10 %.
"""

import argparse
import gc
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import transformers
from baseline import documents, versions

from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, build_store
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from chronicals.objectives import build_objective
from chronicals.quantization import FP8Base
from chronicals.verification.reference import PlainArm, count_items, exact_products
from chronicals.verification.training_path import TrainingPath, step_items

VOCABULARY = 16384
RATE = 2e-4
COSINE = 0.99
NORM = 0.1
LOSS = 0.005
TIMES = 2.0
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
"""1.04 billion parameters."""

BATCH = 4
WIDTH = 2048
RUNS = {
    "bf16": {},
    "bf16, other kernels": {"use_fused_kernels": False},
    "fp8": {"use_fp8": True},
    "fp8, a scale 1.1 times too large": {"use_fp8": True},
}


def configuration(steps: int, folder: Path, **changes) -> ChronicalsConfig:
    return ChronicalsConfig(
        batch_size=BATCH,
        gradient_accumulation_steps=1,
        max_seq_length=WIDTH,
        max_steps=steps,
        warmup_steps=min(20, steps // 2),
        learning_rate=RATE,
        use_torch_compile=False,
        output_dir=folder / "run",
        cache_dir=folder / "tokens",
        **changes,
    )


def of_larger_gradients(usual):
    """A product of ``FP8Base`` whose dy has scales 1.1 times too large."""

    def product(self, dy, *x):
        rows, columns = (
            part and part._replace(scale=part.scale * 1.1) for part in (dy.rows, dy.columns)
        )
        return usual(self, dy._replace(rows=rows, columns=columns), *x)

    return product


def layer_of(name: str) -> str:
    parts = name.split(".")
    return f"layer {parts[2]}" if parts[1] == "layers" else name


def beside_fp32(
    ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> dict[str, dict[str, float]]:
    """Cosine of each layer's gradient, and its norm over that in fp32."""
    sums: dict[str, list[torch.Tensor]] = {}
    for name, gradient in exact.items():
        a = ours[name].float()
        b = gradient.float()
        here = torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()]).double()
        sums.setdefault(layer_of(name), []).append(here)
    found = {}
    for layer, parts in sums.items():
        dot, left, right = torch.stack(parts).sum(0).tolist()
        found[layer] = {"cosine": dot / (left * right) ** 0.5, "norm": (left / right) ** 0.5}
    return found


def run(
    model, store, config: ChronicalsConfig, padding: int, looked_at: set[int]
) -> tuple[dict, TrainingPath]:
    device = next(model.parameters()).device
    stream = BatchStream(store, config, padding, pin=device.type == "cuda")
    plain = None
    if looked_at:
        plain = PlainArm(model, device, config, build_objective(config), usual_attention=True)
    path = TrainingPath(model, config, config.max_steps)
    losses = []
    gradients = {}
    with path.stepping():
        for number, step in enumerate(stream.steps(count=config.max_steps)):
            exact = None
            if plain is not None and number + 1 in looked_at:
                plain.load({name: path.weight(name) for name in path.trained})
                packs = step_items(store, stream, step.began)
                with exact_products():
                    counts = {**step.counts, **count_items(packs)}
                    _, exact = plain.differentiate(packs, counts)
            made = path.step(step, number)
            losses.append(made.loss)
            if exact is not None:
                gradients[number + 1] = beside_fp32(made.gradients, exact)
    return {"losses": losses, "gradients": gradients}, path


def paired(left: list[float], right: list[float]) -> float:
    """Mean of |difference| over the last third of the steps, relative to the loss."""
    rest = slice(2 * len(left) // 3, None)
    return statistics.mean(abs(a - b) for a, b in zip(left[rest], right[rest])) / statistics.mean(
        right[rest]
    )


def judge(runs: dict[str, dict]) -> dict[str, dict]:
    base = runs["bf16"]["losses"]
    measure = paired(runs["bf16, other kernels"]["losses"], base)
    verdicts = {}
    for name in ("fp8", "fp8, a scale 1.1 times too large"):
        difference = paired(runs[name]["losses"], base)
        layers = [layer for step in runs[name]["gradients"].values() for layer in step.values()]
        cosine = min(x["cosine"] for x in layers)
        away = max(abs(x["norm"] - 1) for x in layers)
        verdicts[name] = {
            "paired_loss_difference": difference,
            "between_bf16_runs": measure,
            "lowest_cosine": cosine,
            "norm_deviation": away,
            "holds": difference <= min(LOSS, TIMES * measure) and cosine >= COSINE and away <= NORM,
        }
    return verdicts


def model_of(weights: dict[str, torch.Tensor]) -> transformers.LlamaForCausalLM:
    """Random ones where there are none."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16()
    for name, weight in weights.items():
        model.get_parameter(name).data.copy_(weight)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pretraining", type=int, default=300, help="steps")
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    rows = documents()
    tokenizer = train_tokenizer((row["text"] for row in rows), VOCABULARY)
    runs: dict[str, dict] = {}
    result = {
        **(versions() if torch.cuda.is_available() else {}),
        "commit": given.commit,
        "shape": SHAPE,
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as folder:
        stores = [
            build_store(half, Tokenizer(tokenizer), WIDTH, Path(folder) / "tokens")
            for half in (rows[::2], rows[1::2])
        ]
        config = configuration(given.pretraining, Path(folder))
        pretraining, path = run(model_of({}), stores[0], config, tokenizer.pad_token_id, set())
        weights = {name: path.weight(name).to("cpu", torch.bfloat16) for name in path.trained}
        result["pretraining"] = pretraining["losses"]
        del path
        for name, changes in RUNS.items():
            looked_at = (
                {1, given.steps // 3, given.steps} if name != "bf16, other kernels" else set()
            )
            with ExitStack() as around:
                if "too large" in name:
                    for name_of in ("input_gradient", "weight_gradient"):
                        around.enter_context(
                            mock.patch.object(
                                FP8Base, name_of, of_larger_gradients(getattr(FP8Base, name_of))
                            )
                        )
                config = configuration(given.steps, Path(folder), **changes)
                runs[name], _ = run(
                    model_of(weights), stores[1], config, tokenizer.pad_token_id, looked_at
                )
            gc.collect()
            torch.cuda.empty_cache()
            given.output.write_text(json.dumps(result))
    result["verdicts"] = judge(runs)
    given.output.write_text(json.dumps(result, indent=1))
    for name, verdict in result["verdicts"].items():
        print(name, verdict)


if __name__ == "__main__":
    main()
