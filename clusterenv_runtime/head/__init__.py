"""The head's side of the wire.

- `transport`: the one listening socket, which knows connections but no workers
- `workers`: a worker as the head sees it, and the supervision of its processes
- `recovery`: what outlives a worker's processes, and the orders for a replacement
- `pool`: requests, messages, waits, and the replacement of processes
- `stepping`: Gymnasium's vector API
- `acting`: rollouts and evaluations

The life of a rollout: `ClusterEnv.rollout` publishes the policy, and all workers get its structure
if that has changed. The `pool` asks each worker to act (`Collect`), with the divergence, the
noise's seed and the policy's numbers. A worker that wants to pull asks for weights (`Pull`,
`Weights`), acts, and responds (`Part`). The `pool` checks the part and keeps it,
`ClusterEnv.rollout` takes it, and `Rollout` joins the parts of all workers. A part by itself, which
`recv` returns, is called a chunk.
"""
