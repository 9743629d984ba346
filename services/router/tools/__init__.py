"""Tool calls and reasoning in an output's text: how each family of models writes them, and what finds them
there.

Below `formats`, which gives clients what is found, and above `request`.
"""
