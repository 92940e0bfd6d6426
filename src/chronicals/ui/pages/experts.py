"""Experts' I/O of a run that offloads experts: hits and rates by tier, queue and stalls."""

from __future__ import annotations

from nicegui import ui

from chronicals.ui.charts import line_chart
from chronicals.ui.expert_io import IO, ExpertIO
from chronicals.ui.frame import card, frame, heading
from chronicals.ui.metrics import Curve, Point, thinned
from chronicals.ui.panels import fact, redraw, size
from chronicals.ui.services import Services
from chronicals.ui.words import Say

DRAFT = "experts"

MOST_OTHERS = 12
"""Kinds of lines that this page does not know, of which the numbers are shown."""


def add_experts(services: Services) -> None:
    """Add the page."""

    @ui.page("/experts")
    def experts() -> None:
        with frame(services, "experts") as say:
            heading(say("nav.experts"), say("experts.about"))
            _ExpertPanel(services, say).build()


class _ExpertPanel:
    """Choice of a run, and what its experts moved, read each second."""

    def __init__(self, services: Services, say: Say):
        self.services = services
        self.say = say
        self.read: ExpertIO | None = None
        self.charts: dict[str, ui.echart] = {}

    def build(self) -> None:
        offloading = [run.name for run in self.services.runs.all() if (run.folder / IO).is_file()]
        if not offloading:
            with card():
                ui.label(self.say("experts.none")).classes("quiet")
            return
        kept = self.services.drafts.texts(DRAFT).get("run", "")
        chosen = kept if kept in offloading else offloading[0]
        choice = ui.select(offloading, value=chosen, label=self.say("experts.run"))
        choice.props("outlined dense options-dense").classes("run-choice")
        choice.on_value_change(lambda event: self._choose(event.value))
        self.sums = ui.element("div").classes("halves")
        self.drawn = ui.element("div").classes("charts")
        self._choose(chosen)
        ui.timer(1.0, self.update)

    def _choose(self, name: str) -> None:
        self.services.drafts.fill_in(DRAFT, "run", name)
        self.read = ExpertIO(self.services.runs.named(name).folder / IO)
        self.drawn.clear()
        self.charts = {}
        self.update()

    def update(self) -> None:
        """Show the sums and the curves, if lines were added."""
        if self.read is None or not self.read.read_on():
            return
        self.sums.clear()
        with self.sums:
            for name, tier in self.read.tiers.items():
                with card(name), ui.element("div").classes("facts"):
                    rate, hits = tier.rate, tier.hit_rate
                    fact("-" if hits is None else f"{hits:.1%}", self.say("experts.hits"))
                    fact("-" if rate is None else f"{rate:.2f} GB/s", self.say("experts.rate"))
                    fact(size(tier.moved), self.say("experts.moved"))
                    fact(f"{tier.misses:,}", self.say("experts.misses"))
                    fact(f"{tier.evicted:,}", self.say("experts.evicted"))
            with card(self.say("experts.stalls")), ui.element("div").classes("facts"):
                stall = self.read.stall_milliseconds
                fact("-" if stall is None else f"{stall:.3g} ms", self.say("experts.stall"))
                fact(f"{self.read.steps:,}", self.say("experts.steps"))
            if self.read.others:
                with card(self.say("experts.others")), ui.element("div").classes("facts"):
                    for kind, count in self.read.others.most_common(MOST_OTHERS):
                        fact(f"{count:,}", kind)
        self._draw(self.read)

    def _draw(self, read: ExpertIO) -> None:
        rates = {tier: curve_by_second(moved, 1e-9) for tier, moved in read.moved.items()}
        curves = {
            "experts.rates": rates,
            "experts.queue": {"": curve_by_second(read.queue, 1)},
            "experts.waits": {"": curve_by_second(read.stalled, 1)},
        }
        for name, lines in curves.items():
            if name not in self.charts:
                with self.drawn, ui.element("figure").classes("chart"):
                    ui.label(self.say(name)).classes("chart-title")
                    chart = ui.echart(line_chart(lines)).classes("chart-canvas")
                    self.charts[name] = chart
            else:
                redraw(self.charts[name], line_chart(lines))


def curve_by_second(by_second: dict[int, int] | dict[int, float], scale: float) -> Curve:
    """Return values by second as a curve."""
    return Curve(thinned(points_of(by_second, scale)), [])


def points_of(by_second: dict[int, int] | dict[int, float], scale: float) -> list[Point]:
    """Return values by second as points, from the first second on."""
    if not by_second:
        return []
    first = min(by_second)
    return [(second - first, by_second[second] * scale) for second in sorted(by_second)]
