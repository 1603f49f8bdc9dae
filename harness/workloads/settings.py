"""What each built-in workload can be told in YAML, as checked values; torch-free.

A value's range is checked where the value is defined, so that a wrong one is found before torch is
imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """What every kind of workload has.

    Attributes:
        kind: Which built-in the settings are for.
        name: Model name in reports; None for the kind's own name or the file's stem.
        description: One line for the report; None for the kind's own.
    """

    kind: str
    name: str | None = None
    description: str | None = None

    def __post_init__(self) -> None:
        require(self.name is None or bool(self.name.strip()), "name", self.name, "a non-empty name")

    def recorded(self) -> dict[str, Any]:
        """Return the settings as plain data for a record and a run's identity.

        Without the description, which changes no number, and with paths cut to the file's name:
        the file's hash says what it held, and a moved folder is not another run.
        """
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del data["description"]
        for key in ("file", "text"):
            if data.get(key) is not None:
                data[key] = PurePath(data[key]).name
        return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Build settings from plain data, strictly.

        Raises:
            ValueError: A key is unknown, a value has the wrong type or is out of range; the message
                names `workload.<key>`.
        """
        hints = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(_unknown_key(str(key), known, data.get("kind")))
        return cls(**{key: _converted(key, value, hints[key]) for key, value in data.items()})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(WorkloadSettings):
    """How a built-in model is trained: AdamW, linear warm-up, cosine decay, gradient clipping.

    Attributes:
        steps: Batches per run when `train.steps` is not given.
        batch_size: Examples (windows of text, images) per batch.
        peak_lr: Learning rate at the end of the warm-up.
        final_lr_ratio: Last learning rate over `peak_lr`. At 0, BF16 weights that no longer move
            show; a high final rate hides them.
        warmup_steps: Steps of linear warm-up; at most a fifth of the run, so that a short run still
            reaches its decay.
        weight_decay: AdamW's decoupled decay, on every parameter.
        betas: AdamW's moment coefficients.
        dropout: Probability of zeroing an activation.
        label_smoothing: Share of the target spread over all classes, in training and held-out loss.
        clip: Largest global gradient norm; None for no clipping.
    """

    steps: int = 300
    batch_size: int = 64
    peak_lr: float = 1e-3
    final_lr_ratio: float = 0.0
    warmup_steps: int = 20
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    dropout: float = 0.1
    label_smoothing: float = 0.0
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("steps", "batch_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        require(self.peak_lr > 0, "peak_lr", self.peak_lr, "more than 0")
        require(0 <= self.final_lr_ratio <= 1, "final_lr_ratio", self.final_lr_ratio, "0 to 1")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        require(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers in [0, 1)")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "0 up to but not 1")
        require(
            0 <= self.label_smoothing < 1,
            "label_smoothing",
            self.label_smoothing,
            "0 up to but not 1",
        )
        require(self.clip is None or self.clip > 0, "clip", self.clip, "more than 0, or null")


@dataclass(frozen=True, kw_only=True)
class CharGptSettings(TrainingSettings):
    """A decoder-only transformer on the characters of a text.

    Attributes:
        text: Path of the text; None for the source files of Python's standard library.
        num_characters: How much of the text is used; None for all of it.
        context: Characters that a prediction can look back on.
        num_layers: Transformer blocks.
        width: Size of an embedding.
        num_heads: Attention heads; divides `width`.
        init_std: Standard deviation of initial weights.
        num_held_out: Held-out windows of `context` characters.
        vocabulary_size: Rows of embedding and output layer; None for one per character of the text.
            More rows than characters cost what a subword vocabulary costs.
        tie_embeddings: Whether the output layer shares the embedding's weights.
    """

    batch_size: int = 16
    text: str | None = None
    num_characters: int | None = 2_000_000
    context: int = 64
    num_layers: int = 2
    width: int = 64
    num_heads: int = 4
    init_std: float = 0.02
    num_held_out: int = 256
    vocabulary_size: int | None = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("context", "num_layers", "width", "num_heads", "num_held_out"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        for key in ("num_characters", "vocabulary_size"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, value, "1 or more, or null")
        require(self.width % self.num_heads == 0, "width", self.width, "a multiple of num_heads")
        require(self.init_std > 0, "init_std", self.init_std, "more than 0")


@dataclass(frozen=True, kw_only=True)
class DigitsConvnetSettings(TrainingSettings):
    """A small convolutional net on scikit-learn's 8 x 8 handwritten digits."""

    dropout: float = 0.3
    label_smoothing: float = 0.1


@dataclass(frozen=True, kw_only=True)
class CustomSettings(WorkloadSettings):
    """The user's own model, in a file or an importable module.

    Attributes:
        file: Path of the Python file.
        module: Dotted name of the module, instead of `file`.
        steps: Overrides the file's `STEPS`.
        clip: Overrides the file's `CLIP`; 0 for no clipping.
    """

    file: str | None = None
    module: str | None = None
    steps: int | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file is None and self.module is None:
            raise ValueError(
                "workload=custom needs the model's file: workload.file=PATH.py "
                "(or workload.module=NAME)"
            )
        if self.file is not None and self.module is not None:
            raise ValueError("workload.file and workload.module are both given; keep one")
        require(self.steps is None or self.steps >= 1, "steps", self.steps, "1 or more, or null")
        require(self.clip is None or self.clip >= 0, "clip", self.clip, "0 or more, or null")


SETTINGS: Mapping[str, type[WorkloadSettings]] = {
    "char_gpt": CharGptSettings,
    "digits_convnet": DigitsConvnetSettings,
    "custom": CustomSettings,
}


def read_settings(data: Mapping[str, Any]) -> WorkloadSettings:
    """Return the checked settings of the kind that `data["kind"]` names.

    Raises:
        ValueError: The kind is missing or unknown, or a setting is wrong.
    """
    kind = str(data.get("kind"))
    if kind not in SETTINGS:
        raise ValueError(f"workload.kind={kind!r} is not allowed; allowed: {', '.join(SETTINGS)}")
    return SETTINGS[kind].from_mapping(data)


def require(holds: bool, key: str, value: object, allowed: str) -> None:
    """Raise the one-line `ValueError` for `workload.<key>` unless `holds`."""
    if not holds:
        shown = list(value) if isinstance(value, tuple) else value
        raise ValueError(f"workload.{key}={shown!r} is not allowed; allowed: {allowed}")


def closest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the most similar known name, or an empty string."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def _unknown_key(key: str, known: list[str], kind: object) -> str:
    hint = closest(key, known) or f"; {kind} has {', '.join(sorted(known))}"
    return f"workload.{key} is not a setting of workload kind {kind}{hint}"


def _converted(key: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type; an int serves as a float, a list as a tuple."""
    if isinstance(hint, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not types.NoneType]
        return None if value is None else _converted(key, value, options[0])
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        fits = isinstance(value, (list, tuple)) and len(value) == len(parts)
        require(fits, key, value, f"a list of {len(parts)} numbers")
        return tuple(_converted(key, v, p) for v, p in zip(value, parts, strict=True))
    if hint is float and type(value) is int:
        return float(value)
    require(type(value) is hint, key, value, _TYPE_NAMES[hint])
    return value


_TYPE_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}
