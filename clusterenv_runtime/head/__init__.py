"""The head's side of the wire.

- `worker`: one worker as the head knows it, each of its processes, and its episodes as the user
  has seen them
- `transport`: the one listening socket, which knows connections and no workers
- `supervisor`: finds out which processes are lost, and starts others
- `recovery`: what a process must be told to be a worker, and which noise it draws
- `requests`, `messenger`: what workers are asked, and what becomes of their messages, also of
  errors; `responses` opens and checks the responses
- `interrupts`: what ends a wait
- `pool`: all workers, to be asked and waited for; `start` begins it
- `collect`, `stepping`: the two ways to use them; `vector_api`: Gymnasium's methods; `measures`:
  what a `ClusterEnv` tells of them
"""
