"""Operators of Triton's interpreter: what two operands have in common is found once, and numpy computes what
needs no conversion. `triton_interpreter` puts them in the places of Triton's own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.support.triton_types import NO_SHAPE, get_np_dtype

_core: Any = tl.core

broadcast_anew = interpreter.TritonSemantic.broadcast_impl_value


@functools.cache
def _common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape to which two of one rank are repeated; None where they do not fit, or need new axes."""
    if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
        return None
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))


_BLOCK_TYPES: dict[tuple[str, tuple[int, ...]], Any] = {}


def _block_type(scalar: Any, shape: tuple[int, ...]) -> Any:
    """One type for all tensors of a dtype and shape, except pointers, whose names do not say everything."""
    if scalar.is_ptr():
        return _core.block_type(scalar, list(shape))
    found = _BLOCK_TYPES.get((scalar.name, shape))
    if found is None:
        found = _BLOCK_TYPES[scalar.name, shape] = _core.block_type(scalar, list(shape))
    return found


def _repeated(self: Any, tensor: Any, shape: tuple[int, ...]) -> Any:
    if tuple(tensor.type.shape.values) == shape:
        return tensor
    handle = self.builder.create_broadcast(tensor.handle, list(shape))
    return self.make_tensor(handle, _block_type(tensor.type.scalar, shape))


def _splat(self: Any, scalar: Any, block: Any) -> Any:
    """`scalar` in the shape of the type `block`."""
    wanted = block.with_element_ty(scalar.type.scalar)
    return self.make_tensor(self.builder.create_splat(wanted, scalar.handle), wanted)


def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
    """Instead of its own function, which finds out size by size what two shapes have in common."""
    left, right = lhs.type, rhs.type
    if not (left.is_block() and right.is_block()):
        if left.is_block():
            return lhs, _splat(self, rhs, left)
        return (_splat(self, lhs, right), rhs) if right.is_block() else (lhs, rhs)
    if left.shape.values == right.shape.values:
        return lhs, rhs
    shape = _common_shape(tuple(left.shape.values), tuple(right.shape.values))
    if shape is None:
        return broadcast_anew(self, lhs, rhs)
    return _repeated(self, lhs, shape), _repeated(self, rhs, shape)


computation_type_anew = interpreter.TritonSemantic.computation_type_impl
_COMPUTATION_TYPES: dict[tuple[Any, ...], Any] = {}


