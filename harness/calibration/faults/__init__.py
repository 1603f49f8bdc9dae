"""The fault zoo: mistakes of precision that people make, each a name, a sentence and doses."""
