"""The best cluster for a job: a plan on every cluster of a fleet, ranked by time and cost."""
