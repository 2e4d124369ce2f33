"""The command lines: `ridgefill` (main.py, a room for each command) and `ridgefill-plan` (plan.py)."""
