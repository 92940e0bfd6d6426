"""Stores built by several processes are those that one builds, and whatever happens to a process
is said.
"""

import contextlib
import io
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import planted_faults
import pytest

import tiny
from chronicals import data
from chronicals.config import ChronicalsConfig
from chronicals.data import Tokenizer, build_store, open_store
from chronicals.data.making import processes
from chronicals.data.making.encoding import ChunkEncoder
from chronicals.data.making.processes import TokenizingProcesses
from chronicals.data.making.worker import (
    chunk_of_frame,
    frame_of_chunk,
    frame_of_encoded,
    read_frame,
    write_frame,
)
from chronicals.data.reading import records
from chronicals.data.reading.records import BadRow, Line, RowChunk, chunks_of, parsed
from process_groups import members, wait_until

WIDTH = 32


@pytest.fixture(autouse=True)
def small(set_constants):
    """Chunks of a few rows, and help asked for at once."""
    set_constants(records, CHUNK_ROWS=7)
    set_constants(processes, LETTERS_ALONE=0)


def encoder(inner=None, **how):
    return ChunkEncoder(Tokenizer(inner or tiny.tokenizer(), **how), WIDTH)


def helped(several, all_chunks):
    """The chunks, of which the third is not there before a process is ready."""
    for number, chunk in enumerate(all_chunks):
        until = time.monotonic() + 120
        while number == 2 and several._free.empty():
            assert time.monotonic() < until, "no process is ready"
            time.sleep(0.01)
        yield chunk


def facts(encoded):
    documents = encoded.documents
    arrays = documents.ids, documents.trained, documents.offsets, documents.rows, encoded.hashes
    return [(array.dtype, array.tolist()) for array in arrays], asdict(encoded.report)


def assert_same_by_processes(rows, of=None, taken_here=0, earlier=0):
    of = of or encoder()
    taken = []
    whole = list(chunks_of(rows, earlier))
    with TokenizingProcesses(of, 2) as several:
        ask = several._ask
        several._ask = lambda frame: taken.append(frame) or ask(frame)
        found = list(several.encoded(helped(several, whole)))
    alone = list(of.encoded(whole))
    assert [chunk.first for chunk, _ in found] == [chunk.first for chunk, _ in alone]
    assert [chunk.places for chunk, _ in found] == [chunk.places for chunk, _ in alone]
    for (_, one), (_, other) in zip(found, alone, strict=True):
        assert facts(one) == facts(other)
    assert len(taken) == len(alone) - 3 - taken_here
    assert_ended(several)


def assert_ended(several):
    """Its program, and every process that the program divided into."""
    program = several._program._program
    assert program.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, 0)


def planted_rows():
    """Every fault of the gate's table, from lines and from memory, among rows that are right."""
    rows = []
    for name, planted in planted_faults.PLANTED.items():
        if isinstance(planted, dict):
            rows += [
                (f"{name}", planted),
                (f"{name} again", Line(json.dumps(planted).encode() + b"\n")),
            ]
    clean = [(f"row {n}", row) for n, row in enumerate(planted_faults.CLEAN)]
    return [
        *clean,
        *rows,
        *clean,
        ("a.csv:3", BadRow("has 2 fields", "missing_field")),
        ("a.jsonl:9", Line(b'{"text": "cu\n')),
    ]


@pytest.mark.slow
def test_the_same_documents_and_the_same_report():
    assert_same_by_processes(planted_rows())


@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
def test_the_same_however_many_rows_the_tokenizer_is_given_at_once(at_once):
    whole = list(chunks_of([*planted_rows(), *(("bad", BadRow("torn", "unparsable")),) * 20]))
    in_parts = ChunkEncoder(encoder().tokenizer, WIDTH, at_once=at_once).encoded(whole)
    for (_, one), (_, other) in zip(in_parts, encoder().encoded(whole), strict=True):
        assert facts(one) == facts(other)


@pytest.mark.slow
def test_the_same_where_a_chunk_needs_the_rows_before_it():
    """Judged answers, pairs of which ask the same; one of those before a chunk cannot be read."""
    answers = [
        {"prompt": f"what is {n // 2}?", "completion": f" {n}", "label": n % 2} for n in range(40)
    ]
    rows = [
        (f"row {n}", BadRow("torn", "unparsable") if n == 20 else row)
        for n, row in enumerate(answers)
    ]
    assert_same_by_processes(rows, encoder(kinds=("unpaired preference",)), earlier=4)


