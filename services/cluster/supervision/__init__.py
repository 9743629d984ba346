"""Decides which workers run, and acts: `reconcile` decides, `supervisor` polls and acts, `worker_process`
owns one worker's process. Imported by the two kinds of cluster beside it; imports neither of them nor Ray.
"""
