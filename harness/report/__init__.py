"""Findings and records become a page, Markdown, `decision.json` and a terminal table."""
