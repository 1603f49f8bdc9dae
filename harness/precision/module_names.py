"""How the modules of a model are named in records, and by the patterns of a policy. Torch-free."""

from __future__ import annotations

import fnmatch
import re

# The model itself, whose own name is empty.
ROOT = "(model)"


def owner(parameter: str) -> str:
    """Return the module that holds a parameter or buffer of this dotted name."""
    return parameter.rpartition(".")[0] or ROOT


def matches(pattern: str, module: str) -> bool:
    """Return whether an entry of `fp32_modules`, its direction left out, matches a module.

    A pattern matches dotted components from the end of a name, each a glob: `norm` matches `norm`
    and `blocks.0.norm`, `blocks.*.attn` matches `net.blocks.3.attn`. `re:` starts a regular
    expression on the whole name.

    Raises:
        ValueError: It is not a regular expression.
    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], module) is not None
        except re.error as error:
            raise ValueError(
                f"policy.fp32_modules: {pattern!r} is not a regular expression: {error}"
            ) from None
    wanted = pattern.split(".")
    parts = module.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
