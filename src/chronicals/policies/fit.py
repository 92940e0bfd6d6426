"""``fit``: the fastest settings that fit a card, among those that change no result.

Every policy says which values of the configuration save memory for nothing but time (``settings``)
and what it adds to a step (``work``). Their combinations are candidates. Each is asked for the memory
that the trainer would expect of it, and of those that fit the one with the fewest seconds is taken,
by the estimate of plans (``policies.step_time``) at the rates of the run's card.
What would change results is offered in words, never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from chronicals.cards import Rates, rates_here
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.presets import CARDS
from chronicals.memory import LAYERS, NOTHING, Estimate
from chronicals.model_shape import ModelShape
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.facts import Facts
from chronicals.policies.model_sizes import ModelSizes
from chronicals.policies.needed_memory import FILLED, GIB, asked_for, expected_memory
from chronicals.policies.policy import Decision, Fitted, Policy, Remedy, policies
from chronicals.policies.recompute_layers import RECOMPUTE_LAYERS
from chronicals.policies.sharding import SHARDING, choose_sharding
from chronicals.policies.solver import fit_to_memory, settle_sharding, work_of
from chronicals.policies.step_time import AS_LONG_AS_PACKS, LINK, Documents, StepWork

MOST_CARDS = 64
"""Cards up to which a number that would do is looked for."""

CARDS_A_MACHINE = 8
"""Cards of a machine, where the run is on one card and does not say it."""

GIGA = 10**9

LEAST_TIME = 0.0005
"""Difference of a step's time, as a ratio, that is named; less is 0.0 % in words."""


@dataclass(frozen=True)
class Clock:
    """All that makes seconds of a step beside its settings.

    Attributes:
        rates: of the card.
        sizes: of the model.
        documents: of the data.
        link: bytes a second to other cards.
    """

    rates: Rates
    sizes: ModelSizes
    documents: Documents = AS_LONG_AS_PACKS
    link: float = LINK

    def work(self, facts: Facts, frees: bool, fitted: Fitted) -> StepWork:
        """Return the work of a step; arguments as for ``solver.work_of``."""
        return work_of(facts, frees, fitted, self.sizes, self.documents)

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step, with what its settings send to other cards.

        Beside computation that slows down by the time that it takes over the link
        (``planning.plan``), so nothing of it is hidden.
        """
        return work.at(self.rates).seconds + work.sent / self.link

    def waits(self, work: StepWork) -> bool:
        """Return whether the card waits for the host, which launches more slowly than it computes."""
        at_once = replace(work, replayed=True)
        return not work.replayed and work.at(self.rates).launches > at_once.at(self.rates).launches


class Change(NamedTuple):
    """A setting that a candidate has and the run as it was configured has not.

    Attributes:
        policy: the policy that saves memory by it.
        remedy: the fields.
        config: the configuration with this change and those before it.
    """

    policy: Policy
    remedy: Remedy
    config: ChronicalsConfig

    @property
    def fields(self) -> str:
        """The fields and their values, as they can be given."""
        return " with ".join(f"{name}={value}" for name, value in self.remedy.fields.items())

    def __str__(self) -> str:
        return self.policy.title or self.fields


@dataclass(frozen=True)
class Candidate:
    """A run with some settings.

    Attributes:
        facts: of the run with these settings.
        changes: what was changed of the run as it was configured, one after the other.
        fitted: its memory, with the recomputation that it needs.
        work: of a step.
        seconds: of a step, for comparison with other candidates.
    """

    facts: Facts
    changes: tuple[Change, ...]
    fitted: Fitted
    work: StepWork
    seconds: float

    @property
    def fits(self) -> bool:
        """True if it fits into what a run plans to use of its card, or if there is no card."""
        return self.fitted.fits

    @property
    def starts(self) -> bool:
        """True if the check before the first step lets it start."""
        total = self.fitted.memory.total
        return not total or self.fitted.held <= FILLED * total

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of the configuration that were changed, with their new values."""
        return {
            name: getattr(self.facts.config, name)
            for change in self.changes
            for name in change.remedy.fields
        }


