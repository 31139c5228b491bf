"""From what the user wants to the fastest plan that fits, and why the others were not taken."""
