"""Importing this has the shapes and dtypes in signatures of these modules checked at every call of the test process."""

from jaxtyping import install_import_hook

# Not the modules of Triton kernels, whose functions are no Python.
CHECKED = (
    "rlagent.kernels.gae", "rlagent.kernels.logprob", "rlagent.kernels.reference", "rlagent.trainer.advantage",
    "rlagent.trainer.aggregation", "rlagent.trainer.correction", "rlagent.trainer.credit", "rlagent.trainer.critic",
    "rlagent.trainer.forward", "rlagent.trainer.kl", "rlagent.trainer.lora", "rlagent.trainer.loss", "rlagent.trainer.microbatch",
    "rlagent.trainer.model.norm", "rlagent.trainer.model.swiglu", "rlagent.trainer.streams", "rlagent.trainer.token_loss",
)  # fmt: skip
install_import_hook(list(CHECKED), "beartype.beartype")