@dataclass(frozen=True)
class Settled:
    """Result of ``fit`` for a run.

    Attributes:
        taken: the fastest candidate that fits; the leanest where none does.
        usual: the run as it was configured.
        words: lines for the log: what is taken, what each costs and saves, what is offered.
    """

    taken: Candidate
    usual: Candidate
    words: list[str] = field(default_factory=list)

    @property
    def facts(self) -> Facts:
        """The run with the settings that were taken."""
        names = frozenset(change.policy.name for change in self.taken.changes)
        return replace(self.taken.facts, taken=names)


def alone(value: Any) -> list[Any]:
    """Return the values of all processes of a run that has one."""
    return [value]


def fit_settings(
    facts: Facts,
    gather: Callable[[Any], list[Any]] = alone,
    rates: Rates | None = None,
    documents: Documents = AS_LONG_AS_PACKS,
    link: float = LINK,
) -> Settled:
    """Find the fastest settings of a run that fit its card and change no result.

    Fields that were set are not changed. What a policy cannot honour here is no candidate.

    Args:
        facts: of the run as it is configured, with the decision on sharding in its configuration.
        gather: returns the values of all processes, by rank; all of them call it equally often.
        rates: of the card; by default of that of this machine. Those of the first process count, for
            each machine keeps what it measured.
        documents: of the data.
        link: bytes a second to other cards.
    """
    of_first = gather((rates or rates_here()[0]).to_dict())[0]
    clock = Clock(Rates.from_dict(of_first), ModelSizes.of(facts.model), documents, link)
    facts = replace(facts, total=min(gather(facts.total)))
    usual = candidate(facts, (), clock)
    if not facts.total:
        return Settled(usual, usual, ["fit: settings: there is no card to fit to"])
    possible = {
        str([str(change.remedy) for change in changes]): changes for changes in combinations(facts)
    }
    # Host memory may differ between machines, and with it what can be honoured.
    everywhere = set(possible).intersection(*gather(sorted(possible)))
    shared = [changes for name, changes in possible.items() if name in everywhere]
    taken = fastest(usual, shared, clock)
    return Settled(taken, usual, fit_words(taken, usual, clock))


def fastest(usual: Candidate, combined: list[tuple[Change, ...]], clock: Clock) -> Candidate:
    """Return the candidate with the fewest seconds that fits, else the one that holds least.

    Memory is asked for in the order of the seconds that a step takes at least, until no other
    candidate can be faster.

    Args:
        usual: the run as it was configured.
        combined: changes of each other candidate.
        clock: that makes seconds.
    """
    at_least: list[tuple[float, tuple[Change, ...]]] = [(usual.seconds if usual.fits else 0.0, ())]
    for changes in combined:
        least = least_seconds(replace(usual.facts, config=changes[-1].config), clock)
        at_least.append((least, changes))
    best = None
    leanest = usual
    for least, changes in sorted(at_least, key=lambda one: (one[0], len(one[1]))):
        if best is not None and least >= best.seconds:
            break
        one = usual
        if changes:
            config = changes[-1].config
            one = candidate(replace(usual.facts, config=config), changes, clock)
        if one.fitted.held < leanest.fitted.held:
            leanest = one
        if one.fits and (best is None or one.seconds < best.seconds):
            best = one
    return best or leanest


def least_seconds(facts: Facts, clock: Clock) -> float:
    """Return the seconds of a step that recomputes nothing, and whose copies are all hidden.

    Nothing is gathered from other cards, and each of them updates a share.
    """
    nothing = dict.fromkeys((NOTHING, LAYERS), 0)
    memory = Estimate(0, ModelShape.of(facts.model.config).layers, nothing, facts.total)
    idle = Decision(RECOMPUTE_LAYERS.name, False, "")
    shared = Decision(SHARDING.name, facts.sharing > 1, "")
    frees = "reduce_in_backward" in facts.config.memory_policies
    return clock.seconds(clock.work(facts, frees, Fitted(memory, idle, shared)))


def combinations(facts: Facts) -> Iterator[tuple[Change, ...]]:
    """Yield one or several changes that go together, cost only time, and can run."""
    found: list[tuple[Change, ...]] = [()]
    for policy in policies():
        further = []
        for before in found:
            config = before[-1].config if before else facts.config
            for remedy in policy.settings(replace(facts, config=config)):
                changed = with_fields(config, remedy)
                if not remedy.price and changed is not None:
                    further.append((*before, Change(policy, remedy, changed)))
        found += further
    for changes in found[1:]:
        if why_impossible(replace(facts, config=changes[-1].config), facts) is None:
            yield changes


