"""The broker without its sockets: `core` dispatches each event to the part that handles it.

| module         | responsibility                                                           | state it changes   |
|----------------|--------------------------------------------------------------------------|--------------------|
| `core`         | dispatch; which role may send which message; the driver's requests       | requests, offences |
| `registration` | who is registered, under which incarnation                               | peers, names       |
| `intake`       | accepts fragments, and acknowledges them                                 | ledger, receipts   |
| `grants`       | which runner samples how much, under which weights                       | leases             |
| `updates`      | which steps an update trains, its commit, what is kept if ranks die      | runs, ledger       |
| `reports`      | reports of updates until the driver has them; STATUS and PROGRESS        | reports, receipts  |
| `state`        | what the parts share: peers, ledger, weights, timers, limits, instructions |                    |
"""
