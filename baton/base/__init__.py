"""What everything stands on: kinds of errors, addresses, followed files, processes, logs. Torch-free; any
package may import it, and it imports none.
"""
