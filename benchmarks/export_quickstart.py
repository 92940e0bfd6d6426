"""A quickstart's model as GGUF: its proofs, and the greedy answers of llama.cpp beside those of the
trained model.

    python benchmarks/export_quickstart.py QUICKSTART OUTPUT.json [--kinds q8_0,q4_k_m] [--questions
    20]

QUICKSTART is the folder of ``chronicals quickstart``; the package llama-cpp-python is needed.
"""

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

from llama_cpp import Llama

from chronicals.benchmark.record import current_commit, versions
from chronicals.export import export
from chronicals.generation import generate_answer, load_trained


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--kinds", default="q8_0,q4_k_m")
    parser.add_argument("--questions", type=int, default=20)
    args = parser.parse_args()
    held = args.quickstart / "held-out.jsonl"
    asked = [
        json.loads(line)["messages"][0]["content"]
        for line in held.read_text().splitlines()[: args.questions]
    ]
    trained = load_trained(args.quickstart)
    expected = [generate_answer(trained, question, max_new_tokens=60).strip() for question in asked]
    result: dict = {
        "commit": current_commit(),
        "versions": versions(),
        "llama-cpp-python": version("llama-cpp-python"),
        "questions": asked,
        "trained": expected,
        "kinds": {},
    }
    for kind in args.kinds.split(","):
        with tempfile.TemporaryDirectory() as place:
            (exported,) = export(
                args.quickstart, f"gguf-{kind}", place, data=held, name="quickstart"
            )
            client = Llama(str(exported.path), n_ctx=512, verbose=False)
            found = [
                client.create_chat_completion(
                    [{"role": "user", "content": q}], temperature=0, max_tokens=60
                )["choices"][0]
                for q in asked
            ]
            answers = [choice["message"]["content"].strip() for choice in found]
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            checks = {
                check.name: check.value
                for check in exported.proof.checks
                if check.value is not None
            }
            result["kinds"][kind] = {"same": same, "answers": answers, "checks": checks}
            print(kind, same, "of", len(asked), flush=True)
    args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
