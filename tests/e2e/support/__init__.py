"""Clusters and parts of clusters for the tests, engines that misbehave, and what is read of processes."""
