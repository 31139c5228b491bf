"""Saves that are whole or absent, resumes that continue, exports that are verified."""
