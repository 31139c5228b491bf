"""One use of the program from start to end: plan, checks, training, out of memory, report. It prints nothing."""
