"""A faster interpreter of Triton: values that it would compute again at each operation are computed once.

Values, types and refusals are Triton's own (`tests/engine/test_interpreter.py`).
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_constexpr: Any = tl.constexpr
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
        return compute(self, unwrap_if_constexpr(other), True)

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


_NP_DTYPES: dict[str, Any] = {}
_get_np_dtype_uncached = interpreter._get_np_dtype


def get_np_dtype(dtype: Any) -> Any:
    """Replaces the interpreter's own function, which builds its table again at each operation."""
    found = _NP_DTYPES.get(dtype.name)
    if found is None:
        found = _NP_DTYPES[dtype.name] = _get_np_dtype_uncached(dtype)
    return found


unwrap_any = _core._unwrap_if_constexpr
_SEQUENCES = (list, tuple, _core.tuple)


def unwrap_if_constexpr(value: Any) -> Any:
    """Replaces a function that asks three times what a value is not before it looks whether it is a
    constexpr."""
    if type(value) is _constexpr:
        return value.value
    return unwrap_any(value) if isinstance(value, _SEQUENCES) else value


_MOST_BYTES: dict[str, int] = {}


def _most_bytes(dtype: Any) -> int:
    """Bytes that an element of this type may take."""
    found = _MOST_BYTES.get(dtype.name)
    if found is None:
        pointer = isinstance(dtype, _core.pointer_type)
        found = _MOST_BYTES[dtype.name] = 16 if pointer else max(8, dtype.primitive_bitwidth) // 8
    return found


def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Instead of its own function, which works out each time what an element may take; that one refuses."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > _most_bytes(dtype):
        self.__post_init__()


def get_element_ty(self: Any) -> Any:
    """Instead of its own function, which finds the end by an exception."""
    dtype = self.dtype
    while isinstance(dtype, (_core.pointer_type, _core.block_type)):
        dtype = dtype.element_ty
    return dtype


binary_op_anew = interpreter.InterpreterBuilder.binary_op


def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    """Instead of its own function, which validates the size of an element twice."""
    if lhs.data.dtype == bool:
        return binary_op_anew(self, lhs, rhs, op)
    dtype, output = lhs.dtype.scalar, op(lhs.data, rhs.data)
    if output.itemsize > _most_bytes(dtype):
        output = output.astype(get_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


@functools.cache
def _tensor_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's `shape` and `numel`, which all tensors of that shape share."""
    numel = 1
    for size in shape:
        numel *= size
    return _core.tuple([_constexpr(size) for size in shape]), _constexpr(numel)


_NO_SHAPE = _tensor_shape(())


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Instead of its own function, which makes a constexpr of each size and the type of their tuple."""
    self.handle = handle
    self.type = type
    if type.is_block():
        self.shape, self.numel = _tensor_shape(tuple(type.shape.values))
        self.dtype = type.element_ty
    else:
        self.shape, self.numel = _NO_SHAPE
        self.dtype = type


init_block_type_anew = _core.block_type.__init__
# Of each valid shape what all of its types share.
_BLOCK_SHAPES: dict[tuple[Any, ...], tuple[Any, int]] = {}


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Instead of its own function, which validates each shape again; a new shape is still validated."""
    sizes = tuple([unwrap_if_constexpr(size) for size in shape])
    # True equals 1 as a key, and is no size to numpy.
    whole = all(type(size) is int for size in sizes)
    known = _BLOCK_SHAPES.get(sizes) if whole else None
    if known is None:
        init_block_type_anew(self, element_ty, shape)
        if whole:
            _BLOCK_SHAPES[sizes] = self.shape, self.numel
        return
    self.element_ty = element_ty
    self.shape, self.numel = known
    self.name = f"<{_text(sizes)}, {element_ty}>"


@functools.cache
def _text(sizes: tuple[int, ...]) -> str:
    return str([str(size) for size in sizes])


def with_element_ty(self: Any, scalar_ty: Any) -> Any:
    """The type of the same shape, which is valid."""
    other = object.__new__(_core.block_type)
    other.element_ty = scalar_ty
    other.shape, other.numel = self.shape, self.numel
    other.name = f"<{_text(tuple(self.shape.values))}, {scalar_ty}>"
    return other


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
    if pointer.shape is _NO_SHAPE[0] and offset.shape is not pointer.shape:
        shape = offset.type.with_element_ty(pointer.dtype)
    elif offset.shape is not pointer.shape and offset.shape is not _NO_SHAPE[0]:
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
                    if other.shape is input.shape or other.shape is _NO_SHAPE[0]:
                        right = other.handle.data
                    elif input.shape is _NO_SHAPE[0]:
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


def make_launches_cheap() -> None:
    """Replaces the interpreter's functions by those above."""
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = get_np_dtype
    _core._unwrap_if_constexpr = unwrap_if_constexpr
    _core.tensor.__init__ = init_tensor
    _core.block_type.__init__ = init_block_type
    _core.block_type.with_element_ty = with_element_ty
    interpreter.TensorHandle.__init__ = init_handle
    interpreter.TensorHandle.get_element_ty = get_element_ty
    interpreter.InterpreterBuilder.binary_op = binary_op
    semantic: Any = interpreter.interpreter_semantic
    for name in METHODS:
        # Of the interpreter's alone: a kernel that is compiled has no numbers.
        setattr(semantic, name, MethodType(method(name), semantic))
    interpreter.TritonSemantic.computation_type_impl = computation_type
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_impl_value
    interpreter.TritonSemantic.binary_op_type_checking_impl = operands
    # Each sum and product of integers would be computed again in 64 bits, to be compared with a bound that
    # the interpreter, whose `debug` is off, then does not assert.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
