"""How shipped models were made. Not installed; imported by its tests alone."""
