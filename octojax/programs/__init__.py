"""Stage programs put together into what one rank runs at once, and compiled ahead."""
