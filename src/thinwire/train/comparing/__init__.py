"""Comparison of ranks and hosts with each other while a run goes on: their pace, their links and their replicas."""
