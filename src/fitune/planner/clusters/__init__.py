"""Clusters of a fleet, each with its plan, ranked by time and cost of the whole job."""
