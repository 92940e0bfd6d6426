"""The page in Chromium: what people do with it, and what breaks other pages (`make test-ui`)."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import pytest

import tiny
from chronicals.ui.frame import NAVIGATION
from chronicals.ui.jobs import JOB, Jobs
from chronicals.ui.place import Place, read_record, write_record
from chronicals.ui.queues import Queues

pytestmark = pytest.mark.browser

ADDRESSES = [address for entries in NAVIGATION.values() for address in entries.values()]
START_SECONDS = 60
RUN_SECONDS = 180

LIVE = """() => [...document.querySelectorAll('.chart')].map(figure => {
    const element = figure.querySelector('.chart-canvas');
    const series = getElement(Number(element.id.slice(1))).chart.getOption().series;
    return [figure.querySelector('.chart-title').innerText, series.map(one => one.data.map(point => point[0]).join(' '))];
})"""
"""The steps of the curves that a page has drawn, by title; as texts, for a list of points takes seconds to
arrive."""


class Site:
    """A folder with a small model and data, and the server of its page."""

    def __init__(self, folder):
        self.root = folder.resolve()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "chronicals.cli", "ui"]
        with (self.root / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--root", str(self.root), "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return urllib.request.urlopen(self.address("/"))
            except urllib.error.HTTPError:  # 401: it is there
                return None
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None
                time.sleep(0.1)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def address(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    @property
    def key(self):
        return (self.root / ".chronicals-page" / "key").read_text()

    @property
    def jobs(self):
        return Jobs(Place(self.root))

    def forget(self):
        """Without drafts, jobs and runs, as for somebody who comes for the first time."""
        for job in self.jobs.all():
            job.stop()
            until(lambda job=job: not job.is_alive)
        for name in ("drafts", "jobs", "queues", "chats"):
            shutil.rmtree(self.root / ".chronicals-page" / name, ignore_errors=True)
        for name in ("runs", "studies", "benchmarks", "exported"):
            shutil.rmtree(self.root / name, ignore_errors=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("site"))
    tiny.llama().save_pretrained(site.root / "model")
    tiny.tokenizer().save_pretrained(site.root / "model")
    rows = "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    (site.root / "chats.jsonl").write_text(rows)
    site.start()
    yield site
    site.forget()
    site.kill()


@pytest.fixture
def site(server):
    server.forget()
    return server


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(site, chromium):
    """A function that opens a page, let in by the key; errors of its console fail the test."""
    contexts = []
    wrong = []

    def open_page(path, strict=True, **options):
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        if strict:
            page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
            page.on("pageerror", lambda error: wrong.append(str(error)))
        ours = f"127.0.0.1:{site.port}"
        page.on("request", lambda one: ours in one.url or wrong.append(f"asked {one.url}"))
        page.goto(site.address(f"/?key={site.key}"))
        page.goto(site.address(path))
        page.wait_for_selector(".title")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [text for text in wrong if not text.startswith("asked data:")]


def until(condition, seconds=RUN_SECONDS):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def field(page, name):
    return page.locator(f'[data-field="{name}"]')


def fill(page, **texts):
    for name, text in texts.items():
        field(page, name).fill(text)
    page.wait_for_timeout(800)  # inputs wait for a pause in typing


RECIPE = {
    "model": "model",
    "data": "chats.jsonl",
    "max_seq_length": "128",
    "batch_size": "1",
    "gradient_accumulation_steps": "1",
    "learning_rate": "1e-3",
}


def start(page, **texts):
    """Start a run of the stage that is open, and wait until it has its first step."""
    fill(page, **{**RECIPE, **texts})
    page.get_by_role("button", name="Start").click()
    page.locator(".chip.running").wait_for(timeout=60_000)
    page.locator(".chart").first.wait_for(timeout=120_000)


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_every_page_opens_without_an_error_and_fits(opened, site, width, scheme):
    page = opened("/", color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    times = {}
    for address in ADDRESSES:
        began = time.perf_counter()
        page.goto(site.address(address))
        page.wait_for_selector(".title")
        times[address] = time.perf_counter() - began
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        is_dark = page.evaluate("document.body.classList.contains('body--dark')")
        assert is_dark == (scheme == "dark")
    assert max(times.values()) < 10 and statistics.median(times.values()) < 2, times
    if width < 900:
        assert not page.locator(".side").is_visible()
        page.get_by_role("button", name="Menu").click()
        page.get_by_role("link", name="Doctor").click()
        page.wait_for_url("**/doctor")


def test_form_run_curve_and_chat(opened, site):
    page = opened("/train/sft")
    fill(page, batch_size="-1", data="missing.jsonl", model="model")
    page.get_by_text("batch_size: -1: Input should be greater than 0").first.wait_for()
    page.get_by_role("button", name="Start").click()
    page.wait_for_timeout(500)
    assert not site.jobs.all()
    fill(page, **RECIPE, max_steps="30")
    page.locator(".fact-value").first.wait_for(timeout=60_000)  # of the plan
    held = sum(parameter.numel() for parameter in tiny.llama().parameters())
    assert page.locator(".plan .fact-value").first.inner_text() == f"{held / 1e3:.3g} k"
    fill(page, data="missing.jsonl")
    page.get_by_role("button", name="Start").click()
    page.get_by_text("there is no such file").wait_for()
    start(page, max_steps="30")
    (job,) = site.jobs.all()
    assert job.shown == f"chronicals train .chronicals-page/jobs/{job.name}/recipe.yaml"
    page.get_by_text(job.shown).wait_for()
    page.locator(".chip.finished").wait_for(timeout=RUN_SECONDS * 1000)
    charts = dict(page.evaluate(LIVE))
    assert charts["loss"][0].split() == [str(step) for step in range(1, 31)]
    report = page.get_by_role("link", name="Report").get_attribute("href")
    assert (
        page.request.get(site.address(report))
        .headers["content-security-policy"]
        .startswith("sandbox")
    )
    page.get_by_role("link", name="Chat", exact=True).last.click()
    field(page, "beside").wait_for()
    assert field(page, "model").input_value() == "runs/sft-1"
    assert field(page, "beside").input_value() == "model"
    page.get_by_text("Settings").click()
    fill(page, max_new_tokens="4")
    field(page, "question").fill("what is 3? <img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    until(lambda: page.locator(".answer").count() == 2)
    conversation = site.root / ".chronicals-page" / "chats" / "conversation.json"
    until(lambda: all(answer["done"] for answer in read_record(conversation)[0]["answers"]))
    assert not [answer for answer in read_record(conversation)[0]["answers"] if answer["error"]]
    page.reload()
    page.get_by_text("onerror=alert(1)").wait_for()
    assert page.locator(".turns img").count() == 0


def test_a_reload_and_a_second_tab_show_the_same(opened, site):
    page = opened("/train/dpo")
    fill(page, model="<script>document.title='x'</script>", learning_rate="fast")
    page.reload()
    page.wait_for_selector('[data-field="model"]')
    assert field(page, "model").input_value() == "<script>document.title='x'</script>"
    assert field(page, "learning_rate").input_value() == "fast"
    other = page.context.new_page()
    other.goto(site.address("/configuration/dpo"))
    other.wait_for_selector('[data-field="model"]')
    assert field(other, "learning_rate").input_value() == "fast"
    fill(other, learning_rate="3e-5")
    until(lambda: field(page, "learning_rate").input_value() == "3e-5", 10)
    assert page.title() == "DPO · chronicals"


def test_yaml_in_both_directions_and_presets(opened, site):
    page = opened("/configuration/sft")
    fill(page, model="model", data="chats.jsonl")
    text = page.locator(".yaml textarea")
    until(lambda: "model: model" in text.input_value(), 10)
    text.fill("model: model\ndata: chats.jsonl\nlearning_rate: 5e-6\nmax_steps: 7\n")
    page.wait_for_timeout(500)
    page.get_by_role("button", name="Take this YAML").click()
    until(lambda: field(page, "learning_rate").input_value() == "5e-06", 10)
    assert field(page, "max_steps").input_value() == "7"
    text.fill("learning_rat: 1\n")
    page.wait_for_timeout(500)
    page.get_by_role("button", name="Take this YAML").click()
    page.get_by_text("did you mean").wait_for()
    assert field(page, "learning_rate").input_value() == "5e-06"


def test_stop_and_resume(opened, site):
    page = opened("/train/sft")
    start(page, max_steps="100000")
    page.get_by_role("button", name="Stop").click()
    page.locator(".chip.stopped").wait_for(timeout=60_000)
    page.get_by_role("button", name="Resume").click()
    until(lambda: len(site.jobs.all()) == 2, 10)
    again = site.jobs.all()[0]
    assert again.arguments == ["train", "--resume", "--output-dir", "runs/sft-1"]
    page.locator(".chip.running").wait_for(timeout=60_000)
    until(lambda: "going on" in again.log.read_text() or "resum" in again.log.read_text(), 90)


def test_the_run_outlives_the_server_and_the_page_returns_without_gap_or_repeat(opened, site):
    page = opened("/train/sft", strict=False)
    start(page, max_steps="2500")
    (job,) = site.jobs.all()
    metrics = site.root / "runs" / "sft-1" / "metrics.jsonl"
    site.kill()
    before = len(metrics.read_text().splitlines())
    until(lambda: len(metrics.read_text().splitlines()) > before + 20)
    assert job.state == "running"
    site.start()
    points = until(lambda: (steps := drawn_steps(page)) and steps[-1] > before + 20 and steps, 60)
    assert points == sorted(set(points)) and points[0] == 1
    if len(points) < 1000:
        assert points == list(range(1, len(points) + 1))
    job.stop()
    page.locator(".chip.stopped, .chip.finished").wait_for(timeout=60_000)
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    until(lambda: drawn_steps(page)[-1] == last, 20)


def drawn_steps(page):
    """Steps of the points of the first curve; none while the page is being built anew."""
    try:
        charts = page.evaluate(LIVE)
    except Exception:
        return []
    return [int(step) for step in charts[0][1][0].split()] if charts else []


def test_the_browser_is_closed_during_a_megabyte_of_output(opened, site):
    code = "for n in range(16384): print('x' * 63, flush=True)\nprint('the end')"
    job = own_job(site, f"import time; time.sleep(3)\n{code}")
    page = opened("/run?name=runs/own")
    page.locator(".chip.running").wait_for()
    page.context.close()
    until(lambda: job.state == "finished", 60)
    assert job.log.stat().st_size == 2**20 + len("the end\n")
    again = opened("/run?name=runs/own")
    again.get_by_text("the end").wait_for()


def own_job(site, code, name="runs/own"):
    """A job in the queue, as of a run, whose command is a program of the test's own."""
    jobs = site.jobs
    job = jobs.create(jobs.new_folder("sft"), "sft", ["train", "own"], "cpu", name)
    record = read_record(job.folder / JOB)
    write_record(job.folder / JOB, {**record, "command": [sys.executable, "-c", code]})
    Queues(jobs).add(job)
    return job


