"""Tokens a second of generation at two shapes, beside transformers and Unsloth, on a card.

    python benchmarks/generation_rows.py OUT.json [--rates RATES.json] [--only NAME ...] [--limit 560]
    python benchmarks/generation_rows.py OUT.json --tiny      # the same at tiny sizes, also without a card

Prompts of 256 random tokens, 512 new ones, 8 x 8 and 64 x 8 answers, drawn at temperature 1; random
weights, so no answer ends early. Each arm runs in a process of its own, which generates as many tokens
once before: kernels are compiled then, for every width of a block table. Peers have at most a minute: where that is not
enough for 512 new tokens they make as many as ``--peer-tokens``, and ours runs at that number, too.

A step's floor is what it must read and multiply, at the rates of the card (``chronicals doctor
--rates``): for each product the longer of its weight's bytes at the copy rate and its FLOPs at the
product rate, keys and values of all sequences (a shared prompt once), and the logits. Beside it
stands the floor with the time of an empty node of a graph for each kernel of a step. The shares are those
of the whole call, prompts included, and of a step, the median between two looks of the host.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import triton
from recipes_on_card import GIB, forked, machine, model_of, shape_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from chronicals.benchmark.shapes import word_tokenizer, zipf_ids
from chronicals.cards import BF16, Rates
from chronicals.generation import Engine, EngineSettings, Request, Sampling
from chronicals.generation.call import LOGIT_ROWS, Call
from chronicals.generation.decode_graphs import DecodeGraphs
from chronicals.models import quantise_layers
from chronicals.patching import patch_parts
from chronicals.quantization import NF4
from chronicals.step_work import DecoderShape

PROMPT = 256
NEW = 512
PROFILED = 24
"""New tokens of the call whose kernels are listed."""


@dataclass(frozen=True)
class Row:
    """A shape, and the answers that are wanted of it.

    Attributes:
        name: in tables.
        model: of ``recipes_on_card``.
        prompts: number of prompts.
        answers: of each prompt.
        packed: True for a base in NF4.
    """

    name: str
    model: str
    prompts: int
    answers: int = 8
    packed: bool = False

    @property
    def sequences(self) -> int:
        """Answers in all."""
        return self.prompts * self.answers


ROWS = (
    Row("0.5b, 8 x 8", "0.5b", 8),
    Row("0.5b, 64 x 8", "0.5b", 64),
    Row("8b, 8 x 8", "8b", 8),
    Row("8b, 64 x 8", "8b", 64),
    Row("8b NF4, 1 x 1", "8b", 1, 1, packed=True),
    Row("8b, 1 x 1", "8b", 1, 1),
    Row("8b NF4, 8 x 1", "8b", 8, 1, packed=True),
    Row("8b, 8 x 1", "8b", 8, 1),
    Row("8b NF4, 8 x 8", "8b", 8, packed=True),
)

ARMS = ("ours", "generate", "generate_batch", "unsloth")


def prompts_of(row: Row, vocabulary: int, length: int) -> list[list[int]]:
    """Return random prompts of one length."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.rand(row.prompts, length, generator=generator, dtype=torch.float64)
    return [zipf_ids(each.numpy(), vocabulary) for each in draws]


def built(row: Row, length: int, tiny: bool) -> Any:
    """Return the model of a row, in evaluation mode."""
    model = model_of(row.model, length, tiny)
    if row.packed:
        quantise_layers(model)
    return model.eval()


def measured(row: Row, arm: str, new: int, tiny: bool) -> dict[str, Any]:
    """Generate with an arm, and return tokens a second and the peak of memory.

    Args:
        row: the shape and the prompts.
        arm: of ``ARMS``.
        new: new tokens of each answer.
        tiny: a tiny shape.
    """
    length = 32 if tiny else PROMPT
    new = min(new, 24) if tiny else new
    model = built(row, length + new, tiny)
    prompts = prompts_of(row, model.config.vocab_size, length)
    call = CALLS[arm](model, row, prompts)
    call(new)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    made = call(new)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    more: dict[str, Any] = {}
    if arm == "ours":
        more["step_seconds"] = call.step_seconds
        more["parts"] = call.seconds_by_part(new)
        if torch.cuda.is_available():
            more |= {**kernels_of_step(call, row), "empty_node": empty_node_seconds()}
    return {
        **more,
        "row": row.name,
        "arm": arm,
        "new": new,
        "tokens": made,
        "seconds": seconds,
        "tokens_per_second": made / seconds,
        "peak": peak,
    }


