"""Hydra in, exit code out.

`python -m harness` always runs a sweep: `+sweep=NAME`, or without one the internal pair of FP32
and BF16. `action=report` analyzes stored runs instead.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness import __version__
from harness.config import CONF, ConfigError, RunConfig, register
from harness.error_text import one_line

EXIT_DECIDED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

COMMAND_VARIABLE = "HARNESS_COMMAND"
TRACEBACK_VARIABLE = "HARNESS_TRACEBACK"

# What a user's input can raise; anything else is a fault of this program or of the machine.
USER_ERRORS = (ConfigError, HydraException, OmegaConfBaseException, YAMLError)
_INFORMATION_FLAGS = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i")
# What the command line says about seeds goes before the `SEEDS` of a workload file.
_SEED_KEYS = ("seed", "decision.seeds", "decision.looks", "decision.always_valid")
_MODE_FLAGS = ("-m", "--multirun", "--run", "-r")
_FLAGS_WITH_VALUE = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--package", "-p", "--experimental-rerun", "--cfg", "-c"),
)


def main() -> None:
    """Run the command line; the entry point of `python -m harness` and of `harness`.

    SIGTERM, by which batch systems end a job, interrupts as Ctrl-C does, and so does SIGINT in the
    background, where a shell starts a command with SIGINT ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Returns:
        0 decided, 1 a reference is missing or crashed or the analysis failed, 2 bad usage,
        configuration or workload, 130 interrupted.
    """
    if "--version" in arguments:
        print(f"precision-harness {__version__}")
        return EXIT_DECIDED
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through, to be told in one line below
    os.environ[COMMAND_VARIABLE] = shlex.join(["python", "-m", "harness", *arguments])
    try:
        register()
        sys.argv = ["harness", *prepared(arguments)]
        _application()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE if stop.code else 0
    except KeyboardInterrupt:
        return _say(
            "interrupted: finished runs are kept, the same command goes on from there",
            EXIT_INTERRUPTED,
        )
    except USER_ERRORS as error:
        return _say(f"error: {one_line(error)}", EXIT_USAGE)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        kind = type(error).__name__
        return _say(
            f"error: {kind}: {one_line(error)} ({TRACEBACK_VARIABLE}=1 shows where)", EXIT_FAILED
        )
    return EXIT_DECIDED


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def _application(composed: DictConfig) -> None:
    if composed.action == "report":
        code = _report(composed)
        if code:
            raise SystemExit(code)
        return
    if composed.sweep_id is None:  # never in a sweep: its runs are given the name
        message = "error: a single run belongs to a sweep: leave hydra.mode=RUN out"
        raise SystemExit(_say(message, EXIT_USAGE))
    config = RunConfig.from_hydra(composed)
    from harness.experiment.job import run_job

    run_job(config)


def _report(composed: DictConfig) -> int:
    """Analyze stored runs; bad input is told here, since Hydra would add a line to an exception."""
    from harness.experiment.stored import report_stored

    arguments = [str(argument) for argument in HydraConfig.get().overrides.task]
    try:
        return report_stored(RunConfig.from_hydra(composed), arguments=arguments)
    except USER_ERRORS as error:
        return _say(f"error: {one_line(error)}", EXIT_USAGE)


def prepared(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: with the sweep, its mode and a workload file's own seeds.

    Flags come first whatever their place: argparse refuses them between overrides.
    """
    flags, given = _flags_and_overrides(arguments)
    _, unknown = get_args_parser().parse_known_args(flags)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        hint = "write +sweep=NAME" if name == "sweep" else "settings are given as key=value"
        raise ConfigError(f"unknown flag {unknown[0]}; {hint}, see --help")
    if any(flag.split("=")[0] in _INFORMATION_FLAGS for flag in flags):
        return [*flags, *given]
    values = {a.lstrip("+").split("=")[0]: a.split("=", 1)[1] for a in given if "=" in a}
    if values.get("action") == "report":
        return [*flags, *given, "hydra.mode=RUN"]
    given = _with_own_policy(given, values)
    if "sweep" not in values:
        given.append("+sweep=pair")
    if "hydra.mode" not in values and not any(flag in _MODE_FLAGS for flag in flags):
        # The flag and not hydra.mode=MULTIRUN: only with the flag does Hydra name the override
        # that is wrong, instead of falling back to a single run.
        flags.append("--multirun")
    if values.get("workload") == "custom" and not any(key in values for key in _SEED_KEYS):
        given += _own_seeds(values)
    return [*flags, *given]


def _own_seeds(values: dict[str, str]) -> list[str]:
    """Return the seeds that a workload file declares as an override."""
    from harness.workloads.registry import default_seeds

    named = {key: values.get(f"workload.{key}") for key in ("file", "module")}
    try:
        seeds = default_seeds({"kind": "custom", **named})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return [f"seed={','.join(map(str, seeds))}"] if seeds else []


def _flags_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    flags: list[str] = []
    overrides: list[str] = []
    takes_value = False
    for argument in arguments:
        if takes_value or argument.startswith("-"):
            flags.append(argument)
            takes_value = not takes_value and argument in _FLAGS_WITH_VALUE
        else:
            overrides.append(argument)
    return flags, overrides


def _with_own_policy(given: list[str], values: dict[str, str]) -> list[str]:
    """Turn `policy=bf16 policy.x=...` into a policy of its own beside the reference.

    The fields belong to the one candidate; overriding them in Hydra would change the reference
    too. So the candidate is registered as a new policy that extends the one named.
    """
    fields = [a for a in given if a.lstrip("+").startswith("policy.") and "=" in a]
    base = values.get("policy", "")
    if not fields or not base.isidentifier():
        return given
    node = OmegaConf.from_dotlist([a.lstrip("+").removeprefix("policy.") for a in fields])
    if "name" not in node:
        node.name = f"{base}_custom"
    reference = values.get("reference", "fp32")
    choice = f"_{base}_from_command_line"
    ConfigStore.instance().store(
        group="policy",
        name=choice,
        node=OmegaConf.merge({"defaults": [base, "_self_"]}, node),
        provider="harness",
    )
    kept = [a for a in given if a not in fields and not a.startswith("policy=")]
    return [*kept, f"policy={reference},{choice}"]


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
