"""How the processes of a job are started: commands and environment from a Plan, and the launchers that run them."""