@pytest.mark.slow
def test_the_same_under_other_settings():
    of = encoder(train_on="answers", train_on_roles=["user", "assistant"], train_on_turns="last")
    of.overlong = "drop"
    rows = [(f"row {n}", row) for n, row in enumerate(planted_faults.CLEAN * 4)]
    assert_same_by_processes(rows, of)


@pytest.mark.slow
def test_rows_that_json_has_no_word_for_are_made_here():
    rows = [(f"row {n}", {"text": f"number {n}"}) for n in range(60)]
    rows[40] = "row 40", {"input_ids": np.array([5, 6, 7])}
    rows[50] = "row 50", {"text": "half of a pair: \ud83d"}
    assert_same_by_processes(rows, taken_here=2)


@pytest.mark.slow
def test_a_store_of_several_processes(tmp_path, plant):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"This is text {n % 180}."}) + "\n" for n in range(200))
    )
    alone = build_store(path, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path / "alone", processes=1)
    plant(
        TokenizingProcesses,
        "encoded",
        lambda encoded, self, some: encoded(self, helped(self, list(some))),
    )
    store = build_store(path, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path / "several", processes=3)
    for name in ("lengths", "targets", "rows", "hashes"):
        assert np.array_equal(getattr(store, name), getattr(alone, name))
    for number in range(200):
        assert [array.tolist() for array in store.document(number)] == [
            array.tolist() for array in alone.document(number)
        ]
    assert (store.report, store.max_id, store.key) == (alone.report, alone.max_id, alone.key)
    assert store.report.count("duplicate_row") == 20


def forked(program):
    """Numbers of the processes that a program divided into."""
    return [
        int(number)
        for number in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["a process", "the program"])
def test_a_process_that_dies_is_said_and_leaves_nothing(killed, tmp_path, plant):
    rows = [{"text": f"number {n}"} for n in range(200)]
    several = []

    def killing(self, some):
        several.append(self)
        for number, chunk in enumerate(helped(self, list(some))):
            if number == 5:
                program = self._program._program
                processes = forked(program)
                assert len(processes) == 2
                for process in processes if killed == "a process" else [program.pid, *processes]:
                    with contextlib.suppress(
                        ProcessLookupError
                    ):  # one that ends takes the others with it
                        os.kill(process, signal.SIGKILL)
                program.wait()
            yield chunk

    plant(
        TokenizingProcesses,
        "encoded",
        lambda encoded, self, some: encoded(self, killing(self, some)),
    )
    with pytest.raises(ChildProcessError, match=r"ended with status -9.*dataset_num_proc"):
        build_store(rows, Tokenizer(tiny.tokenizer()), WIDTH, tmp_path, processes=2)
    assert list(tmp_path.iterdir()) == []
    if killed == "a process":
        assert_ended(several[0])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "signal", None])
def test_one_that_fails_ends_them_all(fault):
    """What the others would wait for never comes."""
    program = (
        "import os, signal, sys, time\n"
        "from chronicals.data.making.worker import forked\n"
        "def serving(own):\n"
        "    number = pipes.index(own)\n"
        "    opened = {pipe for pipe in [p for pair in pipes for p in pair] if "
        "os.path.exists(f'/proc/self/fd/{pipe}')}\n"
        "    assert opened == set(own), opened\n"
        "    if number == 1 and sys.argv[1] == 'raises': raise ValueError('row 7')\n"
        "    if number == 1 and sys.argv[1] == 'signal': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    if sys.argv[1] != 'None': time.sleep(60)\n"
        "pipes = [os.pipe() for _ in range(3)]\n"
        "sys.exit(forked(pipes, serving))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(fault)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == {"raises": 1, "signal": 128 + signal.SIGSEGV, None: 0}[fault], (
        done.stderr
    )
    assert ("ValueError: row 7" in done.stderr) == (fault == "raises")


def test_whoever_waits_for_a_process_learns_that_it_died():
    """Of three one never began, and each of the others dies at its second chunk."""

    class Dying:
        def __init__(self):
            self.answers = 0

        def answer(self, frame):
            self.answers += 1
            time.sleep(0.01)
            if self.answers > 1:
                raise ChildProcessError("killed")
            return frame_of_encoded(next(of.encoded([chunk_of_frame(*frame)]))[1])

    of = encoder()
    rows = [(f"row {n}", {"text": f"number {n}"}) for n in range(200)]
    with TokenizingProcesses(of, 3) as several:
        several._free.put(Dying())
        several._free.put(Dying())
        with pytest.raises(ChildProcessError, match="killed"):
            list(several.encoded(chunks_of(rows)))


