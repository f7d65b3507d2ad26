"""The built-in operations, each a plugin like anybody's: how its sites are found, proved and served."""
