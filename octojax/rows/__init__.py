"""Which values of a loss depend on which rows of its batch, and the loss of the whole batch."""
