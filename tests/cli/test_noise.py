"""Warnings of libraries: out of sight in our commands, kept in a run's folder; in Python as they
were.
"""

import json
import logging
import subprocess
import sys
import warnings

import pytest

import runs
import tiny
from chronicals.cli import main, noise
from chronicals.training import loading

PYTHON = "import warnings\nwarnings.warn(text, FutureWarning)"
BY_CALLER = "import warnings\ndef called():\n    warnings.warn(text, FutureWarning, stacklevel=2)"
LOG = "import logging\nlogging.getLogger(__name__).warning(text)"


@pytest.fixture(autouse=True)
def shown(monkeypatch, caplog):
    """Texts of the warnings of Python that reach the user."""
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: texts.append(str(message)))
        caplog.set_level(logging.DEBUG)
        yield texts


def within_module(name, code, text="noise"):
    """Run code as a module of a package would; what it defines."""
    names = {"__name__": name, "text": text}
    exec(compile(code, f"/site-packages/{name.replace('.', '/')}.py", "exec"), names)
    return names


def seen(caplog, level=logging.INFO):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


@pytest.mark.parametrize("library", noise.LIBRARIES)
@pytest.mark.parametrize("code", [PYTHON, LOG], ids=["warnings", "log"])
def test_warnings_of_libraries_go_to_the_log_of_a_run(library, code, shown, caplog, tmp_path):
    with noise.collected():
        within_module(f"{library}.inner", code, "the name of something has changed")
        noise.keep_in(tmp_path)
    text = (tmp_path / "log.txt").read_text()
    assert (
        text.count("\n") == 1
        and f"{library}: " in text
        and "the name of something has changed" in text
    )
    assert shown == []
    assert seen(caplog) == [f"1 warning of {library}, nothing to act on: {tmp_path / 'log.txt'}"]


def test_a_library_is_the_issuer_where_the_callers_line_is_named(shown, tmp_path):
    with noise.collected() as collecting:
        within_module("torch.inner", BY_CALLER)["called"]()
        warnings.warn("from C++ (Triggered internally at /pytorch/x.cpp:1.)", stacklevel=1)
    assert shown == [] and collecting.libraries == {"torch"} and len(collecting.lines) == 2


@pytest.mark.parametrize("name", ["chronicals.training", "__main__", "my_model", "torchlike"])
@pytest.mark.parametrize("code", [PYTHON, LOG], ids=["warnings", "log"])
def test_our_own_and_a_users_stay_visible(name, code, shown, caplog):
    with noise.collected() as collecting:
        within_module(name, code)
    assert [*shown, *seen(caplog)] == ["noise"] and collecting.lines == []


@pytest.mark.parametrize(
    "text",
    [
        "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).",
        "Some weights of LlamaForCausalLM were newly initialized: ['lm_head.weight']",
    ],
)
@pytest.mark.parametrize("code", [PYTHON, LOG], ids=["warnings", "log"])
def test_a_warning_that_can_be_acted_on_stays_visible(text, code, shown, caplog):
    with noise.collected() as collecting:
        within_module("torch.cuda", code, text)
    assert [*shown, *seen(caplog)] == [text] and collecting.lines == []


def test_errors_of_libraries_stay_visible(caplog):
    with noise.collected() as collecting:
        within_module("bitsandbytes.cextension", LOG.replace(".warning(", ".error("))
    assert seen(caplog) == ["noise"] and collecting.lines == []


@pytest.mark.parametrize("folder", [None, "that is not there"])
def test_without_a_folder_they_are_for_debugging(folder, shown, caplog, tmp_path):
    with noise.collected():
        within_module("transformers.utils", PYTHON)
        if folder is not None:
            noise.keep_in(tmp_path / folder)
    assert shown == [] and seen(caplog) == [] and not (tmp_path / "that is not there").exists()
    assert "noise" in "".join(seen(caplog, logging.DEBUG))


def test_a_log_that_cannot_be_written_hides_no_error(caplog, tmp_path):
    (tmp_path / "log.txt").mkdir()
    with pytest.raises(RuntimeError, match="what ended the command"), noise.collected():
        noise.keep_in(tmp_path)
        within_module("torch.inner", PYTHON)
        raise RuntimeError("what ended the command")
    assert "cannot be written" in seen(caplog)[0]


def state():
    """Filters, levels and handlers of this process, of Python's and of the libraries' loggers."""
    known = logging.root.manager.loggerDict
    loggers = {name: known[name] for name in known if name.partition(".")[0] in noise.LIBRARIES}
    loggers = {
        name: logger for name, logger in loggers.items() if isinstance(logger, logging.Logger)
    }
    kept = {
        name: (
            logger.level,
            list(logger.handlers),
            list(logger.filters),
            logger.propagate,
            logger.disabled,
        )
        for name, logger in {**loggers, "root": logging.root}.items()
    }
    return (
        [*warnings.filters],
        warnings.showwarning,
        logging.Logger.callHandlers,
        logging.root.manager.disable,
        kept,
    )


def test_everything_is_put_back(shown):
    before = state()
    with pytest.raises(SystemExit), noise.collected():
        assert (
            warnings.showwarning is not before[1] and logging.Logger.callHandlers is not before[2]
        )
        raise SystemExit
    assert state() == before


@pytest.mark.slow
def test_the_trainer_in_python_changes_nothing(shown, tmp_path):
    runs.train(
        tmp_path / "first", max_steps=1
    )  # libraries imported on the way set their own loggers
    before = state()
    runs.train(tmp_path / "second", max_steps=1)
    assert state() == before


def test_an_import_changes_nothing():
    code = """
import logging, sys, warnings
def state():
    return [*warnings.filters], warnings.showwarning, logging.Logger.callHandlers, [*logging.root.handlers], logging.root.level
before = state()
import chronicals
assert state() == before
assert "chronicals.cli" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_train_says_where_they_are(shown, monkeypatch, tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(20))
    )
    load = loading.load_to_train

    def load_noisily(*given):
        for library in noise.LIBRARIES:
            within_module(f"{library}.inner", PYTHON)
        return load(*given)

    monkeypatch.setattr(loading, "load_to_train", load_noisily)
    monkeypatch.chdir(tmp_path)
    flags = [
        "--model=base",
        "--data=data.jsonl",
        "--max-steps=1",
        "--max-seq-length=128",
        "--mixed-precision=fp32",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["train", *flags, "--report-samples=0"])
    assert ended.value.code == 0, capsys.readouterr().err
    lines = (tmp_path / "chronicals-output" / "log.txt").read_text().splitlines()
    assert sum("noise" in line for line in lines) == len(noise.LIBRARIES) and "noise" not in shown
