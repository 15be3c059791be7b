"""The head's side of the wire.

- `worker`: a worker as the head sees it, its processes, and its episodes as the user has seen them
- `transport`: the one listening socket, which knows connections but no workers
- `supervisor`: finds out which processes are lost, and starts replacements
- `recovery`: the orders that make a process a given worker, and the seeds of its noise
- `requests`, `messenger`: the requests to workers, and the handling of their messages, including
  errors; `responses` opens and checks the responses
- `interrupts`: ends waits when the user asks for it
- `pool`: sends requests to all workers and waits for them; `start` starts the pool
- `collect`, `stepping`, `evaluation`: the ways to use the workers; `vector_api`: Gymnasium's
  methods; `measures`: the attributes of a `ClusterEnv` that describe its workers

The life of a rollout: `collect` publishes the policy, and all workers get its structure if that has
changed. The `pool` asks each worker to act (`Collect`), with the divergence, the noise's seed and
the policy's numbers. A worker that wants to pull asks for weights (`Pull`, `Weights`), acts, and
responds (`Part`). The `messenger` has the part opened and checked, and keeps it in `requests`.
`collect` takes it, and `Rollout` joins the parts of all workers. A part by itself, which `recv`
returns, is called a chunk.
"""
