"""Where the records of the same-point probe lie; read without torch."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from harness.config_schema import GradientErrorConf
from harness.experiment.manifest import Manifest
from harness.precision.policy import PrecisionPolicy
from harness.runs.same_point.record import SamePointRecord, read_same_point


def record_key(reference_run_key: str, policy: PrecisionPolicy, settings: GradientErrorConf) -> str:
    """Return 16 hex digits over all that can change what the probe measures of a candidate."""
    identity = {
        "reference": reference_run_key,
        "policy": policy.content_hash(),
        "settings": {k: v for k, v in asdict(settings).items() if k != "enabled"},
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def record_path(output_dir: Path, key: str) -> Path:
    """Return where the record of a key lies."""
    return output_dir / "runs" / "same_point" / f"{key}.json"


def same_point_records(
    manifest: Manifest, model: str, output_dir: Path
) -> dict[str, SamePointRecord]:
    """Return the records of one model by policy; what is absent or unreadable is left out."""
    found = {}
    for policy, key in manifest.same_point.get(model, {}).items():
        try:
            record = read_same_point(record_path(output_dir, key))
        except ValueError as error:
            print(f"warning: set aside: {error}", file=sys.stderr)
            continue
        if record is not None:
            found[policy] = record
    return found
