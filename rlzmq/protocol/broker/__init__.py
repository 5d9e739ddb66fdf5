"""The broker without its sockets: `core` dispatches each event to the part that handles it.

| module         | responsibility                                                           | state it changes   |
|----------------|--------------------------------------------------------------------------|--------------------|
| `core`         | dispatch; who may send what; the timers; STATUS                          | offences           |
| `registration` | who is registered, under which incarnation                               | peers, names       |
| `intake`       | accepts fragments, and acknowledges them                                 | ledger, receipts   |
| `grants`       | which runner samples how much, under which weights                       | leases             |
| `updates`      | the driver's requests; what an update trains, its commit, report, replan | open, runs, ledger |
| `state`        | what the parts share: peers, ledger, weights, timers, limits, instructions |                    |
"""
