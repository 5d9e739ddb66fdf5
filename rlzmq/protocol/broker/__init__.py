"""The broker without its sockets: `core` dispatches each event to the part that handles it.

| module            | responsibility                                                | state it changes              |
|-------------------|---------------------------------------------------------------|-------------------------------|
| `admission`       | which role may send which message; expels offenders           | offences                      |
| `registration`    | who is registered, under which incarnation                    | runners, ranks, driver, names |
| `intake`          | accepts fragments, and acknowledges them                      | ledger, receipts              |
| `grants`          | which runner samples how much, under which weights            | leases                        |
| `published_state` | the newest weights and connector state, and who needs them    | weights, connector state      |
| `requests`        | requests of the driver                                        | open updates, lineage, pause  |
| `updates`         | which steps an update trains, and when it is committed        | runs, ledger                  |
| `recovery`        | which updates are kept when ranks die or the broker restarts  | runs, ledger                  |
| `reports`         | reports of committed updates, until the driver has them       | reports, receipts             |
| `status`          | STATUS for observers and PROGRESS for the driver              | none                          |

The parts share one `state`, which also collects the instructions; `options` holds timers and limits.
"""
