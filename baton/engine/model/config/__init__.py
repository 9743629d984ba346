"""The configuration of a model. Imported by all of `model`, by `bench` and by the worker's start-up."""
