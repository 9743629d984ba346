"""The programs that made the shipped models. Not installed; imported by their tests alone."""
