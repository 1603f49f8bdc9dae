"""Banks of synthetic runs with known truth, for the tests of the calibration's judgement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from factories import POLICIES, diverged, make_record, make_same_point

from harness.calibration.bank import StoredArm, write_arms, write_probe, write_run
from harness.precision.policy import PrecisionPolicy
from harness.runs.record import RunRecord
from harness.runs.same_point.record import SamePointRecord

# One margin of these runs is 1 % of what is learned: 0.01 * (4 - 2.005).
MARGIN = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """One arm: what it is, how far off, how noisy, in which seeds it diverges, its probe."""

    kind: str = "fault"
    offset: float = 0.0
    held_out_offset: float | None = None
    luck: float = 0.004
    diverges: frozenset[int] = frozenset()
    probe: Mapping[str, float] | None = None
    policy: str = "bf16"
    perturbation: float = 0.0


ARMS: dict[str, Planted] = {
    "fp32_noise": Planted(kind="null", policy="fp32", perturbation=2.0**-8),
    "fp32_ulp": Planted(kind="null", policy="fp32", perturbation=2.0**-23, luck=0.003),
    "bf16": Planted(kind="harmless", probe={}),
    "one_margin": Planted(offset=1.0 * MARGIN, luck=0.01),
    "two_margins": Planted(offset=2.0 * MARGIN, luck=0.006),
    "ten_margins": Planted(offset=10 * MARGIN),
    "held_out_only": Planted(offset=0.0, held_out_offset=4.0 * MARGIN),
    "stalls": Planted(probe={"retention": 0.2}),
    "nan": Planted(diverges=frozenset(range(0, 100, 2))),
    "rare_nan": Planted(diverges=frozenset({3})),
}


class SyntheticBank:
    """An in-memory bank."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path("nowhere")
        self._arms: dict[str, dict[str, StoredArm]] = {}
        self._records: dict[str, dict[str, dict[int, RunRecord]]] = {}
        self._probes: dict[str, dict[str, SamePointRecord]] = {}

    def add(
        self,
        task: str,
        arms: Mapping[str, Planted] = ARMS,
        *,
        seeds: Iterable[int] = range(12),
        **common: Any,
    ) -> SyntheticBank:
        """Add a task with FP32 and these arms."""
        seeds = tuple(seeds)
        known = {"fp32": _stored("fp32", "reference")}
        records = {"fp32": {s: make_record("fp32", s, workload=task, **common) for s in seeds}}
        probes = {}
        for name, planted in arms.items():
            known[name] = _stored(name, planted.kind)
            policy = dataclasses.replace(
                POLICIES[planted.policy], name=name, perturbation=planted.perturbation
            )
            records[name] = {s: _record(policy, planted, s, task, common) for s in seeds}
            if planted.probe is not None:
                probe = make_same_point(**planted.probe)
                probes[name] = dataclasses.replace(probe, policy=name, workload=task)
        self._arms[task], self._records[task], self._probes[task] = known, records, probes
        return self

    def tasks(self) -> tuple[str, ...]:
        return tuple(self._records)

    def stored_arms(self, task: str) -> Mapping[str, StoredArm]:
        return self._arms[task]

    def digest(self, task: str) -> str:
        return f"digest of {task}"

    def records(self, task: str) -> Mapping[str, Mapping[int, RunRecord]]:
        return self._records[task]

    def same_point(self, task: str) -> Mapping[str, SamePointRecord]:
        return self._probes[task]

    def write(self, folder: Path) -> None:
        """Write everything as files that `calibration.bank.Bank` reads."""
        from harness.calibration.bank import run_key

        for task, records in self._records.items():
            write_arms(folder, task, list(self._arms[task].values()))
            for name, by_seed in records.items():
                for seed, record in by_seed.items():
                    key = run_key(self._arms[task][name].key, seed)
                    write_run(folder, dataclasses.replace(record, run_key=key))
            for name, probe in self._probes[task].items():
                write_probe(folder, probe, key=self._arms[task][name].key)


def _stored(name: str, kind: str) -> StoredArm:
    return StoredArm(
        name=name, kind=kind, family=name, dose="", sentence=f"{name} is planted.", key=name
    )


def _record(
    policy: PrecisionPolicy, planted: Planted, seed: int, task: str, common: Mapping[str, Any]
) -> RunRecord:
    record = make_record(
        policy,
        seed,
        workload=task,
        offset=planted.offset,
        held_out_offset=planted.held_out_offset,
        luck=planted.luck,
        **common,
    )
    return diverged(record) if seed in planted.diverges else record
