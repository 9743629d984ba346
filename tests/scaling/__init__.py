"""Autoscaling in virtual time: the router's real queue, placement and metrics of demand, modelled workers,
and models of Prometheus, KEDA and HorizontalPodAutoscaler."""
