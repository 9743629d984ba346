"""Programs that pack a tiny checkpoint with the tools of the formats, each run by the tool's own Python:

    python -m tests.engine.model.quantization.tools.pack_TOOL BASE TARGET

BASE is what `base.write_base` writes; folders of TARGET are checkpoints.
"""
