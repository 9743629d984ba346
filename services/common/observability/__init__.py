"""Structured logs, histograms and Prometheus exposition, alike in every process.

Any part but `baton.engine` and `kvtransfer` may import it; torch-free.
"""
