"""One seeded run under one policy, and the record it leaves."""
