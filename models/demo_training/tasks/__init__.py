"""Tasks of the demo model: questions with their answers, a module a task. Imported by the rows of training,
the vocabulary and the exam; imports nothing of them.
"""
