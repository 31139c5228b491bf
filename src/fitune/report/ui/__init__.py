"""The planner's page: its server, its bars, and its template."""
