"""Machines as values: devices by name and by figures, hardware, and what a job asks of a cluster."""
