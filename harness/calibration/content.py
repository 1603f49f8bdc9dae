"""What a value is made of, as a hash: functions by what they compute, not by their place.

An arm is an arm as long as its functions, those that they call and the numbers that they were given
are the same. A comment, a docstring or another line number changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

# What these hold changes with their version, which is hashed beside the content.
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "scipy", "sklearn"}
# Of a class: filled in by Python or by `dataclass`, and nothing of one's own.
_CLASS_NOISE = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __dataclass_fields__ "
    "__dataclass_params__ __match_args__ __slotnames__ __abstractmethods__ _abc_impl "
    "__parameters__ __orig_bases__ __qualname__ __hash__ __static_attributes__ __firstlineno__ "
    "_is_protocol __protocol_attrs__ __callable_proto_members_only__ __non_callable_proto_members__"
    " __subclasshook__".split()
)


def content_hash(*values: object) -> str:
    """Return 16 hex digits that agree when values have the same content.

    Args:
        values: Plain data, tensors, arrays, functions (with what they close over and what they
            call), classes, and objects of any of them.
    """
    digest = hashlib.sha256()
    for part in _Walk().parts(values):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


class _Walk:
    """One walk over values; what is met again is told by the number of its first visit."""

    def __init__(self) -> None:
        # Held, so that no later object can have the identity of an earlier one.
        self._met: dict[int, tuple[int, object]] = {}

    def parts(self, value: Any) -> Iterator[str]:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, (torch.dtype, torch.device, torch.layout)):
            yield f"torch {value}"
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            yield _array(value)
        elif id(value) in self._met:
            yield f"met {self._met[id(value)][0]}"
        else:
            self._met[id(value)] = (len(self._met), value)
            yield from self._first_visit(value)

    def _first_visit(self, value: Any) -> Iterator[str]:
        if isinstance(value, (list, tuple)):
            yield f"sequence {len(value)}"
            for item in value:
                yield from self.parts(item)
        elif isinstance(value, (set, frozenset)):
            yield f"set {sorted(map(repr, value))}"
        elif isinstance(value, (dict, Mapping)):
            yield f"mapping {len(value)}"
            for key in sorted(value, key=repr):
                yield repr(key)
                yield from self.parts(value[key])
        else:
            yield from self._code_or_object(value)

    def _code_or_object(self, value: Any) -> Iterator[str]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield from self.parts((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            yield from self.parts(("partial", value.func, value.args, value.keywords))
        elif isinstance(value, (staticmethod, classmethod)) or hasattr(value, "__wrapped__"):
            yield from self.parts(value.__wrapped__)
        elif isinstance(value, property):
            yield from self.parts((value.fget, value.fset))
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, types.ModuleType):
            yield f"module {value.__name__}"
        elif _is_foreign(type(value)) and " at 0x" not in repr(value):
            yield f"foreign {_name(value)} {value!r}"
        elif _is_foreign(type(value)) and not hasattr(value, "__dict__"):
            yield f"foreign {_name(value)}"
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:
        yield from self.parts(type(value))
        if dataclasses.is_dataclass(value):
            fields = [f.name for f in dataclasses.fields(value)]
            yield from self.parts({name: getattr(value, name) for name in fields})
        else:
            yield from self.parts(dict(getattr(value, "__dict__", {})))

    def _class(self, kind: type) -> Iterator[str]:
        yield f"class {_name(kind)}"
        if _is_foreign(kind):
            return
        for base in kind.__bases__:
            yield from self.parts(base)
        own = {k: v for k, v in vars(kind).items() if k not in _CLASS_NOISE}
        # What `dataclass` writes follows from the fields.
        fields = getattr(kind, "__dataclass_fields__", {})
        yield f"fields {list(fields)}"
        yield from self.parts({k: v for k, v in own.items() if not _is_slot(v)})

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield f"function {_name(function)}"
        if _is_foreign(function):
            return
        if hasattr(function, "__wrapped__"):
            yield from self.parts(function.__wrapped__)
        code = function.__code__
        documented = function.__doc__
        yield from self._code(code, documented)
        yield from self.parts((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            yield from self.parts(_contents(cell))
        for name in sorted(_names_read(code)):
            if name in function.__globals__:
                yield name
                yield from self.parts(function.__globals__[name])
        for module, name in _read_off_modules(code, function.__globals__):
            yield f"{module.__name__}.{name}"
            yield from self.parts(getattr(module, name))

    def _code(self, code: types.CodeType, documented: str | None) -> Iterator[str]:
        yield code.co_code.hex()
        yield f"{code.co_names} {code.co_varnames} {code.co_freevars}"
        for index, constant in enumerate(code.co_consts):
            if isinstance(constant, types.CodeType):
                yield from self._code(constant, None)
            else:
                # A function without a docstring has None in its place.
                is_docstring = index == 0 and documented is not None
                yield from self.parts(None if is_docstring else constant)


def _array(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype)
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        kind = str(value.dtype)
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return f"array {kind} {value.shape} {digest}"


def _name(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_foreign(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return module is None or str(module).split(".")[0] in _FOREIGN


def _is_slot(value: object) -> bool:
    return isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names_read(code: types.CodeType) -> set[str]:
    """Return the names that a function and those inside it may read off their globals."""
    return {name for one in _codes(code) for name in one.co_names}


def _read_off_modules(
    code: types.CodeType, names: Mapping[str, Any]
) -> Iterator[tuple[types.ModuleType, str]]:
    """Yield what a function may read as an attribute of modules of our own: `formats.spacing`."""
    read = sorted(_names_read(code))
    for name in read:
        module = names.get(name)
        if isinstance(module, types.ModuleType) and module.__name__.split(".")[0] not in _FOREIGN:
            yield from ((module, part) for part in read if part in vars(module))
