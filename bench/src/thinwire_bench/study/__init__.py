"""Studies: questions that take many runs, answered with a table and a picture.

A study's file says what is compared; a queue makes the runs that are missing and can be interrupted; every run
leaves its raw metrics, from which the answer is made.
"""
