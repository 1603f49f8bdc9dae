"""`python -m harness.calibration`: train what the bank lacks, judge every rule on it, write it up.

Nothing heavy is imported before the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.calibration.bank import Bank
from harness.calibration.interrupts import answer_interrupts
from harness.calibration.wanted import CATALOGUE, Wanted, known_tasks, wanted_bank

if TYPE_CHECKING:
    from harness.calibration.filling import Filled

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

TRACEBACK_VARIABLE = "HARNESS_TRACEBACK"
_PROGRAM = "python -m harness.calibration"

FULL_SEEDS, QUICK_SEEDS = 24, 10
FULL_DRAWS, QUICK_DRAWS = 300, 60
QUICK_TASKS = ("gpt_cool", "mlp_regression", "convnet")
# The quick study is a check of the machinery; the document in docs/ is the full one.
FULL_OUTPUT, QUICK_OUTPUT = Path("docs"), Path("reports/calibration")


class UsageError(Exception):
    """The command line asks for something that cannot be done; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main() -> None:
    """Run the command line; Ctrl-C and SIGTERM interrupt it, in the background too."""
    answer_interrupts()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str], *, catalogue: str = CATALOGUE) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: Of the command line.
        catalogue: Dotted name of the module with `arms_of` and `workload_of`.

    Returns:
        0 done, or stopped in time; 1 something failed; 2 bad usage; 130 interrupted.
    """
    try:
        return _study(_parsed(arguments), catalogue)
    except UsageError as error:
        return _say(f"error: {error}", EXIT_USAGE)
    except KeyboardInterrupt:
        return _say(
            "interrupted: finished runs are kept, the same command goes on from there",
            EXIT_INTERRUPTED,
        )
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        first = (str(error).splitlines() or [""])[0]
        kind = type(error).__name__
        return _say(f"error: {kind}: {first} ({TRACEBACK_VARIABLE}=1 shows where)", EXIT_FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="Measures how often the decision is right. Trains small models with planted "
        "precision faults (arms) and without, several seeds each, and stores the runs in a bank; "
        "then draws seeds from it, judges every arm by every rule, and writes tables and figures. "
        "What is stored is not trained again, so an interrupted study goes on with the same "
        "command.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a check in minutes: {len(QUICK_TASKS)} tasks, fewer arms, {QUICK_SEEDS} seeds, "
        f"{QUICK_DRAWS} draws",
    )
    parser.add_argument(
        "--bank",
        type=Path,
        default=Path("calibration"),
        metavar="DIR",
        help="where the runs are stored (default: calibration/)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"where calibration.md and its figures go (default: {FULL_OUTPUT}/; "
        f"quick: {QUICK_OUTPUT}/)",
    )
    parser.add_argument(
        "--tasks", type=_names, metavar="A,B", help="only these tasks (default: all)"
    )
    parser.add_argument(
        "--seeds",
        type=_positive_count,
        metavar="N",
        help=f"seeds of every arm (default: {FULL_SEEDS}; quick: {QUICK_SEEDS})",
    )
    parser.add_argument(
        "--workers",
        type=_positive_count,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        metavar="N",
        help="processes, one thread each (default: the cores, here %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=_positive_minutes,
        metavar="M",
        help="begin no training that would end after M minutes, and judge what is there then",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--train-only", action="store_true", help="fill the bank, judge nothing")
    only.add_argument("--judge-only", action="store_true", help="judge what is stored")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def _positive_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number >= 1")
    return int(text)


def _positive_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: minutes > 0")
    return minutes


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options = _parser().parse_args(arguments)
    if options.bank.exists() and not options.bank.is_dir():
        raise UsageError(f"--bank {options.bank} is a file; it takes a folder")
    if options.judge_only and not options.bank.is_dir():
        raise UsageError(f"--bank {options.bank}: there is no such folder to judge")
    if options.tasks == ():
        raise UsageError("--tasks names no task")
    options.output = options.output or (QUICK_OUTPUT if options.quick else FULL_OUTPUT)
    if not options.train_only and options.output.exists() and not options.output.is_dir():
        raise UsageError(f"--output {options.output} is a file; it takes a folder")
    return options


def _study(options: argparse.Namespace, catalogue: str) -> int:
    known = known_tasks(catalogue)
    by_default = [t for t in QUICK_TASKS if t in known] if options.quick else known
    tasks = options.tasks or tuple(by_default)
    for task in tasks:
        if task not in known:
            raise UsageError(f"--tasks: there is no task {task!r}; there are {', '.join(known)}")
    for task in tasks if options.quick else ():
        if task not in QUICK_TASKS:
            raise UsageError(f"--tasks: {task} is not in the quick study: {', '.join(by_default)}")
    wanted = Wanted(
        tasks=tasks,
        num_seeds=options.seeds or (QUICK_SEEDS if options.quick else FULL_SEEDS),
        quick=options.quick,
        catalogue=catalogue,
    )
    filled = None if options.judge_only else _fill(options, wanted)
    if not options.train_only:
        bank = wanted_bank(options.bank, wanted)
        if not any(any((bank.folder / task).glob("*/seed-*.json")) for task in bank.tasks()):
            raise UsageError(f"--bank {options.bank} holds no runs of {', '.join(tasks)}")
        _judge(options, bank)
    return EXIT_FAILED if filled is not None and filled.failures else EXIT_DONE


def _fill(options: argparse.Namespace, wanted: Wanted) -> Filled:
    from harness.calibration.filling import fill

    filled = fill(
        options.bank,
        wanted,
        num_workers=options.workers,
        minutes=options.minutes,
        stream=sys.stdout,
    )
    if filled.num_left:
        print(f"{filled.num_left} are left; the same command goes on from there", flush=True)
    return filled


def _judge(options: argparse.Namespace, bank: Bank) -> None:
    from harness.calibration.study import run_study

    found = run_study(
        bank,
        output=options.output,
        draws=QUICK_DRAWS if options.quick else FULL_DRAWS,
        command=_command(options),
        quick=options.quick,
        workers=options.workers,
    )
    print(f"wrote {found.document}", flush=True)


def _command(options: argparse.Namespace) -> str:
    """Return the command line that gives the same page, without where anything lies."""
    words = [_PROGRAM]
    words += ["--quick"] if options.quick else []
    words += [f"--tasks {shlex.quote(','.join(options.tasks))}"] if options.tasks else []
    words += [f"--seeds {options.seeds}"] if options.seeds else []
    return " ".join(words)


def _say(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
