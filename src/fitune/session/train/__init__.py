"""A run of training: a recipe is planned, checked and trained, attempt after attempt, in one process or in many."""
