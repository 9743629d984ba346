"""Computes figures with intervals from request records, and judges the validity of a run. Imports
`loadgen.common` alone; imported by `generator`, `goodput`, `reports` and `commands`.
"""
