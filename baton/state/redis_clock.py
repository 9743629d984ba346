"""Lua code that reads the clock of Redis, which all stored times refer to, since clients' clocks may
differ."""

# Beginning of a script: `now` in milliseconds, `time` as Redis returns it.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