@pytest.mark.slow
def test_what_a_process_said_last_is_said(tmp_path, monkeypatch):
    (tmp_path / "how.json").write_text("no JSON")
    program = processes._Program(tmp_path, 2)
    with pytest.raises(ChildProcessError, match="status 1: json.decoder.JSONDecodeError") as error:
        program.processes[1].answer()
    program.end()
    assert "Traceback" in str(error.value) and "memory" not in str(error.value)


@pytest.mark.parametrize("missing", ["pipes", "a program"])
def test_a_program_that_cannot_begin_leaves_no_pipes_open(missing, tmp_path, monkeypatch, plant):
    opened = itertools.count()

    def pipe(real):
        if next(opened) == 5:
            raise OSError(24, "Too many open files")
        return real()

    if missing == "pipes":
        plant(os, "pipe", pipe)
    else:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files" if missing == "pipes" else "nothing"):
        processes._Program(tmp_path, 4)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.slow
def test_a_build_that_is_given_up_ends_its_processes():
    rows = [(f"row {n}", {"text": f"number {n}"}) for n in range(400)]
    with TokenizingProcesses(encoder(), 2) as several:
        made = several.encoded(helped(several, list(chunks_of(rows))))
        for _ in range(6):
            next(made)
    assert_ended(several)


@pytest.mark.parametrize("fault", ["class", "namesake", "method", "vocabulary", "unwritable"])
def test_a_tokenizer_that_no_other_process_can_have(fault, caplog, plant, let_raise):
    inner = tiny.tokenizer()
    if fault == "class":
        inner.__class__ = type("OfTheUsersOwn", (type(inner),), {})
    elif fault == "namesake":
        inner.__class__ = type(type(inner).__name__, (type(inner),), {})
    elif fault == "method":
        inner.apply_chat_template = inner.apply_chat_template
    elif fault == "vocabulary":
        other = tiny.tokenizer()
        other.add_tokens(["<another>"])
        plant(type(inner), "save_pretrained", lambda save, self, folder: save(other, folder))
    else:
        let_raise(type(inner), save_pretrained=OSError("no room"))
    of = encoder(inner)
    rows = [(f"row {n}", {"text": f"number {n}"}) for n in range(60)]

    def waiting(several):
        for chunk in list(chunks_of(rows)):
            until = time.monotonic() + 120
            while chunk.first and not several._doubted:
                assert time.monotonic() < until, "nothing is said"
                time.sleep(0.01)
            yield chunk

    with caplog.at_level(logging.WARNING), TokenizingProcesses(of, 2) as several:
        found = list(several.encoded(waiting(several)))
    said = [record.message for record in caplog.records if "dataset_num_proc" in record.message]
    reasons = {"class": "OfTheUsersOwn is no", "vocabulary": "another", "unwritable": "no room"}
    assert len(said) == 1 and reasons.get(fault, "of transformers' own") in said[0]
    assert sum(len(encoded.documents) for _, encoded in found) == 60


@pytest.mark.parametrize(
    ("alone", "expected", "asked"), [(1 << 20, 0, False), (300, 0, True), (1 << 20, 1 << 24, True)]
)
def test_help_is_asked_for_where_there_is_much_to_do(alone, expected, asked, plant, set_constants):
    set_constants(processes, LETTERS_ALONE=alone)
    asking = []
    plant(TokenizingProcesses, "_start", lambda start, self: asking.append(True))
    rows = [(f"row {n}", {"text": f"number {n}"}) for n in range(60)]
    with TokenizingProcesses(encoder(), 4, expected) as several:
        assert sum(len(encoded.documents) for _, encoded in several.encoded(chunks_of(rows))) == 60
    assert asking == [True] * asked


@pytest.mark.parametrize(
    ("cores", "quota", "count"),
    [
        (1, None, 1),
        (3, "max 100000", 3),
        (256, "max 100000", processes.MAX_TOKENIZING_PROCESSES),
        (64, "350000 100000", 3),
        (64, "50000 100000", 1),
    ],
)
def test_one_a_core(cores, quota, count, let_return, set_constants, tmp_path):
    let_return(os, sched_getaffinity=set(range(cores)))
    set_constants(processes, CPU_QUOTA_FILE=tmp_path / "cpu.max")
    if quota:
        processes.CPU_QUOTA_FILE.write_text(quota + "\n")
    assert TokenizingProcesses(encoder()).count == count


