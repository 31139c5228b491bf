"""Where a job runs best: a plan on every cluster of a fleet, ranked by time and cost."""