def computation_type(
    self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
) -> Any:
    """The promotion of two types, found once; a refusal is raised again each time."""
    key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
    found = _COMPUTATION_TYPES.get(key)
    if found is None:
        found = computation_type_anew(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        _COMPUTATION_TYPES[key] = found
    return found


operands_anew = interpreter.TritonSemantic.binary_op_type_checking_impl
# A number beside a tensor, as a tensor: what came of it once for each type and shape of the other.
_NUMBERS: dict[tuple[Any, ...], Any] = {}
_MOST_NUMBERS, _LARGEST_NUMBER = 4096, 4096


_STAYS: dict[tuple[str, bool], bool] = {}


def _stays(dtype: Any, div_or_mod: bool) -> bool:
    """True if an operation of two of this type is computed in it."""
    key = (dtype.name, div_or_mod)
    found = _STAYS.get(key)
    if found is None:
        found = not dtype.is_ptr()
        if found:
            semantic = interpreter.interpreter_semantic
            found = computation_type(semantic, dtype, False, dtype, False, div_or_mod) == dtype
        _STAYS[key] = found
    return found


def operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Instead of its own function: two tensors of one type need no conversion, and a number is converted and
    repeated to a shape once. All else, and every refusal, is its own."""
    if (
        arithmetic_check
        and type(lhs) is type(rhs) is tl.tensor
        and lhs.dtype is rhs.dtype
        and _stays(lhs.dtype, div_or_mod)
    ):
        return self.broadcast_impl_value(lhs, rhs)
    left_number, right_number = type(lhs) in (int, float), type(rhs) in (int, float)
    anew = functools.partial(
        operands_anew, self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    )
    number, other = (lhs, rhs) if left_number else (rhs, lhs)
    # Zeros have a sign, which does not show in a key.
    if (
        not arithmetic_check
        or left_number == right_number
        or type(other) is not tl.tensor
        or (type(number) is float and not number)
    ):
        return anew()
    allowed = allow_lhs_ptr, allow_rhs_ptr
    key = (type(number), number, left_number, other.type.name, other.dtype.name, div_or_mod, allowed)
    known = _NUMBERS.get(key)
    if known is None:
        left, right = anew()
        made, stayed = (left, right) if left_number else (right, left)
        if stayed is other and made.handle.data.size <= _LARGEST_NUMBER:
            made.handle.data.setflags(write=False)
            if len(_NUMBERS) == _MOST_NUMBERS:
                _NUMBERS.clear()
            _NUMBERS[key] = made
        return left, right
    return (known, other) if left_number else (other, known)


_INTEGERS = (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64)
_FLOATS = (tl.float16, tl.float32, tl.float64)
# Types that numpy computes with as they are: no bits as truth values, no floats kept as integers.
_NUMERIC = {dtype.name for dtype in (*_INTEGERS, *_FLOATS)}
_BITS = {dtype.name for dtype in (*_INTEGERS, tl.int1)}
# Offsets that are added to a pointer as they are: signed ones, and those of 64 bits.
_OFFSETS = {dtype.name for dtype in (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint64)}
# Methods of the semantic: what numpy computes for them, with which types, and if the result is true or false.
METHODS = {
    "add": (np.add, _NUMERIC, False),
    "sub": (np.subtract, _NUMERIC, False),
    "mul": (np.multiply, _NUMERIC, False),
    "less_than": (np.less, _NUMERIC, True),
    "less_equal": (np.less_equal, _NUMERIC, True),
    "greater_than": (np.greater, _NUMERIC, True),
    "greater_equal": (np.greater_equal, _NUMERIC, True),
    "equal": (np.equal, _NUMERIC, True),
    "not_equal": (np.not_equal, _NUMERIC, True),
    "and_": (np.bitwise_and, _BITS, False),
    "or_": (np.bitwise_or, _BITS, False),
    "xor_": (np.bitwise_xor, _BITS, False),
}
# A number beside a tensor of a type that it does not change, as an array of one element.
_NUMBERS_ALONE: dict[tuple[Any, ...], Any] = {}


def _number_alone(self: Any, number: Any, dtype: Any) -> Any:
    """The number as an array; None where it changes the type, or is refused."""
    key = (type(number), number, dtype.name)
    if key not in _NUMBERS_ALONE:
        if len(_NUMBERS_ALONE) == _MOST_NUMBERS:
            _NUMBERS_ALONE.clear()
        one = tl.tensor(interpreter.TensorHandle(np.ones(1, get_np_dtype(dtype)), dtype), dtype)
        try:
            stayed, made = operands_anew(self, one, number)
        except Exception:
            stayed, made = None, None
        _NUMBERS_ALONE[key] = made.handle.data if stayed is one else None
    return _NUMBERS_ALONE[key]


def _moved(self: Any, pointer: Any, offset: Any) -> Any:
    """`pointer` by `offset` elements."""
    shape = pointer.type
    if pointer.shape is NO_SHAPE[0] and offset.shape is not pointer.shape:
        shape = offset.type.with_element_ty(pointer.dtype)
    elif offset.shape is not pointer.shape and offset.shape is not NO_SHAPE[0]:
        pointer, offset = self.broadcast_impl_value(pointer, offset)
        shape = pointer.type
    return tl.tensor(self.builder.create_addptr(pointer.handle, offset.handle), shape)


def method(name: str) -> Any:
    """Replaces a method of the semantic, which asks some twenty times what its operands are. Where they are
    of one type and shape, or one of them is a single number, numpy computes the same; all else, and every
    refusal, is its own."""
    anew = getattr(interpreter.TritonSemantic, name)
    compute, kinds, is_truth = METHODS[name]
    adds = name == "add"

    def fast(self: Any, input: Any, other: Any, *rest: Any, **named: Any) -> Any:
        if type(input) is not tl.tensor:
            return anew(self, input, other, *rest, **named)
        dtype, like, left = input.dtype, input.type, input.handle.data
        right = None
        if dtype.name in kinds:
            if type(other) is tl.tensor:
                if other.dtype is dtype and other.handle.data.dtype == left.dtype:
                    if other.shape is input.shape or other.shape is NO_SHAPE[0]:
                        right = other.handle.data
                    elif input.shape is NO_SHAPE[0]:
                        right, like = other.handle.data, other.type
            elif type(other) in (int, float) and (other or type(other) is int):
                right = _number_alone(self, other, dtype)
                if right is not None and right.dtype != left.dtype:
                    right = None
        elif adds and type(other) is tl.tensor and dtype.is_ptr() and other.dtype.name in _OFFSETS:
            return _moved(self, input, other)
        if right is None:
            return anew(self, input, other, *rest, **named)
        if is_truth:
            like = like.with_element_ty(tl.int1) if like.is_block() else tl.int1
        handle = object.__new__(interpreter.TensorHandle)  # of the size that its operands have
        handle.data, handle.dtype, handle.attr = compute(left, right), input.handle.dtype.scalar, {}
        return tl.tensor(handle, like)

    return fast
