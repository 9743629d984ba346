"""Measures prefill of one engine. Imports only the shared modules of `bench`; nothing imports it."""
