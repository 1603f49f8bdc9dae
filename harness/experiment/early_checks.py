"""What can be refused before torch is imported: bad input answers at once."""

from __future__ import annotations

import re
from pathlib import Path

from harness.analysis.rule import DecisionRule
from harness.config import ConfigError, RunConfig
from harness.experiment import manifest as manifests
from harness.experiment.grid import Grid, axis_values
from harness.experiment.seed_plans import make_plan_of_seeds
from harness.precision.policy import PrecisionPolicy
from harness.tracking.location import Store, resolve_store

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_early(grid: Grid) -> None:
    """Check the grid and the settings that all its runs share.

    Raises:
        ConfigError: A policy, the reference, `sweep_id`, `decision.*`, `tracking.uri` or
            `output_dir` cannot be used.
    """
    config = grid.runs[0]
    _check_reference(grid, config.reference)
    _check_sweep_id(config)
    make_plan_of_seeds(decision_rule(config.decision), seeds_given=grid.seeds_given)
    configured_store(config)
    if not config.dry_run:
        _check_writable(config.output_dir)


def decision_rule(settings: dict[str, object]) -> DecisionRule:
    """Return the rule of `decision.*`.

    Raises:
        ConfigError: A constant is unknown or out of range.
    """
    try:
        return DecisionRule.from_mapping(settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def configured_store(config: RunConfig) -> Store | None:
    """Return the store of `tracking.*`; None when tracking is disabled.

    Raises:
        ConfigError: The URI is malformed.
    """
    if not config.tracking.enabled:
        return None
    try:
        return resolve_store(config.tracking.uri, config.output_dir)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def policy_of(run: RunConfig) -> PrecisionPolicy:
    """Return the policy of a run.

    Raises:
        ConfigError: A field has a value that is not allowed.
    """
    try:
        return PrecisionPolicy.from_mapping(run.policy)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_reference(grid: Grid, reference: str) -> None:
    names, _ = axis_values(grid)
    if reference not in names:
        raise ConfigError(
            f"the reference policy {reference!r} is missing from the grid ({', '.join(names)}); "
            f"add it: policy={reference},{','.join(names)}"
        )
    for policy in {run.policy["name"]: policy_of(run) for run in grid.runs}.values():
        if policy.name == reference and not policy.is_reference:
            raise ConfigError(f"reference={reference}: only a policy that is plain FP32 can be one")


def _check_sweep_id(config: RunConfig) -> None:
    name = config.sweep_id
    if name is not None and (not SAFE_NAME.fullmatch(name) or name == manifests.LATEST):
        raise ConfigError(
            f"sweep_id={name}: up to 100 letters, digits, '.', '_' and '-' "
            "(and not 'latest', which means the newest sweep)"
        )


def _check_writable(output_dir: Path) -> None:
    try:
        for name in ("runs", "reports"):
            folder = output_dir / name
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir}: cannot be written ({error.strerror}); choose another"
        ) from None
