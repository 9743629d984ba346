"""Deployment and release of Baton: images, the Helm chart, releases. Not installed; imported by its tests
alone.
"""
