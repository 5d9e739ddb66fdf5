"""Runs on several machines: the roles of a run, and the engines that start them."""
