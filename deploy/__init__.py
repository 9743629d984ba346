"""How Baton is deployed and released: images, the Helm chart, releases. Not installed; imported by its tests
alone.
"""
