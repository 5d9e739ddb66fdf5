"""The broker without its sockets: `core` dispatches each event to the part that handles it.

| module         | responsibility                                                           | state it changes   |
|----------------|--------------------------------------------------------------------------|--------------------|
| `core`         | dispatch; who may send what; the driver's requests; STATUS and PROGRESS  | requests, offences |
| `registration` | who is registered, under which incarnation                               | peers, names       |
| `intake`       | accepts fragments, and acknowledges them                                 | ledger, receipts   |
| `grants`       | which runner samples how much, under which weights                       | leases             |
| `updates`      | which steps an update trains, its commit and report, what survives ranks | runs, ledger       |
| `state`        | what the parts share: peers, ledger, weights, timers, limits, instructions |                    |
"""
