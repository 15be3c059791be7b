"""The head's side of the wire: the workers behind its one listening socket, what they are asked,
and who replaces them.

`worker` is one worker, as the head knows it, and its process. `transport` carries messages and knows no worker.
`supervisor` finds out who is lost. `recovery` says what a replacement must be told, and `episodes`
what the user has seen of its environments. `failures` keeps the errors of workers, `interrupts` what ends a wait.
`answers` opens and checks what workers send. `pool` numbers what is asked and puts all together,
`start` begins it. `collect` and `stepping` are the two ways to use it.
"""
