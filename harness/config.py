"""The configuration: where its YAML lives, how it reaches Hydra, and its values once composed.

Types and key names are checked by Hydra against `config_schema`; ranges and meaning here or by the
dataclass that uses the value. `DictConfig` stops here.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config_schema import (
    HarnessConf,
    LaunchConf,
    ProbesConf,
    ThroughputConf,
    TrackingConf,
    TrainConf,
)

PACKAGE = Path(__file__).resolve().parent


def _beside_or_inside(name: str) -> Path:
    """Return the YAML folder: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / f"_{name}"
    return inside if inside.is_dir() else PACKAGE.parent / name


CONF = _beside_or_inside("conf")
SWEEPS = _beside_or_inside("sweeps")


class ConfigError(ValueError):
    """Bad configuration or workload: one line for the user, exit code 2."""


class UnknownSettingError(ConfigError):
    """A setting that no code honours was added with `+`.

    Attributes:
        name: Its dotted name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown setting {name!r}")
        self.name = name


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One composed configuration as plain values."""

    action: str
    device: str
    output_dir: Path
    sweep_id: str | None
    reference: str
    seed: int
    dry_run: bool
    workload: dict[str, Any]
    policy: dict[str, Any]
    train: TrainConf
    probes: ProbesConf
    decision: dict[str, Any]
    throughput: ThroughputConf
    tracking: TrackingConf
    launch: LaunchConf

    @classmethod
    def from_hydra(cls, composed: DictConfig) -> RunConfig:
        """Turn a composed configuration into plain values and check what the schema cannot.

        Raises:
            ConfigError: A value is out of range, or `sweep` became a plain value because no such
                group was found.
        """
        if "sweep" in composed:
            raise ConfigError(
                f"no group of sweeps was found, so sweep={composed['sweep']!r} means nothing; "
                f"the built-in ones lie in {SWEEPS}"
            )
        own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        data = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
        assert isinstance(data, dict)
        values: dict[str, Any] = {str(key): value for key, value in data.items()}
        values["output_dir"] = Path(values["output_dir"]).expanduser().resolve()
        _refuse_unknown("", values, cls)
        for name, schema in _SECTIONS.items():
            values[name] = _parsed(f"{name}.", values[name], schema)
        config = cls(**values)
        _check(config)
        return config


_SECTIONS: Mapping[str, type] = {
    "train": TrainConf,
    "probes": ProbesConf,
    "throughput": ThroughputConf,
    "tracking": TrackingConf,
    "launch": LaunchConf,
}
ACTIONS = ("run", "report")
BACKENDS = ("auto", "native", "emulated")


def _refuse_unknown(prefix: str, values: Mapping[str, Any], schema: type) -> None:
    known = {f.name for f in dataclasses.fields(schema)}
    for name in values:
        if name not in known:
            raise UnknownSettingError(prefix + name)


def _parsed(prefix: str, values: Mapping[str, Any], schema: type) -> Any:
    """Return a section as its dataclass, sections within it as theirs."""
    _refuse_unknown(prefix, values, schema)
    types = typing.get_type_hints(schema)
    parsed = {
        key: _parsed(f"{prefix}{key}.", value, types[key])
        if dataclasses.is_dataclass(types[key])
        else value
        for key, value in values.items()
    }
    return schema(**parsed)


def _check(config: RunConfig) -> None:
    rules = (
        (config.action in ACTIONS, f"action={config.action}: one of {', '.join(ACTIONS)}"),
        (
            config.train.backend in BACKENDS,
            f"train.backend={config.train.backend}: one of {', '.join(BACKENDS)}",
        ),
        (
            config.train.steps is None or config.train.steps >= 1,
            f"train.steps={config.train.steps}: must be at least 1",
        ),
        (config.train.tail_evaluations >= 1, "train.tail_evaluations: must be at least 1"),
        *_probe_rules(config.probes),
        (config.seed >= 0, f"seed={config.seed}: must be 0 or more"),
        (
            config.launch.threads is None or config.launch.threads >= 1,
            f"launch.threads={config.launch.threads}: must be at least 1",
        ),
        (config.throughput.blocks >= 2, "throughput.blocks: must be at least 2"),
        (config.throughput.steps_per_block >= 1, "throughput.steps_per_block: must be at least 1"),
        (config.throughput.warmup_steps >= 0, "throughput.warmup_steps: must be 0 or more"),
        (isinstance(config.workload, dict), "workload: choose one with workload=NAME"),
    )
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def _probe_rules(probes: ProbesConf) -> Iterator[tuple[bool, str]]:
    """Yield what must hold of `probes`, each with the message for when it does not."""
    cadences = {
        "exponents.every": probes.exponents.every,
        "exponents.weight_gradients_every": probes.exponents.weight_gradients_every,
        "norms.every": probes.norms.every,
        "lost_updates.every": probes.lost_updates.every,
    }
    for name, every in cadences.items():
        yield (
            every is None or every >= 1,
            f"probes.{name}={every}: must be at least 1, or null to switch it off",
        )
    error, profile = probes.gradient_error, probes.profile
    points = f"probes.gradient_error.points={list(error.points)}"
    inside = all(0.0 < point < 1.0 for point in error.points)
    ascending = all(a < b for a, b in pairwise(error.points))
    yield (
        bool(error.points) and inside and ascending,
        f"{points}: must be ascending parts of a run between 0 and 1, such as [0.10, 0.97]",
    )
    yield (
        error.batches >= 2,
        f"probes.gradient_error.batches={error.batches}: must be at least 2; "
        "the noise between batches is what errors are compared with",
    )
    yield (
        error.fp64_max_parameters >= 0,
        f"probes.gradient_error.fp64_max_parameters={error.fp64_max_parameters}: must be 0 or more",
    )
    yield profile.steps >= 0, f"probes.profile.steps={profile.steps}: must be 0 or more"


class _BuiltInConfigs(SearchPathPlugin):
    """Keep the built-in groups reachable when a user replaces the primary config folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="harness", path=f"file://{CONF}")


def load_choice(group: str, name: str) -> dict[str, Any]:
    """Return the values of one built-in YAML with those it extends, without Hydra's machinery.

    For benchmarks and notebooks: `load_choice("workload", "char_gpt")`.

    Raises:
        ConfigError: There is no such file.
    """
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise ConfigError(f"{group}={name}: no such choice; known: {known}")
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(values, dict)
    merged: dict[str, Any] = {}
    for base in values.pop("defaults", []):
        if base != "_self_":
            merged |= load_choice(group, base)
    return merged | {str(key): value for key, value in values.items()}


def default_workers(device: str) -> int:
    """Return how many runs go on at once: one per core on a CPU, one on a GPU."""
    if device.startswith("cuda"):
        return 1
    if device == "auto":
        import torch

        if torch.cuda.is_available():
            return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def register() -> None:
    """Make schema, sweeps, resolver and built-in groups known to Hydra; safe to call twice.

    Raises:
        ConfigError: A file in `sweeps/` is not YAML; the message names it.
    """
    store = ConfigStore.instance()
    store.store(name="harness_schema", node=HarnessConf, provider="harness")
    for path in sorted(SWEEPS.glob("*.yaml")):
        try:
            node = OmegaConf.load(path)
        except (YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from None
        store.store(
            group="sweep", name=path.stem, node=node, package="_global_", provider="harness"
        )
    Plugins.instance().register(_BuiltInConfigs)
    OmegaConf.register_new_resolver("harness_workers", default_workers, replace=True)
