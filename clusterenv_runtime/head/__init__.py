"""The head's side of the wire.

- `worker`: one worker as the head knows it, and each of its processes
- `transport`: the one listening socket, which knows connections and no workers
- `supervisor`: finds out which processes are lost, and starts others
- `recovery`: what a replacement must be told; `episodes`: what the user has seen of its
  environments
- `requests`, `messenger`: what workers are asked, and what becomes of their messages; `answers`
  opens and checks the responses
- `failures`: errors that workers report; `interrupts`: what ends a wait
- `pool`: all workers, to be asked and waited for; `start` begins it
- `collect`, `stepping`: the two ways to use them; `vector_api`: Gymnasium's methods; `measures`:
  what a `ClusterEnv` tells of them
"""
