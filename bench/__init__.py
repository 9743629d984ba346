"""Measuring programs, which are not installed. The modules here are shared by the folders; no other package
imports them.
"""
