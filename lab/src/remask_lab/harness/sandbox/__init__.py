"""Runs generated code where it can do little harm, and judges it from outside.

Three programs take part, each a process of its own, started with the standard library alone:

- `supervisor` builds the confinement, starts the candidate in it, and ends every process that is left;
- `candidate` holds the generated code and answers calls;
- `judge` runs the tests, in which the functions under test are stand-ins that call the candidate.

Candidate and judge exchange lines of JSON, in the form that `values` gives plain values. `confinement` finds out what
the machine offers, and starts the supervisor.
"""
