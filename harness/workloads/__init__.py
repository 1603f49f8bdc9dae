"""Models with their data: the built-in ones, and the user's own."""
