"""The broker without its sockets: `core` sends each event to the part that it concerns.

| part        | decides                                                        | of the state it changes               |
|-------------|----------------------------------------------------------------|---------------------------------------|
| `admission` | who may say what                                               | offences                              |
| `door`      | who is registered, under which incarnation                     | runners, ranks, driver, names         |
| `intake`    | which fragments are accepted; what runners hear of them        | ledger, receipts                      |
| `grants`    | which runner samples how much, under which weights             | leases                                |
| `store`     | whom to send the newest weights and connector state            | weights, connector state              |
| `requests`  | what the driver asks for                                       | open updates, lineage, pause          |
| `updates`   | which steps an update trains, and when it is committed         | runs, ledger                          |
| `delivery`  | which rank gets its shard, and its TRAIN                       | runs                                  |
| `recovery`  | what stands when ranks die or the broker is new                | runs, ledger                          |
| `reports`   | what the driver is told of a committed update, until it has it | reports, receipts                     |
| `journal`   | what waits for the disk, and what comes back from it           | journal, receipts, ledger             |
| `watch`     | who hangs                                                      | its own                               |
| `status`    | what others are told of all this                               | nothing                               |

The parts share one `state`, which also collects what is to be sent; its `options` say how long and how much.
"""
