"""Measuring programs, which are not installed. The modules here are shared by the folders; nothing outside
imports them."""
