"""Functions that `tests.support.triton_interpreter` replaces return the same as Triton's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.support import triton_operators as fast
from tests.support import triton_types as types

core: Any = tl.core
semantic: Any = interpreter.interpreter_semantic
DTYPES = (
    *(tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64),
    *(tl.float8e4nv, tl.float8e5, tl.float16, tl.bfloat16, tl.float32, tl.float64),
)
SHAPES_OF_OFFSETS: tuple[list[int], ...] = ([], [4], [2, 4], [2, 1], [8])
SHAPES = ([1], [16], [4, 8], [2, 1, 32])


def outcome(call: Callable[[], Any]) -> str:
    """The text of a call's result, or of its refusal."""
    try:
        return repr(call())
    except (TypeError, ValueError, AssertionError) as error:
        return repr(error)


def block_type(init: Callable[..., None], element: Any, shape: Any) -> Any:
    made = object.__new__(core.block_type)
    init(made, element, shape)
    return made


def said(made: Any) -> tuple[Any, ...]:
    return made.name, made.element_ty, made.shape.values, made.numel, made.mangle()


def test_types_are_promoted_alike() -> None:
    for left, right in itertools.product(DTYPES, repeat=2):
        for flags in itertools.product((False, True), repeat=3):
            arguments = (semantic, left, flags[0], right, flags[1], flags[2])
            for _ in range(2):  # found, and found again
                mine = outcome(lambda given=arguments: fast.computation_type(*given))  # type: ignore[misc]
                assert mine == outcome(lambda given=arguments: fast.computation_type_anew(*given))  # type: ignore[misc]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("element", [tl.int32, tl.float16, tl.pointer_type(tl.float32)])
def test_types_of_blocks_are_equal(shape: list[int], element: Any) -> None:
    own = block_type(types.init_block_type_anew, element, shape)
    for given in (shape, [tl.constexpr(size) for size in shape], core.tuple(shape), shape):
        assert said(block_type(types.init_block_type, element, given)) == said(own)
    other = block_type(types.init_block_type, tl.int1, shape)
    assert said(types.with_element_ty(other, element)) == said(own)


@pytest.mark.parametrize("shape", [[], [3], [4, 0], [4.0], [True], [1 << 21]])
def test_shapes_are_refused_alike(shape: list[Any]) -> None:
    own = outcome(lambda: said(block_type(types.init_block_type_anew, tl.int32, shape)))
    for _ in range(2):
        assert outcome(lambda: said(block_type(types.init_block_type, tl.int32, shape))) == own
    sizes = block_type(types.init_block_type, tl.int32, [1]).shape.values
    assert type(sizes[0]) is int, "not True, its equal"


@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_tensors_have_the_same_shape(shape: list[int] | None) -> None:
    dtype = tl.float32 if shape is None else core.block_type(tl.float32, shape)
    made = object.__new__(tl.tensor)
    types.init_tensor(made, "handle", dtype)
    assert [size.value for size in made.shape] == (shape or [])
    assert all(isinstance(size, tl.constexpr) for size in (*made.shape, made.numel))
    assert made.numel.value == triton.language.core.math.prod(shape or [1])
    assert (made.handle, made.type, made.dtype) == ("handle", dtype, tl.float32)


def tensor(dtype: Any, shape: list[int]) -> Any:
    """A tensor of ones for the interpreter."""
    made = interpreter.TensorHandle(np.ones(shape or [1], dtype=types.get_np_dtype(dtype)), dtype)
    return tl.tensor(made, core.block_type(dtype, shape) if shape else dtype)


def operands(call: Callable[..., Any], *arguments: Any) -> str:
    """The two tensors that an operation is then given, or how they are refused."""

    try:
        made = call(semantic, *arguments)
    except Exception as error:
        return repr(error)
    return repr([(one.type.name, one.handle.data.dtype, one.handle.data.tolist()) for one in made])


def test_shapes_are_repeated_alike() -> None:
    shapes: tuple[list[int], ...] = ([], [1], [4], [8], [2, 4], [1, 4], [2, 1], [1, 1], [2, 1, 4], [1, 2, 4])
    for left, right in itertools.product(shapes, repeat=2):
        for dtype in (tl.int32, tl.bfloat16):
            pair = tensor(tl.float32, left), tensor(dtype, right)
            assert operands(fast.broadcast_impl_value, *pair) == operands(fast.broadcast_anew, *pair)
    pointers = tensor(tl.uint64, [4, 1])
    pointers = tl.tensor(
        interpreter.TensorHandle(pointers.handle.data, tl.pointer_type(tl.int8)),
        core.block_type(tl.pointer_type(tl.int8), [4, 1]),
    )
    for other in (tensor(tl.int32, [1, 2]), tensor(tl.int32, [])):
        own = operands(fast.broadcast_anew, pointers, other)
        assert operands(fast.broadcast_impl_value, pointers, other) == own


NUMBERS = (0, 1, -1, 255, 2**31, -(2**63), 2**64, True, 0.0, -0.0, 0.5, 1e-40, 1e300, float("inf"))


