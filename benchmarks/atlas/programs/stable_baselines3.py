"""stable-baselines3 2.9.2: the losses of `train`, one for each call of ``backward``."""

from stable_baselines3 import A2C, DQN, PPO, SAC, TD3

from benchmarks.atlas.caught import caught


def _model(algorithm, environment, **options):
    return algorithm("MlpPolicy", environment, device="cpu", seed=0, policy_kwargs={"net_arch": [16]}, **options)


def _on_policy(algorithm, **options):
    model = _model(algorithm, "CartPole-v1", n_steps=32, **options)
    _, callback = model._setup_learn(32)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 32)
    return caught(model.train), model.policy


def _off_policy(algorithm, environment, number=0):
    model = _model(algorithm, environment, learning_starts=100, buffer_size=1000)
    model.learn(64)  # collects without a step of training
    return caught(lambda: model.train(1, 32), number), model.policy


def ppo():
    return _on_policy(PPO, batch_size=32, n_epochs=1)


def a2c():
    return _on_policy(A2C)


def dqn():
    return _off_policy(DQN, "CartPole-v1")


def sac_critic():
    return _off_policy(SAC, "Pendulum-v1", number=1)


def sac_actor():
    return _off_policy(SAC, "Pendulum-v1", number=2)


def td3_critic():
    return _off_policy(TD3, "Pendulum-v1")
