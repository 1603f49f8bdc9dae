"""The copies of a sweep in the tracking store; a store that is away never costs a result."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.config import RunConfig
from harness.experiment.conclude import Conclusion
from harness.experiment.early_checks import configured_store
from harness.experiment.manifest import Manifest
from harness.tracking import spool
from harness.tracking.links import comparison_links
from harness.tracking.location import Store, StoreUnreachable
from harness.tracking.store import log_report, prepare


def prepare_store(config: RunConfig, models: Sequence[str]) -> Store | None:
    """Return the store of the sweep, its database and experiments created; None when disabled.

    A server that is away is a warning: copies are kept back and made later.

    Raises:
        ConfigError: The URI is malformed.
    """
    store = configured_store(config)
    if store is not None:
        try:
            prepare(store, models)
        except StoreUnreachable as error:
            print(
                f"warning: {error}; training goes on, the copies are made when it is back",
                file=sys.stderr,
            )
    return store


def make_owed_copies(store: Store | None, config: RunConfig) -> list[str]:
    """Try again what an absent store still lacks; return what to tell the user."""
    if store is None:
        return []
    owed = spool.replay(store, config.output_dir)
    if not owed.reason:
        return []
    return [f"warning: {owed.left} runs are not in the tracking store: {owed.reason}"]


def publish(conclusion: Conclusion, manifest: Manifest, store: Store | None) -> list[str]:
    """Copy the reports to the tracking store; return what to tell the user.

    A store that is away costs a warning, never the result.
    """
    if store is None:
        return []
    lines: list[str] = []
    try:
        for model, folder in conclusion.reports.items():
            log_report(
                store,
                experiment=model,
                sweep_id=manifest.sweep_id,
                folder=folder,
                markdown=(folder / "report.md").read_text(encoding="utf-8"),
            )
            links = comparison_links(store, model, manifest.sweep_id)
            if not lines and links["ui_command"]:
                lines.append(f"To compare the runs in MLflow, run: {links['ui_command']}")
                lines.append("and open")
            lines.append(f"  {model}: {links['url']}")
    except StoreUnreachable as error:
        return [f"warning: the tracking store has no copy of the report: {error}"]
    return lines