def with_fields(config: ChronicalsConfig, remedy: Remedy) -> ChronicalsConfig | None:
    """Return the configuration with a remedy's fields; None if they exclude each other."""
    changed = config.fitted(**remedy.fields)
    try:
        changed.check()
    except ConfigurationError:
        return None
    return changed


def candidate(facts: Facts, changes: tuple[Change, ...], clock: Clock) -> Candidate:
    """Return a run with its memory, and with the work and the seconds of a step.

    Args:
        facts: of the run, with ``changes`` in its configuration.
        changes: what was changed.
        clock: that makes seconds.
    """
    settled, frees, fitted = in_memory(facts)
    work = clock.work(settled, frees, fitted)
    return Candidate(facts, changes, fitted, work, clock.seconds(work))


def in_memory(facts: Facts, recomputed: Decision | None = None) -> tuple[Facts, bool, Fitted]:
    """Return the facts of a run with its sharding, whether gradients are freed, and its memory.

    Args:
        facts: of the run.
        recomputed: the decision on recomputation; None for what its memory needs.
    """
    settled, sharding = settle_sharding(facts)
    frees, memory = expected_memory(settled)
    if recomputed is not None:
        return settled, frees, Fitted(memory, recomputed, sharding)
    return settled, frees, fit_to_memory(settled, sharding, memory)


def can_fit(facts: Facts) -> bool:
    """Return whether any settings that change no result fit the card."""
    return any(run_fits(replace(facts, config=config)) for config in leanest_first(facts))


def leanest_first(facts: Facts) -> list[ChronicalsConfig]:
    """Return the configurations of a run that change no result; those that save most come first."""
    changed = [changes[-1].config for changes in combinations(facts)]
    return [*reversed(changed), facts.config]


def run_fits(facts: Facts) -> bool:
    """Return whether a run fits its card as it is configured."""
    settled, sharding = settle_sharding(facts)
    memory = expected_memory(settled)[1]
    return memory.fits and fit_to_memory(settled, sharding, memory).fits


def why_impossible(changed: Facts, facts: Facts) -> str | None:
    """Return why a policy that was added cannot run; None if all can.

    Args:
        changed: the run with policies that were added.
        facts: the run without.
    """
    frees = "reduce_in_backward" in changed.config.memory_policies
    held = conditions(changed)
    standing = asked_for(changed, frees) | held
    for condition in sorted(held):
        reason = why_excluded(condition, standing, changed)
        if reason:
            return reason
    for policy in policies():
        if policy.asked(changed.config) and not policy.asked(facts.config):
            reason = why_excluded(policy.name, standing, changed) or policy.why_not(changed)
            if reason:
                return reason
    return None


def fit_words(taken: Candidate, usual: Candidate, clock: Clock) -> list[str]:
    """Return lines for the log: what is taken, with costs and savings, and what is offered."""
    state = "the fastest settings that fit" if taken.fits else "none fit, these take least"
    fields = ", ".join(f"{name}={value}" for name, value in taken.settings.items())
    total = taken.facts.total
    lines = [
        f"fit: {state}: {fields or 'those of the run'}; {taken.fitted.held / GIB:.1f} of "
        f"{total / GIB:.1f} GiB expected"
    ]
    lines += each_change(taken, usual, clock)
    if lines[1:] or not taken.fits:
        lines += [f"fit: not taken, since results change: {words}" for words in offers(taken)]
    return lines


def each_change(taken: Candidate, usual: Candidate, clock: Clock) -> Iterator[str]:
    """Yield each change in words, with the time that it costs and the GiB that it saves.

    Changes count one after the other, with the recomputation of the run; then that counts.
    """
    recomputed = taken.fitted.recomputed
    before = under(usual.facts, recomputed, clock)
    for change in taken.changes:
        after = under(replace(usual.facts, config=change.config), recomputed, clock)
        yield f"fit: {change} {difference(before, after, clock)}"
        before = after
    if recomputed.runs:
        nothing = replace(recomputed, runs=False, how=NOTHING, layers=0)
        whole = under(taken.facts, nothing, clock)
        yield f"fit: {RECOMPUTE_LAYERS.title} {difference(whole, taken, clock)}"


def under(facts: Facts, recomputed: Decision, clock: Clock) -> Candidate:
    """Return the run with this recomputation, whatever its memory needs."""
    settled, frees, fitted = in_memory(facts, recomputed)
    work = clock.work(settled, frees, fitted)
    return Candidate(facts, (), fitted, work, clock.seconds(work))


