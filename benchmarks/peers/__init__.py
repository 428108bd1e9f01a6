"""Beside libraries that append to MongoDB or to SQLite, each in a virtual environment of its own."""
