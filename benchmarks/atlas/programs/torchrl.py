"""torchrl 0.14.1: objectives of reinforcement learning, on random transitions."""

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, OneHot
from torchrl.modules import Actor, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    CQLLoss,
    CrossQLoss,
    DDPGLoss,
    DiscreteSACLoss,
    DQNLoss,
    IQLLoss,
    KLPENPPOLoss,
    PPOLoss,
    REDQLoss,
    ReinforceLoss,
    SACLoss,
    TD3BCLoss,
    TD3Loss,
)

_N_OBSERVATIONS, _N_ACTIONS, _BATCH = 4, 2, 16


class _Critic(nn.Module):
    def __init__(self):
        super().__init__()
        width = _N_OBSERVATIONS + _N_ACTIONS
        self.layers = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, observation, action):
        return self.layers(torch.cat([observation, action], -1))


def _policy():
    layers = nn.Sequential(
        nn.Linear(_N_OBSERVATIONS, 16), nn.Tanh(), nn.Linear(16, 2 * _N_ACTIONS), NormalParamExtractor()
    )
    return ProbabilisticActor(
        TensorDictModule(layers, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
        spec=Bounded(-1, 1, (_N_ACTIONS,)),
    )


def _deterministic():
    layers = nn.Sequential(nn.Linear(_N_OBSERVATIONS, 16), nn.Tanh(), nn.Linear(16, _N_ACTIONS), nn.Tanh())
    return Actor(layers, in_keys=["observation"])


def _critic():
    return ValueOperator(_Critic(), in_keys=["observation", "action"])


def _value():
    layers = nn.Sequential(nn.Linear(_N_OBSERVATIONS, 16), nn.Tanh(), nn.Linear(16, 1))
    return ValueOperator(layers, in_keys=["observation"])


def _transitions(*steps):
    shape = (_BATCH, *steps)
    ends = torch.zeros(*shape, 1, dtype=torch.bool)
    return TensorDict(
        {
            "observation": torch.randn(*shape, _N_OBSERVATIONS),
            "action": 1.6 * torch.rand(*shape, _N_ACTIONS) - 0.8,
            "action_log_prob": torch.randn(shape),
            "loc": torch.randn(*shape, _N_ACTIONS),
            "scale": torch.rand(*shape, _N_ACTIONS) + 0.5,
            "next": {
                "observation": torch.randn(*shape, _N_OBSERVATIONS),
                "reward": torch.randn(*shape, 1),
                "done": ends,
                "terminated": ends,
            },
        },
        shape,
    )


def _total(objective, batch, **estimator):
    if estimator:
        objective.make_value_estimator(**estimator)

    def loss():
        return sum(part for name, part in objective(batch.clone()).items() if name.startswith("loss"))

    return loss, objective


def ppo():
    return _total(PPOLoss(_policy(), _value()), _transitions(8), gamma=0.9, lmbda=0.9)


def clipped_ppo():
    return _total(ClipPPOLoss(_policy(), _value()), _transitions(8), gamma=0.9, lmbda=0.9)


def penalized_ppo():
    return _total(KLPENPPOLoss(_policy(), _value()), _transitions(8), gamma=0.9, lmbda=0.9)


def a2c():
    return _total(A2CLoss(_policy(), _value()), _transitions(8), gamma=0.9)


def reinforce():
    return _total(ReinforceLoss(_policy(), _value()), _transitions(8), gamma=0.9)


def sac():
    return _total(SACLoss(_policy(), _critic(), num_qvalue_nets=2), _transitions(), gamma=0.9)


def discrete_sac():
    layers = nn.Sequential(nn.Linear(_N_OBSERVATIONS, 16), nn.Tanh(), nn.Linear(16, 3))
    policy = ProbabilisticActor(
        TensorDictModule(layers, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.OneHotCategorical,
        spec=OneHot(3),
    )
    critic = TensorDictModule(nn.Linear(_N_OBSERVATIONS, 3), in_keys=["observation"], out_keys=["action_value"])
    objective = DiscreteSACLoss(policy, critic, action_space="one-hot", num_actions=3)
    return _total(objective, _one_hot(), gamma=0.9)


def td3():
    return _total(TD3Loss(_deterministic(), _critic(), bounds=(-1, 1)), _transitions(), gamma=0.9)


def td3_with_cloning():
    return _total(TD3BCLoss(_deterministic(), _critic(), bounds=(-1, 1)), _transitions(), gamma=0.9)


def ddpg():
    return _total(DDPGLoss(_deterministic(), _critic()), _transitions(), gamma=0.9)


def iql():
    return _total(IQLLoss(_policy(), _critic(), value_network=_value()), _transitions(), gamma=0.9)


def cql():
    return _total(CQLLoss(_policy(), _critic()), _transitions())


def redq():
    return _total(REDQLoss(_policy(), _critic(), num_qvalue_nets=3, sub_sample_len=2), _transitions(), gamma=0.9)


def crossq():
    return _total(CrossQLoss(_policy(), _critic(), num_qvalue_nets=2), _transitions(), gamma=0.9)


def dqn():
    return _total(_q_learning(delay_value=False), _one_hot(), gamma=0.9)


def dqn_with_a_target():
    return _total(_q_learning(delay_value=True), _one_hot(), gamma=0.9)


def _q_learning(**options):
    actor = QValueActor(nn.Linear(_N_OBSERVATIONS, 3), in_keys=["observation"], spec=OneHot(3))
    return DQNLoss(actor, action_space="one-hot", **options)


def _one_hot():
    batch = _transitions()
    batch["action"] = nn.functional.one_hot(torch.randint(3, (_BATCH,)), 3)
    return batch
