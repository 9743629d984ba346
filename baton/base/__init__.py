"""Kinds of errors, addresses, followed files, processes, logs: the ground floor. Torch-free; any
package may import it, and it imports none.
"""
