"""Tool calls and reasoning in an output's text: how each family of models writes them, and what finds them
there. Imported by `request`, `formats`, `lifecycle`, `api` and the assembly; imports nothing else of the
router.
"""
