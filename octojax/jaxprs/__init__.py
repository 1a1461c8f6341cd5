"""Surgery on jaxprs: small pure functions on variables and equations."""
