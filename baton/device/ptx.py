"""Inline PTX for what Triton has no operation for: a clock, fences, dependent launch. Each is guarded by a
constexpr, so that Triton's interpreter never executes it.

`ON_CHIP` is False in the interpreter: there the clock is 0 and a fence does nothing, since one thread runs
everything in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

ON_CHIP = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def clock_ns():
    """The GPU's global timer in ns, shared by all its multiprocessors."""
    if ON_CHIP:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def fence_system():
    """The host sees this thread's earlier writes before its later ones."""
    if ON_CHIP:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def let_next_begin():
    """Lets the next kernel start, where it was launched with programmatic dependent launch."""
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
def wait_for_previous():
    """Waits until the kernels before have ended and what they wrote can be read, in a launch with
    `dependent_launch`, and lets the next kernel start then."""
    if ON_CHIP:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        let_next_begin()


def dependent_launch(early: bool) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel before it has ended (programmatic dependent
    launch, Hopper), where `early`: the kernel begins with `wait_for_previous`."""
    return {"launch_pdl": True} if early and ON_CHIP.value else {}


@triton.jit
def together():
    """A barrier: all threads of the program see what each of them wrote before."""
    if ON_CHIP:
        tl.debug_barrier()
