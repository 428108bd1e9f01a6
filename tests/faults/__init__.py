"""Real processes under a seeded schedule of faults, and what must be true of the database afterwards (DESIGN §1)."""
