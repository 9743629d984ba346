"""Programs that measured a question before a design was chosen; each goes when what it decided stands.
Nothing imports them.
"""