def test_a_failed_run_shows_its_reason_as_text(opened, site):
    code = "import sys; print('error data: <b id=evil>no rows</b>'); sys.exit(1)"
    own_job(site, code)
    page = opened("/run?name=runs/own")
    page.locator(".chip.failed").wait_for()
    page.locator(".failure").get_by_text("<b id=evil>no rows</b>").wait_for()
    assert page.locator("#evil").count() == 0


def test_jobs_that_wait_are_listed_and_can_be_removed(opened, site):
    first = own_job(site, "import time; time.sleep(60)")
    until(lambda: first.is_alive, 20)
    second = own_job(site, "pass", "runs/second")
    page = opened("/")
    page.get_by_text("cpu · 1").wait_for()
    assert Queues(site.jobs).waiting() == {"cpu": [second.name]}
    page.get_by_role("button", name="Remove").click()
    until(lambda: page.get_by_text("cpu · 1").count() == 0, 10)
    first.stop()
    until(lambda: not first.is_alive)
    page.wait_for_timeout(2000)  # the server looks at the queues each second
    assert second.state == "stopped" and not second.log.exists()


def test_ten_thousand_points_of_four_runs_are_drawn_and_followed(opened, site):
    for number in range(4):
        folder = site.root / "runs" / f"long-{number}"
        folder.mkdir(parents=True)
        lines = [
            f'{{"step": {n}, "loss": {5 / n + number}, "time": {n}}}\n' for n in range(1, 10_001)
        ]
        (folder / "metrics.jsonl").write_text("".join(lines))
    page = opened("/")
    until(lambda: page.get_by_role("checkbox").count() == 4, 20)
    for number in range(4):
        row = page.locator(".run-row", has_text=f"long-{number}")
        if not row.get_by_role("checkbox").is_checked():
            row.get_by_role("checkbox").click()
            until(row.get_by_role("checkbox").is_checked, 20)
    began = time.perf_counter()
    page.goto(site.address("/doctor"))
    page.wait_for_selector(".title")
    empty = time.perf_counter() - began  # what a page without curves takes at this moment
    began = time.perf_counter()
    page.goto(site.address("/"))
    until(lambda: len(dict(charts_of(page)).get("loss", [])) == 8, 20)
    drawn = time.perf_counter() - began
    assert drawn < max(empty + 1, 3 * empty), (drawn, empty)
    with (site.root / "runs" / "long-0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10001, "loss": 1.5, "time": 10001}\n')
    until(lambda: any(one.endswith(" 10001") for one in dict(charts_of(page))["loss"]), 5)


def charts_of(page):
    try:
        return page.evaluate(LIVE)
    except Exception:
        return []


def test_by_keyboard_from_the_form_to_the_start(opened, site):
    page = opened("/train/sft")
    field(page, "model").focus()
    page.keyboard.type("model")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.field") == "data"
    page.keyboard.type("missing.jsonl")
    page.wait_for_timeout(800)
    button = page.get_by_role("button", name="Start")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_text("there is no such file").wait_for()


def test_languages(opened, site):
    page = opened("/")
    for name, word in (("中文", "运行"), ("日本語", "実行"), ("English", "Runs")):
        page.locator(".language").click()
        page.get_by_role("option", name=name).click()
        page.locator(".title", has_text=word).wait_for()
        assert page.locator(".title").inner_text() == word


def test_the_best_trial_changes_the_form(opened, site):
    folder = site.root / "runs" / "study"
    for number, value in ((0, 2.0), (1, 1.5)):
        trial = {
            "number": number,
            "params": {"learning_rate": 1e-4 * (number + 1)},
            "fields": {"learning_rate": 1e-4 * (number + 1)},
            "repeats": None,
        }
        trial |= {"state": "complete", "value": value, "reason": ""}
        path = folder / "trials" / f"{number:04d}"
        path.mkdir(parents=True)
        write_record(path / "trial.json", trial)
    write_record(folder / "study.json", {"settings": {"direction": "minimize"}})
    page = opened("/tuner")
    page.get_by_text("Best: trial 1, 1.5").wait_for()
    page.get_by_role("button", name="Apply the best").click()
    page.wait_for_url("**/train/sft")
    until(lambda: field(page, "learning_rate").input_value() == "0.0002", 10)
    drafts = site.root / ".chronicals-page" / "drafts"
    assert read_record(drafts / "sft.json")["learning_rate"] == "0.0002"


def test_experts_are_followed_from_a_recorded_file(opened, site):
    page = opened("/experts")
    page.get_by_text("No run in this folder offloads experts").wait_for()
    folder = site.root / "runs" / "mixture"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    line = {"t": 1.0, "kind": "hit", "tier": "vram", "layer": 0, "expert": 1, "bytes": 0, "us": 0}
    miss = {**line, "kind": "miss"}
    load = {**line, "kind": "load", "tier": "ram", "bytes": 10**9, "us": 50_000}
    lines = [line, line, line, miss, load]
    (folder / "io.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    page.reload()
    page.get_by_text("75.0%").wait_for()
    page.get_by_text("20.00 GB/s").wait_for()
    with (folder / "io.jsonl").open("a") as file:
        file.write(json.dumps(miss) + "\n")
        file.write(json.dumps({**line, "kind": "<b>write</b>"}) + "\n")
    page.get_by_text("60.0%").wait_for()
    page.get_by_text("<b>write</b>").wait_for()
    assert page.get_by_text("75.0%").count() == 0


def status(site, path, host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{site.port}")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode(errors="replace")


def test_who_is_let_in_and_where_paths_lead(site):
    assert status(site, "/")[0] == status(site, "/?key=wrong")[0] == 401
    code, headers, _ = status(site, f"/?key={site.key}")
    cookie = headers["set-cookie"].partition(";")[0]
    assert code == 303 and status(site, "/", Cookie=cookie)[0] == 200
    assert status(site, "/", host=f"evil.example:{site.port}", Cookie=cookie)[0] == 403
    assert status(site, "/", Cookie=cookie, Origin="http://evil.example")[0] == 403
    (site.root / "runs").mkdir(exist_ok=True)
    (site.root / "runs" / "out").symlink_to("/etc")
    for run in ("..", "../..", "/etc", "runs/out", "runs%2F..%2F..", "%00"):
        code, _, text = status(site, f"/file/report?run={run}", Cookie=cookie)
        assert code == 404 and "root:" not in text, run
    assert status(site, "/file/log?job=../../etc", Cookie=cookie)[0] == 404
    assert status(site, "/static/../server.py", Cookie=cookie)[0] == 404
    _, headers, text = status(site, "/run?name=<script>alert(1)</script>", Cookie=cookie)
    assert "<script>alert(1)" not in text
    assert "connect-src 'self'" in headers["content-security-policy"]
    assert not re.search(r"https?://(?!127\.0\.0\.1|www\.w3\.org)", text)


def test_a_study_is_started_from_the_page_and_its_trials_are_listed(opened, site):
    page = opened("/tuner")
    fill(page, model="model", data="chats.jsonl", validation_split="0.2", max_steps="4")
    page.get_by_role("button", name="Start").click()
    page.get_by_text("tune: nothing to try").wait_for()
    assert not site.jobs.all()
    space = "{learning_rate: [1e-4, 1e-3, log], trials: 2, repeats: 0}"
    fill(page, tune=space)
    page.get_by_role("button", name="Start").click()
    job = until(lambda: next(iter(site.jobs.all()), None), 10)
    recipe = f".chronicals-page/jobs/{job.name}/recipe.yaml"
    assert job.arguments == ["tune", recipe, "--study=studies/1"]
    page.get_by_text(job.shown).wait_for()
    page.locator(".chip.finished").wait_for(timeout=RUN_SECONDS * 1000)
    page.locator(".card-title", has_text="studies/1").wait_for()
    assert [cells[0] for cells in table_of(page)] == ["0", "1"]
    page.get_by_text("Best: trial").wait_for()


def test_a_benchmark_is_started_from_the_page_and_drawn(opened, site):
    page = opened("/benchmark")
    fill(page, model="model", steps="2", batch_size="1", max_seq_length="64", rounds="1")
    page.get_by_role("button", name="Start").click()
    page.locator(".chip.finished").wait_for(timeout=RUN_SECONDS * 1000)
    (job,) = site.jobs.all()
    assert job.arguments[0] == "benchmark" and "--output=benchmarks/1.json" in job.arguments
    page.locator(".bars canvas, .bars svg").wait_for()
    record = read_record(site.root / "benchmarks" / "1.json")
    (cells,) = table_of(page)
    rate = record["arms"]["ours"]["tokens_per_second"]["median"]
    norm = record["arms"]["ours"]["grad_norms"][-1]
    assert cells[:2] == ["ours", f"{rate:,.0f}"] and cells[3] == f"{norm:.3f}"


def test_an_export_is_started_from_the_page_and_proved(opened, site):
    page = opened("/export?model=model")
    field(page, "to").wait_for()
    assert field(page, "model").input_value() == "model"
    fill(page, to="merged", output="exported")
    page.get_by_role("button", name="Start").click()
    page.locator(".chip.finished").wait_for(timeout=RUN_SECONDS * 1000)
    page.locator(".card-title", has_text="exported/model").wait_for()
    (proof,) = (site.root / "exported").glob("*.proof.json")
    checks = read_record(proof)["checks"]
    rows = table_of(page)
    assert [cells[0] for cells in rows] == [check["name"] for check in checks]
    assert "equal" in {cells[2] for cells in rows} and "differs" not in {cells[2] for cells in rows}


def table_of(page):
    """The texts of the cells of the page's tables, row by row."""
    page.locator(".table-box tbody tr").first.wait_for()
    rows = page.locator(".table-box tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


def test_a_run_shows_its_answers_as_it_goes_on(opened, site):
    page = opened("/train/sft")
    start(page, max_steps="100000", validation_split="0.1", eval_steps="5")
    page.get_by_text(re.compile("Answers after step [1-9]")).wait_for(timeout=60_000)
    assert page.locator(".answers .answer").count() == 2
    (job,) = site.jobs.all()
    job.stop()
    page.locator(".chip.stopped").wait_for(timeout=60_000)


@pytest.mark.parametrize("language, text", [("zh", "学习率的峰值"), ("ja", "学習率の最大値")])
def test_help_of_fields_is_in_the_language_of_the_page(opened, site, language, text):
    kept = site.root / ".chronicals-page" / "preferences.json"
    write_record(kept, {"language": language})
    try:
        page = opened("/train/sft")
        page.locator(".field-help", has_text=text).wait_for()
        shown = page.locator(".field-help").all_inner_texts()
        assert len(shown) > 10 and "Peak learning rate" not in shown
    finally:
        kept.unlink()
