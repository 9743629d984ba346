"""A faster interpreter of Triton: values that it would compute again at each operation are computed once.

Values, types and refusals are Triton's own (`tests/engine/test_interpreter.py`).
"""

from __future__ import annotations

import functools
from typing import Any

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


@functools.cache
def _interpreted(member: Any) -> Any:
    """`member` with the interpreter's semantic. Where `tl.core.builtin` does no more than to check that it
    has one, what it wraps is called at once."""
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


@functools.cache
def _tensor_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's `shape` and `numel`, which all tensors of that shape share."""
    numel = 1
    for size in shape:
        numel *= size
    return _core.tuple([_constexpr(size) for size in shape]), _constexpr(numel)


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Instead of its own function, which makes a constexpr of each size and the type of their tuple."""
    self.handle = handle
    self.shape, self.numel = _tensor_shape(tuple(type.shape.values) if type.is_block() else ())
    self.type = type
    self.dtype = type.scalar


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
    left_number, right_number = type(lhs) in (int, float), type(rhs) in (int, float)
    anew = functools.partial(
        operands_anew, self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    )
    if arithmetic_check and type(lhs) is type(rhs) is tl.tensor:
        alike = lhs.dtype is rhs.dtype and _stays(lhs.dtype, div_or_mod)
        return self.broadcast_impl_value(lhs, rhs) if alike else anew()
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
    interpreter.TritonSemantic.computation_type_impl = computation_type
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_impl_value
    interpreter.TritonSemantic.binary_op_type_checking_impl = operands
    # Each sum and product of integers would be computed again in 64 bits, to be compared with a bound that
    # the interpreter, whose `debug` is off, then does not assert.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
