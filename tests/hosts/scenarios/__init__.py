"""Tests that `tests.manifests.namespace` runs in namespaces of their own. Their files have names that pytest
does not look for."""
