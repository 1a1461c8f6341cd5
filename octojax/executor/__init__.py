"""Runs a plan: instruction lists per rank, transports between ranks, the step's inner loop."""
