"""Traces: what a span is, the W3C context that joins spans of several processes, and their export over OTLP.

Imported by router and workers' fronts. OpenTelemetry's packages are imported by `otlp` alone, and only where
an endpoint is configured.
"""
