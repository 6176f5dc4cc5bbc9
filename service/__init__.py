"""The HTTP front end, its queue and supervisor, and the worker's entry."""
