"""Values and types of Triton's interpreter, made with what all of a shape or dtype share.
`triton_interpreter` puts these functions in the places of Triton's own.
"""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_constexpr: Any = tl.constexpr
_core: Any = tl.core
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


NO_SHAPE = _tensor_shape(())


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Instead of its own function, which makes a constexpr of each size and the type of their tuple."""
    self.handle = handle
    self.type = type
    if type.is_block():
        self.shape, self.numel = _tensor_shape(tuple(type.shape.values))
        self.dtype = type.element_ty
    else:
        self.shape, self.numel = NO_SHAPE
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
