"""Beyond one machine: Ray's workers, manifests and scripts, and the choice of a cluster."""
