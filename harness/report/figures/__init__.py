"""The report's figures: each is drawn twice, for a page and for a phone, as plain SVG."""
