"""Products of codes, and the memory that products need beside their operands. Imported by `forward.layers`
and `tuning`.
"""
