"""A faster interpreter of Triton: values that it would compute again at each operation are computed once.
Launches are here, operators in `triton_operators`, values and types in `triton_types`.

Values, types and refusals are Triton's own (`tests/engine/test_interpreter.py`).
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from tests.support import triton_operators as operators
from tests.support import triton_types as types

_core: Any = tl.core


@functools.cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    """Names of the functions of `package` (a module or class of `triton.language`) that the interpreter
    replaces. Called first while nothing is replaced: a replacement is no builtin."""
    return tuple(name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None)))


_CHECKS_FOR_SEMANTIC = _core.builtin(lambda: None).__code__


# Operators of tensors, and the semantic's method that each of them comes to by two functions.
_OPERATORS = {tl.tensor.__add__: "add", tl.tensor.__sub__: "sub", tl.tensor.__mul__: "mul"}


def _operator(compute: Any) -> Any:
    def interpreted(self: Any, other: Any, _semantic: Any = None) -> Any:
        return compute(self, types.unwrap_if_constexpr(other), True)

    return interpreted


@functools.cache
def _interpreted(member: Any) -> Any:
    """`member` with the interpreter's semantic. Where `tl.core.builtin` does no more than to check that it
    has one, what it wraps is called at once; so is the sum, difference or product behind an operator."""
    if member in _OPERATORS:
        return _operator(getattr(interpreter.interpreter_semantic, _OPERATORS[member]))
    checked = getattr(member, "__code__", None) is _CHECKS_FOR_SEMANTIC
    called = member.__wrapped__ if checked else member

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return called(*args, **kwargs)

    return interpreted


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Instead of its own function, which lists and sorts every member of `package` at each launch
    of a kernel and at each call of a device function: a fifth of the time that our kernels took."""
    for name in _builtin_names(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            scope.set_attr(package, name, _interpreted(member))


_patch_lang_anew = interpreter._patch_lang


class _NothingPatched:
    """A list of patches that stays empty, so that a device function has none to undo."""

    def restore(self) -> None:
        pass


@functools.cache
def _languages(function: Any) -> tuple[Any, ...]:
    """The modules of Triton that the source of `function` names, as `tl` or `core`."""
    return tuple(
        lang for lang in (tl, tl.core) if any(value is lang for value in function.__globals__.values())
    )


def _patch_lang(function: Any) -> Any:
    """Instead of its own function, which replaces all of `triton.language` again at each call of a device
    function. While it is replaced for the kernel that calls it, `+` is no builtin, and `range` no class."""
    in_kernel = not tl.core.is_builtin(tl.tensor.__add__)
    if in_kernel and not any(isinstance(lang.range, type) for lang in _languages(function)):
        return _NothingPatched()
    return _patch_lang_anew(function)


def make_launches_cheap() -> None:
    """Replaces the interpreter's functions by those of the three modules."""
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = types.get_np_dtype
    _core._unwrap_if_constexpr = types.unwrap_if_constexpr
    _core.tensor.__init__ = types.init_tensor
    _core.block_type.__init__ = types.init_block_type
    _core.block_type.with_element_ty = types.with_element_ty
    interpreter.TensorHandle.__init__ = types.init_handle
    interpreter.TensorHandle.get_element_ty = types.get_element_ty
    interpreter.InterpreterBuilder.binary_op = types.binary_op
    semantic: Any = interpreter.interpreter_semantic
    for name in operators.METHODS:
        # Of the interpreter's alone: a kernel that is compiled has no numbers.
        setattr(semantic, name, MethodType(operators.method(name), semantic))
    interpreter.TritonSemantic.computation_type_impl = operators.computation_type
    interpreter.TritonSemantic.broadcast_impl_value = operators.broadcast_impl_value
    interpreter.TritonSemantic.binary_op_type_checking_impl = operators.operands
    # Each sum and product of integers would be computed again in 64 bits, to be compared with a bound that
    # the interpreter, whose `debug` is off, then does not assert.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
