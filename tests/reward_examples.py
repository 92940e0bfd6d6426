"""Reward functions as users write them, which misbehave for some answers; and rollouts."""

import asyncio
import math
import os
import subprocess
import sys
import time

calls = []
"""Answers of each call in this process."""


def letters(completions, **columns):
    calls.append(list(completions))
    return [float(len(text)) for text in completions]


def of_trl(prompts, completions, completion_ids, answer, **columns):
    """All that TRL gives: None where it does not apply."""
    return [
        None if right is None else float(text == right) + 10 * len(ids)
        for text, ids, right in zip(completions, completion_ids, answer)
    ]


def of_trl_for_messages(prompts, completions, completion_ids, answer, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return of_trl(prompts, texts, completion_ids, answer, **columns)


async def later(completions, **columns):
    await asyncio.sleep(0.001)
    return [float(len(text)) for text in completions]


loops = set()


async def counting_loops(completions, **columns):
    """As a client for HTTP would, which stays with its first loop."""
    loops.add(asyncio.get_running_loop())
    if completions == ["exit"]:
        sys.exit(5)
    return [float(len(loops))] * len(completions)


class Patient:
    """Waits for all answers at once."""

    def __init__(self):
        self.waiting = 0
        self.most = 0

    async def get_score(self, messages, answer):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0.01)
        self.waiting -= 1
        return self.most


class Judge:
    def get_score(self, messages, answer):
        return 100 * len(messages) + len(answer)


judge = Judge()


def misbehaving(completions, **columns):
    """Does for the whole call what the first answer that names it says."""
    for text in completions:
        if text == "raise":
            raise KeyError("a field")
        if text == "exit":
            sys.exit(2)
        if text == "die":
            print("the last words", flush=True)
            os._exit(3)
        if text == "hang":
            time.sleep(600)
        if text == "shorter":
            return [1.0]
        if text == "text":
            return "1" * len(completions)
    own = {"nan": float("nan"), "inf": float("inf"), "words": "good", "none": None}
    return [own.get(text, 1.0) for text in completions]


def process_of_it(completions, **columns):
    return [float(os.getpid())] * len(completions)


def starting_others(completions, **columns):
    """A process that outlives the call, in the group and with the connection of its parent."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)


def printing(completions, **columns):
    print("on stdout")
    os.system("echo from a program")
    sys.stderr.write("on stderr\n")
    return [1.0] * len(completions)


def showing_progress(completions, **columns):
    for number in range(20000):
        print(f"\r{number / 20000:.0%} of {number}", end="", flush=number % 1000 == 0)
    sys.stdout.flush()
    if completions == ["die"]:
        os._exit(4)
    return [1.0] * len(completions)


def asking_for(completions, difficulty, hint=None):
    return [float(level) for level in difficulty]


def of_verl(data_source, solution_str, ground_truth):
    return 1.0


def of_the_trainer(completions, trainer_state, **columns):
    return [0.0] * len(completions)


def by_place(completions, columns, /):
    return [0.0] * len(completions)


NUMBER = 3


class Unmade:
    def __init__(self, threshold):
        self.threshold = threshold


def rollout(*texts, groups=None, **columns):
    """Answers in groups of two, unless they are given."""
    groups = [row // 2 for row in range(len(texts))] if groups is None else groups
    prompts = [f"question {group}" for group in groups]
    ids = [[7] * len(text) for text in texts]
    from chronicals.rewards import Scored  # not where functions of this file run

    return Scored(prompts, list(texts), ids, columns, groups)


def column(outcome, number=0):
    return [None if math.isnan(value) else value for value in outcome.values[:, number].tolist()]