def kernels_of_step(call: Any, row: Row) -> dict[str, Any]:
    """Return number and times of a decode step's kernels, between the last two groups of draws.

    Of a call's ``kernel_times`` each entry is a name, how often it ran, and its microseconds.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call(PROFILED)
        torch.cuda.synchronize()
    events = [one for one in profiled.events() if one.device_type == DeviceType.CUDA]
    events.sort(key=lambda one: one.time_range.start)
    draws = [place for place, one in enumerate(events) if "_pick_kernel" in one.name]
    of_step = -(-row.sequences // LOGIT_ROWS)
    step = events[draws[-1 - of_step] + 1 : draws[-1] + 1]
    times = dict[str, list[float]]()
    for one in step:
        times.setdefault(one.name[:60], []).append(one.time_range.elapsed_us())
    return {
        "kernels": len(step),
        "busy": sum(sum(each) for each in times.values()) / 1e6,
        "kernel_times": [(name, len(each), sum(each)) for name, each in times.items()],
    }


@triton.jit
def _nothing_kernel():
    pass


def empty_node_seconds(count: int = 1000) -> float:
    """Return the seconds that a node of a graph takes which does nothing."""
    graph = torch.cuda.CUDAGraph()
    _nothing_kernel[(1,)]()
    with torch.cuda.graph(graph):
        for _ in range(count):
            _nothing_kernel[(1,)]()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / count


class Ours:
    """The engine, over fused layers as those of a model that is being trained are.

    Args:
        model: in evaluation mode.
        row: answers.
        prompts: their prompts.
    """

    def __init__(self, model: Any, row: Row, prompts: list[list[int]]):
        patch_parts(model, whole_layers=True)
        self.engine = Engine(model, EngineSettings(slots=row.sequences))
        self.row = row
        self.prompts = prompts
        self.looks: list[tuple[float, int]] = []

    def __call__(self, new: int) -> int:
        """Generate so many tokens of each answer, and return how many there are in all."""
        self.looks = []
        answers = self.engine.generate(self.requests(new), self._note)
        return sum(len(answer.tokens) for group in answers for answer in group)

    def requests(self, new: int) -> list[Request]:
        """Return the requests of a call."""
        return [
            Request(ids, new, Sampling(temperature=1.0), self.row.answers, number)
            for number, ids in enumerate(self.prompts)
        ]

    def _note(self, request: int, number: int, tokens: list[int]) -> None:
        """Note when the first answer got how many tokens."""
        if request == number == 0:
            self.looks.append((time.perf_counter(), len(tokens)))

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the last call: the median over its looks, without prompts and captures."""
        pairs = list(itertools.pairwise(self.looks))
        return statistics.median((later[0] - one[0]) / (later[1] - one[1]) for one, later in pairs)

    def seconds_by_part(self, new: int) -> dict[str, float]:
        """Return the seconds of a call's parts, for each of which the host waits."""
        spent = dict[str, float]()

        def timed(name: str, function: Any) -> Any:
            def run(*given: Any, **named: Any) -> Any:
                wait()
                begun = time.perf_counter()
                result = function(*given, **named)
                wait()
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun
                return result

            return run

        parts = (
            (Engine, "_lay_out"),
            (Call, "_prefill"),
            (Call, "_first_tokens"),
            (Call, "decode_step"),
            (Call, "_read"),
            (DecodeGraphs, "_capture"),
            (DecodeGraphs, "take"),
        )
        with contextlib.ExitStack() as patches:
            for owner, name in parts:
                patches.enter_context(
                    mock.patch.object(owner, name, timed(name, getattr(owner, name)))
                )
            timed("whole", self)(new)
        return spent


def wait() -> None:
    """Wait for the card, if there is one, unless a graph is being captured."""
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def by_generate(model: Any, row: Row, prompts: list[list[int]]) -> Any:
    """Return the same of transformers' ``generate``."""
    ids = torch.tensor(prompts, device=model.device)

    def call(new: int) -> int:
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=row.answers,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            use_cache=True,
        )
        return int(made.numel() - row.answers * ids.numel())

    return call


def by_batch(model: Any, row: Row, prompts: list[list[int]]) -> Any:
    """Return the same of transformers' ``generate_batch``, its continuous batching."""
    everything = [ids for ids in prompts for _ in range(row.answers)]

    def call(new: int) -> int:
        settings = transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=new,
            eos_token_id=-1,
            pad_token_id=0,
        )
        found = model.generate_batch(inputs=everything, generation_config=settings)
        return sum(len(one.generated_tokens) for one in found.values())

    return call


def by_unsloth(model: Any, row: Row, prompts: list[list[int]]) -> Any:
    """Return the same of Unsloth's ``generate``, without vLLM (``fast_inference=False``).

    It loads a folder, so the model is saved first, and leaves the card. Its process has imported
    transformers before, which it warns of: what it replaces in transformers is replaced all the same.
    """
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        word_tokenizer(model.config.vocab_size).save_pretrained(folder)
        model.to("meta")
        torch.cuda.empty_cache()
        loaded, _ = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=PROMPT + NEW,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            fast_inference=False,
        )
    FastLanguageModel.for_inference(loaded)
    return by_generate(loaded, row, prompts)


