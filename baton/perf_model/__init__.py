"""The model of time: seconds and bytes of a worker's steps, prompts and transfers, from numbers alone.

`StepCosts` is what is known of one worker: fitted while it runs (`prefill_fit`, `decode_fit`), sent with its
heartbeats (`messages`), or read from a file (`profile`). Torch-free. Imported by the engine, its process, the
router, loadgen and benchmarks; imports `baton.base` and `baton.v1`.
"""
