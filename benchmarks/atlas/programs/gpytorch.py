"""gpytorch 1.15.2: marginal likelihoods of Gaussian processes."""

import gpytorch
import torch
from gpytorch import kernels, likelihoods, means, mlls, variational
from gpytorch.distributions import MultivariateNormal
from torch import nn


class _Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean, self.kernel = means.ConstantMean(), kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.kernel(x))


class _Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, points, strategy=variational.VariationalStrategy):
        posterior = variational.CholeskyVariationalDistribution(len(points))
        super().__init__(strategy(self, points, posterior, learn_inducing_locations=True))
        self.mean, self.kernel = means.ConstantMean(), kernels.ScaleKernel(kernels.MaternKernel())

    forward = _Exact.forward


def _data():
    x = torch.rand(30, 2)
    return x, (3 * x.sum(1)).sin()


def _exact():
    x, y = _data()
    likelihood = likelihoods.GaussianLikelihood()
    model = _Exact(x, y, likelihood).train()
    objective = mlls.ExactMarginalLogLikelihood(likelihood, model)
    return lambda: -objective(model(x), y), model


def exact():
    return _exact()


def conjugate_gradients():
    plain, model = _exact()

    def loss():
        with gpytorch.settings.max_cholesky_size(1):
            return plain()

    return loss, model


def leave_one_out():
    x, y = _data()
    likelihood = likelihoods.GaussianLikelihood()
    model = _Exact(x, y, likelihood).train()
    objective = mlls.LeaveOneOutPseudoLikelihood(likelihood, model)
    return lambda: -objective(model(x), y), model


def _sparse(objective, **options):
    x, y = _data()
    model, likelihood = _Sparse(x[:8].clone(), **options).train(), likelihoods.GaussianLikelihood()
    bound = objective(likelihood, model, len(x))
    model(x)  # the first call sets the variational distribution
    return lambda: -bound(model(x), y), nn.ModuleList([model, likelihood])


def variational_bound():
    return _sparse(mlls.VariationalELBO)


def predictive_likelihood():
    return _sparse(mlls.PredictiveLogLikelihood)


def unwhitened():
    return _sparse(mlls.VariationalELBO, strategy=variational.UnwhitenedVariationalStrategy)
