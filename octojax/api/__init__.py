"""What users call: decorate, compile, step."""
