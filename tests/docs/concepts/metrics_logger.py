"""MetricsLogger: values, windows, nested keys, reductions, timers, counters, throughputs, merged loggers."""

import gymnasium as gym

from rlzmq import MetricsLogger

logger = MetricsLogger()
logger.log_value("loss", 0.01, reduce="mean", window=2)
for value in (0.02, 0.03, 0.04, 0.05):
    logger.log_value("loss", value, reduce="mean", window=2)
assert abs(logger.peek("loss") - 0.045) < 1e-9

logger.log_value(("some", "nested", "key"), -1.0)
assert logger.peek(("some", "nested", "key")) == -1.0

logger.log_value(key="max_value", value=0.0, reduce="max")
for i in range(1000, 0, -1):
    logger.log_value(key="max_value", value=float(i))
assert logger.peek("max_value") == 1000.0

logger.log_value("some_items", value="a", reduce="item_series")
logger.log_value("some_items", value="b", reduce="item_series")
logger.log_value("an_item", value="c", reduce="item")
logger.log_value("an_item", value="d", reduce="item")
assert logger.peek("some_items") == ["a", "b"]
assert logger.peek("an_item") == "d"
logger.reduce()
assert logger.peek("some_items") == []

env = gym.make("CartPole-v1", render_mode="rgb_array")
env.reset()
for action in (0, 1):
    logger.log_value("some_images", value=env.render(), reduce="item_series")
    env.step(action)
assert len(logger.peek("some_images")) == 2
env.close()

logger = MetricsLogger()
with logger.log_time("my_block_to_be_timed", reduce="ema", ema_coeff=0.1):
    sum(range(1000))
with logger.log_time("my_block_to_be_timed"):
    sum(range(1000))
assert 0.0 < logger.peek("my_block_to_be_timed") < 1.0

logger.log_value("my_counter", 50, reduce="sum")
logger.log_value("my_counter", 25, reduce="sum")
assert logger.peek("my_counter") == 75
logger.reduce()
assert logger.peek("my_counter") == 0
logger.log_value("ever", 3, reduce="lifetime_sum", with_throughput=True)
logger.reduce()
logger.log_value("ever", 4)
assert logger.peek("ever") == 7
assert logger.peek("ever", throughput=True) > 0.0
assert logger.peek("nothing", default=0.0) == 0.0

main, left, right = MetricsLogger(root=True), MetricsLogger(), MetricsLogger()
for child, value in ((left, 1.0), (right, 3.0)):
    child.log_value("a", value, reduce="mean", window=10)
    child.log_value("n", 2, reduce="lifetime_sum")
main.aggregate([left.reduce(), right.reduce()], key="children")
assert main.peek(("children", "a")) == 2.0
assert main.peek(("children", "n")) == 4
