"""The dashboard: one web page that watches runs and searches, from their directories and their brokers' status."""
