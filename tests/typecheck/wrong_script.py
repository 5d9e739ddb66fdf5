"""A user's mistakes. Each marked line is an error to mypy and to pyright, with these codes: an ignore comment that is
not needed is an error, too."""

import rlzmq
from rlzmq import Algorithm, PPOConfig, SingleAgentEpisode


def report(result: dict[str, float]) -> None:
    print(result)


print(rlzmq.DreamerV3Config)  # type: ignore[attr-defined]  # pyright: ignore
config = PPOConfig()
config.training(learning_rate=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
config.training(lr="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
config.training(gamma="0.9")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
config.env_runners(num_runners=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
config.learners(num_learners="two")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
config.framework("tf2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
config.evaluation(evaluation_duration_unit="steps")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
config.callbacks(on_train_results=report)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
config.build().trian()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
algorithm: Algorithm = config  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
SingleAgentEpisode(observation=[])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
