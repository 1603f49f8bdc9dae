# %% [markdown]
# # Explore a stored sweep
#
# Load the records of a sweep, judge them again under another margin, and redraw the figure that
# decides. Run it cell by cell in an editor that knows `# %%`, or as a script:
#
#     python notebooks/explore_sweep.py OUTPUT_DIR SWEEP_ID

# %%
import sys
from pathlib import Path

from harness.config import load_choice
from harness.experiment import manifest as manifests
from harness.experiment.conclude import conclude, load_records
from harness.experiment.early_checks import decision_rule

output_dir = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
sweep_id = sys.argv[2] if len(sys.argv) > 2 else "latest"

# %% [markdown]
# ## What is there

# %%
manifest = manifests.read(output_dir, sweep_id)
records, troubles = load_records(manifest, output_dir)
print(
    f"{manifest.sweep_id}: {len(records)} of {len(manifest.runs)} runs, {len(troubles)} unreadable"
)
for record in records:
    print(
        f"{record.workload:16s} {record.policy:14s} seed {record.seed}  {record.status:10s} "
        f"last loss {record.series['loss'][-1]:.4g}"
    )

# %% [markdown]
# ## Another margin
#
# The default margin is 1 % of what FP32 learned. How do the verdicts change at a quarter of it?

# %%
settings = load_choice("decision", "default")
strict = {**settings, "margin_progress": settings["margin_progress"] / 4}
for name, values in (("default", settings), ("strict", strict)):
    conclusion = conclude(
        manifest,
        records,
        rule=decision_rule(values),
        output_dir=output_dir,
        reports=output_dir / "reports" / f"{manifest.sweep_id}.{name}-margin",
    )
    for findings in conclusion.findings:
        verdicts = ", ".join(f"{v.policy}: {v.outcome}" for v in findings.verdicts)
        print(f"{name:8s} {findings.workload}: {verdicts}")
    print(f"         {conclusion.index}")