def test_the_configuration_sets_how_many(tmp_path, record_calls):
    made = record_calls(TokenizingProcesses, "__init__")
    config = ChronicalsConfig(cache_dir=tmp_path, max_seq_length=256, dataset_num_proc=1)
    open_store(planted_faults.CLEAN, tiny.tokenizer(), config)
    assert [count for _, _, count, _ in made] == [1]


def test_frames_come_as_they_went():
    line = Line(b'\xef\xbb\xbf{"text": "b"}\r\n')
    bad = BadRow("why", "wrong_type")
    chunk = RowChunk(
        12,
        ["a", "b", "c", "d"],
        [{"text": "é\u2028🙂", "price": object()}, line, bad, {"id": None}],
    )
    pipe = io.BytesIO()
    write_frame(pipe, *frame_of_chunk(chunk))
    write_frame(pipe, {"last": True})
    pipe.seek(0)
    again = chunk_of_frame(*read_frame(pipe))
    assert (again.first, again.places) == (12, ["a", "b", "c", "d"])
    assert [parsed(record) for record in again.records] == [
        {"text": "é\u2028🙂", "price": 0},
        {"text": "b"},
        bad,
        {"id": None},
    ]
    assert read_frame(pipe) == ({"last": True}, b"") and read_frame(pipe) is None
    pipe = io.BytesIO(pipe.getvalue()[:30])
    with pytest.raises(EOFError):
        read_frame(pipe)


@pytest.mark.parametrize(
    "row",
    [("a", "b"), {"text": ("a", "b")}, {None: 1, "foo": 2}, {"text": "\ud83d"}, None, b"{}"],
    ids=repr,
)
def test_a_row_that_would_come_back_as_another_does_not_go(row):
    assert frame_of_chunk(RowChunk(0, ["a"], [row])) is None


def test_every_name_of_the_room_is_there():
    assert dir(data) == data.__all__ and all(
        getattr(data, name) is not None for name in data.__all__
    )
    with pytest.raises(AttributeError, match="TokenStore"):
        _ = data.Store


@pytest.mark.slow
def test_a_process_starts_with_what_it_needs():
    """Not with pyarrow either, whose allocator has a thread: only a program of one thread may
    divide.
    """
    program = (
        "import sys, chronicals.data.making.worker; assert not {'torch', 'numba', 'pandas', "
        "'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def status_of_worker(folder, condition):
    """What a worker without chunks ends with: 7 if the condition holds then."""
    TokenizingProcesses(encoder())._describe(folder)
    program = (
        "import sys\n"
        "from chronicals.data.making import worker\n"
        f"sys.argv = ['worker', {str(folder)!r}]\n"
        "try:\n"
        "    worker.tokenise_for_parent()\n"
        "except SystemExit as ended:\n"
        f"    sys.exit(ended.code or 7 * ({condition}))\n"
    )
    return subprocess.run([sys.executable, "-c", program]).returncode


@pytest.mark.slow
def test_a_process_never_imports_torch(tmp_path):
    """Not even where transformers would."""
    assert status_of_worker(tmp_path, "sys.modules['torch'] is None") == 7


@pytest.mark.slow
def test_a_process_tokenises_by_tiktoken(tmp_path):
    assert status_of_worker(tmp_path, "'tiktoken' in sys.modules") == 7


@pytest.mark.slow
def test_processes_end_with_one_that_is_killed():
    """Also where another holds the pipes open, so that they do not end."""
    program = (
        "import os, sys, time; sys.path[:0] = sys.argv[1:]\n"
        "import tiny\n"
        "from chronicals.data import Tokenizer\n"
        "from chronicals.data.making.encoding import ChunkEncoder\n"
        "from chronicals.data.making.processes import TokenizingProcesses\n"
        "with TokenizingProcesses(ChunkEncoder(Tokenizer(tiny.tokenizer()), 64), 2) as several:\n"
        "    several._start()\n"
        "    while several._free.qsize() < 2: time.sleep(0.01)\n"
        "    if other := os.fork(): print(several._program._program.pid, other, flush=True)\n"
        "    time.sleep(60)\n"
    )
    paths = [str(Path(tiny.__file__).parent), str(Path(processes.__file__).parents[3])]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *paths], stdout=subprocess.PIPE, text=True
    )
    group, other = map(int, parent.stdout.readline().split())
    assert len(members(group)) == 3
    parent.kill()
    parent.wait()
    try:
        assert wait_until(lambda: not members(group), 5), members(group)
    finally:
        os.kill(other, signal.SIGKILL)
