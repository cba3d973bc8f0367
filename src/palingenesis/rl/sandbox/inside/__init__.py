"""What runs inside a room: standard library only, Python 3.9 and newer. Used outside too: `values`, and a few names of
`limits` and `relay`.

    worker    PID 1 of a room, and the supervisor it forks for each job
    harness   what the program's process does: run a script, serve its functions, run tests against proxies
    values    plain values as JSON, on both sides
    limits    prctl, the system call filter, rlimits, counting and killing processes, emptying a folder
    relay     between a pod's runtime and the worker, where only commands and files reach a pod

`room.py` ships the source text of what a room needs to `python3 -c`, so nothing has to be installed or mounted there.
"""
