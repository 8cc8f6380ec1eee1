"""What a training costs before it is run: counts of work, messages and memory, rank by rank."""
