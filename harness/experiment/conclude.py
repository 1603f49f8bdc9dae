"""From the records of a sweep to verdicts, reports and an exit code."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from harness.analysis.analyzer import analyze_model
from harness.analysis.decision import DecisionRule
from harness.analysis.findings import ModelFindings, Ratio, Reason
from harness.experiment.job import run_folder
from harness.experiment.manifest import Manifest
from harness.experiment.same_point_records import same_point_records
from harness.experiment.seed_plans import plan_of
from harness.report.terminal import print_findings
from harness.report.text import safe_name
from harness.report.writer import write_index, write_report
from harness.runs.record import RunRecord, read_record
from harness.runs.same_point.record import SamePointRecord, write_same_point
from harness.runs.timing.record import TimingRecord, read_timing

# What is emulated is not timed, and the analysis says so of each such candidate.
NOT_TIMED = "not measured: the timing stage was left out"


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What came out of a sweep.

    Attributes:
        findings: One per model.
        reports: Model name -> folder of its report.
        index: The page over all models.
        failures: Model name -> why it has no findings: its analysis or report raised.
    """

    findings: tuple[ModelFindings, ...]
    reports: dict[str, Path]
    index: Path
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 when every model has its verdicts; 1 when a reference or an analysis failed."""
        return 1 if self.failures or any(f.failed for f in self.findings) else 0


def load_records(manifest: Manifest, output_dir: Path) -> tuple[list[RunRecord], list[str]]:
    """Return the records that exist, and a line for every file that is not one.

    A policy's name is no part of what a run is, so a run may be another sweep's under another name;
    here it has the name that this sweep gives it.
    """
    found: dict[str, RunRecord] = {}
    troubles = []
    for key in dict.fromkeys(run.run_key for run in manifest.runs):
        try:
            found[key] = read_record(run_folder(output_dir, key))
        except FileNotFoundError:
            continue
        except ValueError as error:
            troubles.append(f"set aside: {error}")
    records = [
        dataclasses.replace(found[run.run_key], policy=run.policy)
        for run in manifest.runs
        if run.run_key in found
    ]
    return records, troubles


def conclude(
    manifest: Manifest,
    records: Sequence[RunRecord],
    *,
    rule: DecisionRule,
    output_dir: Path,
    reports: Path | None = None,
) -> Conclusion:
    """Analyze every model of the sweep and write its report and the index.

    Args:
        manifest: What the sweep consists of.
        records: The runs of it that exist.
        rule: Constants of the decision.
        output_dir: Where the records of timing and probes lie.
        reports: Where to write; by default `reports/<sweep_id>` below `output_dir`.
    """
    root = reports or output_dir / "reports" / safe_name(manifest.sweep_id)
    by_key = {(record.run_key, record.policy): record for record in records}
    findings: list[ModelFindings] = []
    folders: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for model in manifest.models:
        own = [
            by_key[run.run_key, run.policy]
            for run in manifest.runs
            if run.workload == model and (run.run_key, run.policy) in by_key
        ]
        folder = root / safe_name(model)
        try:
            probes = same_point_records(manifest, model, output_dir)
            result = analyze(
                manifest, model, own, rule=rule, output_dir=output_dir, same_point=probes
            )
            write_report(result, own, folder)
            # Beside the report, with which they reach the tracking store.
            for policy, probe in probes.items():
                write_same_point(probe, folder / "same_point" / f"{safe_name(policy)}.json")
        except Exception as error:  # noqa: BLE001 - one model's fault must not cost the others
            failures[model] = f"{type(error).__name__}: {error}"
            continue
        findings.append(result)
        folders[model] = folder
    return Conclusion(
        findings=tuple(findings),
        reports=folders,
        index=write_index(findings, root),
        failures=failures,
    )


def analyze(
    manifest: Manifest,
    model: str,
    records: Sequence[RunRecord],
    *,
    rule: DecisionRule,
    output_dir: Path,
    same_point: Mapping[str, SamePointRecord],
) -> ModelFindings:
    """Return what the runs of one model say, under the sweep's plan of seeds.

    Args:
        manifest: What the sweep consists of.
        model: The model.
        records: Its runs that exist; between looks not yet all.
        rule: Constants of the decision.
        output_dir: Where the record of the timing lies.
        same_point: Policy -> its same-point probe.
    """
    timing = read_timing(timing_folder(output_dir, manifest.sweep_id, model))
    findings = analyze_model(
        records,
        sweep_id=manifest.sweep_id,
        policies=manifest.policies(model),
        seeds=manifest.seeds(model),
        reference=manifest.reference,
        rule=rule,
        timings=step_time_ratios(timing),
        speed_note=timing.note if timing is not None else NOT_TIMED,
        command=manifest.command,
        descriptions=manifest.descriptions,
        same_point=same_point,
        plan=plan_of(manifest, rule),
    )
    # What the records themselves show is said by the analysis already.
    said = {reason.code for verdict in findings.verdicts for reason in verdict.reasons}
    said |= {reason.code for reason in findings.caveats}
    noted = tuple(
        Reason(code=note["code"], message=note["message"], kind="caveat")
        for note in manifest.caveats.get(model, [])
        if note["code"] not in said
    )
    profiles = timing.profiles if timing is not None else {}
    tried_for = manifest.fallbacks.get(model, {})
    return dataclasses.replace(
        findings,
        verdicts=tuple(
            dataclasses.replace(v, fallback_of=tried_for.get(v.policy)) for v in findings.verdicts
        ),
        caveats=(*findings.caveats, *noted),
        profiles={policy: dataclasses.asdict(profile) for policy, profile in profiles.items()},
    )


def timing_folder(output_dir: Path, sweep_id: str, model: str) -> Path:
    """Return where the timing stage of one model keeps its record."""
    return output_dir / "runs" / "timing" / safe_name(sweep_id) / safe_name(model)


def step_time_ratios(timing: TimingRecord | None) -> dict[str, Ratio]:
    """Return the measured step-time ratios by policy; empty when there are none."""
    if timing is None:
        return {}
    return {
        name: Ratio(value=r.value, ci_low=r.ci_low, ci_high=r.ci_high)
        for name, r in timing.ratios.items()
    }


def show(conclusion: Conclusion, lines: Sequence[str]) -> None:
    """Print the verdicts, the recommendations and where everything lies."""
    console = Console(highlight=False)
    for findings in conclusion.findings:
        path = conclusion.reports[findings.workload] / "report.html"
        print_findings(findings, console, report_path=path)
    for model, why in conclusion.failures.items():
        print(f"error: {model} could not be analyzed or reported: {why}", file=sys.stderr)
    console.print()
    for line in [f"All reports: {conclusion.index}", *lines]:
        console.print(line, soft_wrap=True, markup=False)
