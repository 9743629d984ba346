"""What a Triton kernel says to the chip and the language has no word for: its clock, and a fence. Behind a
constexpr each, so that the interpreter never meets them.

`ON_CHIP` is False in Triton's interpreter: there the clock stands at 0, and a fence is nothing (one thread
runs everything in order).
"""

from __future__ import annotations

import triton
import triton.language as tl

ON_CHIP = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def clock_ns():
    """The GPU's own clock, nanoseconds, one for all its multiprocessors."""
    if ON_CHIP:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def fence_system():
    """What this thread wrote before is seen by the host before what it writes after."""
    if ON_CHIP:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def let_next_begin():
    """The next kernel may begin, where it was launched as one that waits by itself for this one's end."""
    if ON_CHIP:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def together():
    """What one thread of the program wrote is seen by all of them."""
    if ON_CHIP:
        tl.debug_barrier()