CALLS = {
    "ours": Ours,
    "generate": by_generate,
    "generate_batch": by_batch,
    "unsloth": by_unsloth,
}


def floor_of_step(row: Row, shape: DecoderShape, rates: Rates, keys: float, prompt: int) -> float:
    """Return the seconds that a decode step takes at least.

    Args:
        row: sequences, and the format of weights.
        shape: of the model.
        rates: of the card.
        keys: tokens of a sequence in the mean over the steps.
        prompt: tokens that the answers of a prompt share.
    """
    each = NF4.bytes_a_value(2) if row.packed else 2
    rows = row.sequences
    layer = (
        (shape.width, shape.q + 2 * shape.kv),
        (shape.q, shape.width),
        (shape.width, 2 * shape.inner),
        (shape.inner, shape.width),
    )
    products = [(inputs, outputs, shape.layers, each) for inputs, outputs in layer]
    products.append((shape.width, shape.vocabulary, 1, 2))
    seconds = 0.0
    for inputs, outputs, count, size in products:
        flops = 2 * rows * inputs * outputs / max(rate for _, rate in rates.products[BF16])
        seconds += count * max(inputs * outputs * size / rates.copy, flops)
    tokens = row.prompts * prompt + rows * (keys - prompt)
    seconds += shape.layers * tokens * 2 * 2 * shape.kv / rates.copy
    return seconds + rows * shape.vocabulary * 2 * 2 / rates.copy


def with_floor(result: dict[str, Any], row: Row, tiny: bool, rates: Rates) -> dict[str, Any]:
    """Return a result with the floor of its steps, and the share of it that was reached."""
    name, sizes = shape_of(row.model, PROMPT + NEW, tiny)
    shape = DecoderShape.of(getattr(transformers, name)(**sizes))
    prompt = 32 if tiny else PROMPT
    new = result["new"]
    step = floor_of_step(row, shape, rates, prompt + new / 2, prompt)
    seconds = result["seconds"]
    found = {**result, "floor_seconds": new * step, "share": new * step / seconds}
    if "step_seconds" in result:
        found["share_of_step"] = step / result["step_seconds"]
    if "kernels" in result:
        nodes = result["kernels"] * result["empty_node"]
        found["share_with_nodes"] = new * (step + nodes) / seconds
        found["share_of_step_with_nodes"] = (step + nodes) / result["step_seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", type=Path, default=None)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--peer-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="*", default=(NEW, 64), help="of ours")
    parser.add_argument("--each", type=float, default=90)
    parser.add_argument("--limit", type=float, default=540)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    begun = time.perf_counter()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    results["machine"] = forked(machine, 60)
    rates = None
    if given.rates is not None:
        values = json.loads(given.rates.read_text())
        rates = Rates.from_dict({name: v for name, v in values.items() if name != "seconds"})
    for row in ROWS:
        if given.only and not any(part in row.name for part in given.only):
            continue
        for arm in given.arms:
            if arm == "unsloth" and row.packed:
                continue  # its loader quantises another way: in bf16 alone
            counts = given.tokens if arm == "ours" else (given.peer_tokens,)
            for new in counts:
                key = f"{row.name}, {arm}, {new}"
                left = given.limit - (time.perf_counter() - begun)
                if "error" not in results.get(key, {"error": ""}):
                    continue
                if left < 20:
                    print(f"{key}: not reached", flush=True)
                    continue
                run = partial(measured, row, arm, new, given.tiny)
                result = forked(run, min(given.each, left))
                if rates is not None and "error" not in result:
                    result = with_floor(result, row, given.tiny, rates)
                results[key] = result
                given.out.write_text(json.dumps(results))
                print(line_of(key, result), flush=True)
    rates_made = [one["tokens_per_second"] for one in results.values() if "tokens" in one]
    if rates_made:
        print(f"median {statistics.median(rates_made):,.0f} tokens/s of {len(rates_made)} runs")


def line_of(key: str, result: dict[str, Any]) -> str:
    """Return a line on a result for the terminal."""
    if "error" in result:
        return f"{key}: {result['error'][:300]}"
    share = f", {result['share']:.0%} of the floor" if "share" in result else ""
    if "share_with_nodes" in result:
        share += (
            f", {result['share_with_nodes']:.0%} with {result['kernels']} nodes of "
            f"{result['empty_node'] * 1e6:.1f} us; a step {result['share_of_step']:.0%} and "
            f"{result['share_of_step_with_nodes']:.0%}"
        )
    return (
        f"{key}: {result['tokens_per_second']:,.0f} tokens/s, {result['tokens']:,} tokens in "
        f"{result['seconds']:.1f} s, {result['peak'] / GIB:.1f} GiB{share}"
    )


if __name__ == "__main__":
    main()
