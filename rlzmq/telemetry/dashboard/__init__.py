"""The dashboard: a web page that shows runs and searches, from their directories and their brokers' status."""
