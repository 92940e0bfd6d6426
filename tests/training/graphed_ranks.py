"""One of several processes whose micro-steps over divided frozen weights are CUDA graphs: the
program of ``test_graphs_over_shards.py``.

``python graphed_ranks.py FOLDER BASE``: makes the runs of ``ARMS``, one after the other, on cards,
or without them on the CPU with emulated graphs. A process that is alone divides weights among
itself. What each rank saw is in ``ARM-RANK.json``; each run is in ``FOLDER/ARM``.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from emulated_graphs import EmulatedStep
from emulated_graphs import Recorder as EmulatedRecorder

import runs
import tiny
from chronicals.distributed import Gathers, HostExchange, Mesh
from chronicals.models import quantise_layers
from chronicals.policies.cuda_graphs import CudaGraphs
from chronicals.policies.facts import DIVIDE_WEIGHTS
from chronicals.policies.policy import Decision
from chronicals.policies.sharding import Sharding
from chronicals.training import session
from chronicals.training.step import graphs
from chronicals.training.step import training_step as step

STEPS = 9
EVALUATED = 4
ON_CARD = torch.cuda.is_available()
FIELDS = {
    "max_steps": STEPS,
    "eval_steps": EVALUATED,
    "validation_split": 0.1,
    "batch_size": 1,
    "gradient_accumulation_steps": 2,
    "num_epochs": None,
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
    "sharding": "weights",
    "save_steps": None,
    "trackers": [],
    "mixed_precision": "bf16" if ON_CARD else "fp32",
}
ROWS_OF_SCALES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
"""Of a model whose weights in NF4 can be divided by two at whole blocks of scales."""


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def fails_on_one() -> Any:
    """The last rank cannot capture its second graph. An emulated capture has run the step, a
    real one has not.
    """
    recorder = EmulatedRecorder if not ON_CARD else graphs.Recorder
    usual = recorder.capture
    calls = []

    def capture(self: Any, run: Callable[[], Any]) -> Any:
        calls.append(None)
        if is_last() and len(calls) == 2:
            if not ON_CARD:
                usual(self, run)
            raise RuntimeError("no more memory")
        return usual(self, run)

    return patch.object(recorder, "capture", capture)


def gives_up_on_one() -> Any:
    """The last rank finds gradients that graphs do not write, in a micro-step that runs as
    usual.
    """
    usual = graphs.GraphedStep._gradients_differ

    def differ(self: Any) -> bool:
        return usual(self) or (is_last() and self.gradients is not None)

    return patch.object(graphs.GraphedStep, "_gradients_differ", differ)


def poisoned() -> Any:
    """Whatever stands in the buffers before a micro-step is of no layer."""
    usual = step.FrozenGatheredStep.micro

    def micro(self: Any, *given: Any) -> Any:
        for buffer in self.gathers._buffers:
            buffer.fill_(255)
        return usual(self, *given)

    return patch.object(step.FrozenGatheredStep, "micro", micro)


ARMS: dict[str, Callable[[], Any] | None] = {
    "usual": None,
    "graphs": None,
    "poisoned": poisoned,
    "one cannot capture": fails_on_one,
    "one gives up": gives_up_on_one,
}


def watched(seen: dict[str, Any]) -> list[Any]:
    """Notes what is told, gathered and replayed, and the step that does it."""
    tell = HostExchange.__call__
    gather = Gathers._begin
    release = graphs.GraphedStep.release
    replay = graphs.Graph.replay

    def told(self: Any, numbers: Any) -> Any:
        found = tell(self, numbers)
        seen["told"].append(found)
        return found

    def begun(self: Any, unit: Any) -> None:
        before = self._holds[unit.number % 2]
        gather(self, unit)
        capturing = ON_CARD and torch.cuda.is_current_stream_capturing()  # which gathers nothing
        seen["gathered"] += before is not unit and not capturing

    def replayed(self: Any) -> None:
        seen["replays"] += 1
        replay(self)

    def released(self: Any) -> None:
        seen["graphs"].append([len(self.of_micro), self.failed, self.given_up])
        seen["replays"] += getattr(self.recorder, "replays", 0)
        release(self)

    return [
        patch.object(HostExchange, "__call__", told),
        patch.object(Gathers, "_begin", begun),
        patch.object(graphs.Graph, "replay", replayed),
        patch.object(graphs.GraphedStep, "release", released),
    ]


def train(arm: str, base: str, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {"told": [], "gathered": 0, "replays": 0, "graphs": [], "why": ""}
    model = tiny.llama(0, **ROWS_OF_SCALES)
    if base == "NF4":
        quantise_layers(model)
    decide = session.decide

    def decided(*given: Any) -> Any:
        made = decide(*given)
        seen["why"], seen["runs"] = made["use_cuda_graphs"].reason, made["use_cuda_graphs"].runs
        return made

    with ExitStack() as around:
        around.enter_context(patch.object(session, "decide", decided))
        if not ON_CARD:
            around.enter_context(patch.object(CudaGraphs, "why_not", lambda *_: None))
            around.enter_context(patch.object(session, "GraphedStep", EmulatedStep))
        for watching in watched(seen):
            around.enter_context(watching)
        if (change := ARMS[arm]) is not None:
            around.enter_context(change())
        if dist.get_world_size() == 1:
            among_one = Decision("sharding", True, "among one", DIVIDE_WEIGHTS, among=1)
            around.enter_context(patch.object(Sharding, "chosen", lambda *_: among_one))
        fields = {**FIELDS, "use_cuda_graphs": arm != "usual"}
        result = runs.train(folder / arm, tiny.chat_rows(), model=model, **fields)
    return {**seen, "loss": result.evaluation.loss}


def main() -> None:
    folder = Path(sys.argv[1])
    base = sys.argv[2]
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group("nccl" if ON_CARD else "gloo")
    Mesh.current()
    for arm in ARMS:
        torch.manual_seed(11)
        seen = train(arm, base, folder)
        (folder / f"{arm}-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
