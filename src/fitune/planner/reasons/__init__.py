"""Why a plan is as it is: a line for each decision, and plans and estimates as text and as data."""
