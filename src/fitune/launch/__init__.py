"""The start of a job's processes: commands and environment from a Plan, and the launchers that run them."""
