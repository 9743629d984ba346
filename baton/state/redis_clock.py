"""The one clock of everything in Redis: its own. Clients' clocks may differ."""

# The beginning of a script: `now` in milliseconds, `time` as Redis gives it.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
