"""The rounds of a benchmark with peers: all are scouted, the fastest run in the decisive rounds.

A peer whose trainer packs or orders documents itself is compared with a reference on the documents
that it took. That reference starts beside a peer that makes its own steps of pairs.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from chronicals.benchmark.measurement import Measurement
from chronicals.benchmark.processes import OUR_ARM, REFERENCE_ARM, Arm, RunningArm
from chronicals.benchmark.rounds import BEST_PEERS, SCOUTING, BenchmarkSession
from peers.names import missing_packages_of, peer_arm


@dataclass
class PeerSession(BenchmarkSession):
    """A row that is measured with peers."""

    def scout(self, ours: list[Arm]) -> list[Arm]:
        """Run every arm once. Returns those of the decisive rounds: ours, and the fastest peers
        that were not refused.
        """
        row = self.row
        peers = []
        for name in self.options.against:
            lacking = missing_packages_of(name, row.work.mode)
            if lacking:
                row.absent[name] = f"not installed: {', '.join(lacking)}"
                self.say(f"{name}: skipped, {row.absent[name]}")
            else:
                peers.append(peer_arm(name))
        self.run_once([*ours, *peers], SCOUTING)
        speeds = {
            arm.name: statistics.median_high(row.runs[arm.name][0].rates)
            for arm in self.with_speed(peers)
        }
        able = [arm for arm in peers if arm.name in speeds]
        best = sorted(able, key=lambda arm: -speeds[arm.name])[:BEST_PEERS]
        # Peers that kept their process come last, where the next round begins with them.
        best.sort(key=lambda arm: arm.name in self.waiting)
        chosen = self.with_speed(ours) + best
        self.end_all_but(chosen)
        return chosen

    def reference_of(self, arm: Arm, measured: Measurement, label: str) -> Measurement | None:
        """Return what the arm's first steps should be, on the documents that it took; as many
        steps as the row's reference has.

        A row whose model fills the card has a reference of one step. It is that of all arms whose
        first step holds the row's documents.
        """
        row_reference = self.row.reference
        if not measured.own_batches:
            return row_reference
        steps = self.options.reference_steps
        if row_reference is not None:
            steps = len(row_reference.losses)
            if steps == 1 and measured.begins_alike:
                return row_reference
        key = json.dumps(measured.own_batches)
        if key not in self.other_references:
            path, reference_label = self._batches_of(arm, label)
            path.parent.mkdir(exist_ok=True)
            path.write_text(key)
            self.other_references[key] = self.reference_with(
                Arm(REFERENCE_ARM), reference_label, steps, path
            )
        return self.other_references[key]

    def begin_reference_of(self, arm: Arm, label: str) -> None:
        """Start the process of the reference on a peer's own steps of pairs, and end one that was
        not used.
        """
        super().begin_reference_of(arm, label)
        row_reference = self.row.reference
        work = self.row.work
        first_round = arm.kind != OUR_ARM and arm.name not in self.row.runs
        if row_reference is not None and work.kind == "pairs" and first_round:
            path, reference_label = self._batches_of(arm, label)
            self.begun_references[reference_label] = RunningArm(
                work,
                REFERENCE_ARM,
                len(row_reference.losses),
                documents=path,
                label=reference_label,
                warm_up=0,
            )

    def _batches_of(self, arm: Arm, label: str) -> tuple[Path, str]:
        """Return the file of the arm's own steps, and the label of the reference on them."""
        name = f"{arm.kind}-{label}"
        return self.row.work.folder / "results" / f"batches-{name}.json", name
