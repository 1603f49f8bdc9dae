"""The calibration study: small trainings, planted faults, and how every rule judges them."""