@pytest.mark.parametrize("flags", [(False, False, True, False), (False, False, True, True), (True, True)])
def test_operands_are_converted_alike(flags: tuple[bool, ...]) -> None:
    """Tensors of all types with each other and with numbers, on either side."""
    tensors = [tensor(dtype, shape) for dtype in DTYPES for shape in ([], [4], [2, 4])]
    pairs = [(left, right) for left in tensors for right in (*tensors, *NUMBERS)]
    pairs += [(number, right) for number in NUMBERS for right in tensors]
    for left, right in pairs:
        own = operands(fast.operands_anew, left, right, *flags)
        for _ in range(2):  # made, and found again
            assert operands(fast.operands, left, right, *flags) == own


def test_pointers_are_refused_alike() -> None:
    pointer = tl.pointer_type(tl.float32)
    some = tl.tensor(interpreter.TensorHandle(np.ones([1], dtype=np.uint64), pointer), pointer)
    for flags in ((True, True), (False, False), (True, False)):
        for pair in ((some, some), (some, 1), (1, some), (some, 0.5), (some, tensor(tl.int32, []))):
            assert operands(fast.operands, *pair, *flags) == operands(fast.operands_anew, *pair, *flags)


def some_of(dtype: Any, shape: list[int], seed: int) -> Any:
    """A tensor of any bits for the interpreter."""
    kind = types.get_np_dtype(dtype)
    draw = np.random.default_rng(seed)
    if dtype == tl.int1:
        data = draw.integers(0, 2, shape or [1]).astype(bool)
    else:
        data = np.frombuffer(draw.bytes(kind.itemsize * int(np.prod(shape or [1]))), kind)
        data = np.where(draw.random(data.shape) < 0.3, data[0], data).reshape(shape or [1])
    return tl.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, shape) if shape else dtype)


def computed(call: Callable[[], Any]) -> str:
    """The text of an operation's result, or of its refusal."""
    try:
        made = call()
    except Exception as error:
        return repr(error)
    data = made.handle.data
    return repr((made.type.name, said_shape(made), made.handle.dtype.name, data.dtype, data.tolist()))


def said_shape(made: Any) -> list[int]:
    return [size.value for size in made.shape]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", fast.METHODS)
def test_numbers_are_computed_alike(name: str) -> None:
    """Tensors of all types and shapes, with each other and with numbers on either side."""
    own_method, replaced = getattr(interpreter.TritonSemantic, name), fast.method(name)
    rest = (True,) if name in ("add", "sub", "mul") else ()
    shapes: tuple[list[int], ...] = ([], [1], [4], [2, 4], [2, 1], [1, 4])
    for number, dtype in enumerate(DTYPES):
        for left, right in itertools.product(shapes, repeat=2):
            one, other = some_of(dtype, left, number), some_of(dtype, right, number + 1)
            for pair in ((one, other), (one, one), (one, some_of(tl.int32, right, 3))):
                own = computed(lambda given=pair: own_method(semantic, *given, *rest))  # type: ignore[misc]
                assert computed(lambda given=pair: replaced(semantic, *given, *rest)) == own  # type: ignore[misc]
        for alone in NUMBERS:
            for pair in ((some_of(dtype, [4], number), alone), (alone, some_of(dtype, [], number))):
                for _ in range(2):  # made, and found again
                    own = computed(lambda given=pair: own_method(semantic, *given, *rest))  # type: ignore[misc]
                    assert computed(lambda given=pair: replaced(semantic, *given, *rest)) == own  # type: ignore[misc]


def test_offsets_are_added_to_pointers_alike() -> None:
    own_method, replaced = interpreter.TritonSemantic.add, fast.method("add")
    for element, left, right in itertools.product(
        (tl.int8, tl.float32), SHAPES_OF_OFFSETS, SHAPES_OF_OFFSETS
    ):
        base = some_of(tl.uint64, left, 5)
        pointer = tl.pointer_type(element)
        pointers = tl.tensor(
            interpreter.TensorHandle(base.handle.data, pointer),
            core.block_type(pointer, left) if left else pointer,
        )
        for dtype in DTYPES:
            offset = some_of(dtype, right, 6)
            for pair in ((pointers, offset), (offset, pointers), (pointers, pointers), (pointers, 3)):
                own = computed(lambda given=pair: own_method(semantic, *given, True))  # type: ignore[misc]
                assert computed(lambda given=pair: replaced(semantic, *given, True)) == own  # type: ignore[misc]


def test_constexprs_are_unwrapped_alike() -> None:
    one, two = tl.constexpr(1), tl.constexpr(2)
    for value in (one, 1, "x", None, [one, 2], (one, (two, 3)), core.tuple([one, core.tuple([two])])):
        assert repr(types.unwrap_if_constexpr(value)) == repr(types.unwrap_any(value)) or isinstance(
            value, core.tuple
        )
    unwrapped = types.unwrap_if_constexpr(core.tuple([one, core.tuple([two])]))
    assert unwrapped.values[0] == 1
    assert unwrapped.values[1].values == [2]