def difference(before: Candidate, after: Candidate, clock: Clock) -> str:
    """Return in words the time of a step that is added, and the memory that is saved."""
    time = after.seconds / before.seconds - 1
    saved = (before.fitted.held - after.fitted.held) / GIB
    costs = f"costs {time:.1%} of a step's time" if time >= 0 else f"saves {-time:.1%} of the time"
    if abs(time) < LEAST_TIME:
        costs = "costs next to no time"
        if clock.waits(before.work) and clock.waits(after.work):
            costs = "costs no time while the card waits for the host's launches"
    return f"{costs} and {'saves' if saved >= 0 else 'takes'} {abs(saved):.2f} GiB"


def offers(taken: Candidate) -> Iterator[str]:
    """Yield in words what would take less and changes results, with its price and GiB."""
    recomputed = taken.fitted.recomputed
    for policy in policies():
        for remedy in policy.settings(taken.facts):
            config = with_fields(taken.facts.config, remedy)
            if not remedy.price or config is None:
                continue
            _, _, less = in_memory(replace(taken.facts, config=config), recomputed)
            saved = taken.fitted.held - less.held + policy.unloaded(taken.facts)
            if saved > 0:
                fields = Change(policy, remedy, config).fields
                yield f"{fields} ({remedy.price}) saves {saved / GIB:.2f} GiB"


def refuse_what_no_setting_fits(settled: Settled) -> None:
    """Check that the run with the settings that were taken may start.

    Raises:
        ConfigurationError: it may not; the message names the smallest card, or the number of cards,
            that would do.
    """
    taken = settled.taken
    if taken.starts or not taken.facts.config.check_memory:
        return
    held = taken.fitted.held / GIB
    total = taken.facts.total / GIB
    message = (
        f"fit={taken.facts.config.fit!r}: no settings that change no result fit the card's {total:.1f} GiB; the "
        f"leanest hold about {held:.1f}"
    )
    enough = what_would_do(settled.usual.facts)
    if enough:
        message += f"; {enough} would do"
    ways = "; or ".join(offers(taken))
    if ways:
        message += f". Less is taken by {ways}"
    raise ConfigurationError(f"{message}. To start it all the same, set check_memory=False")


def what_would_do(facts: Facts) -> str:
    """Return in words the smallest card, and the number of cards, on which the run would fit.

    Where neither one larger card nor several of these do, they are several of the smallest larger
    ones that do. Empty where none does.

    Args:
        facts: of the run as it was configured, which does not fit its card with any settings.
    """
    larger = [replace(facts, total=size * GIGA) for size in CARDS if size * GIGA > facts.total]
    card = smallest(larger)
    one = "" if card is None else f"a card of {card.total // GIGA} GB"
    several = number_that_would_do(facts)
    if one or several:
        return ", or ".join(words for words in (one, several) if words)
    return next(filter(None, map(number_that_would_do, larger)), "")


def number_that_would_do(facts: Facts) -> str:
    """Return in words the smallest number of its cards on which the run would fit.

    Empty where none does, or where processes share packs.
    """
    several = []
    count = 2 * facts.ranks
    while facts.context == 1 and count <= MOST_CARDS:
        several.append(on_cards(facts, count))
        count *= 2
    found = smallest([made for made in several if made is not None])
    return "" if found is None else f"{found.ranks} cards of {facts.total / GIGA:.3g} GB"


def smallest(runs: list[Facts]) -> Facts | None:
    """Return the first of some runs that fits its cards; None if none does.

    Args:
        runs: the same run on more and more memory, so that all after one that fits fit, too. The
            last is asked first, for it takes all candidates to see that none fits.
    """
    found = None
    for run in reversed(runs):
        if not can_fit(run):
            break
        found = run
    return found


def on_cards(facts: Facts, count: int) -> Facts | None:
    """Return the run on so many of its cards, with weights divided if need be.

    None if its weights cannot be divided by this number.
    """
    several = replace(facts, ranks=count, here=min(count, facts.here or CARDS_A_MACHINE))
    try:
        config = several.config.fitted(sharding=choose_sharding(several))
        return settle_sharding(replace(several, config=config))[0]
    except ConfigurationError:
        return None
