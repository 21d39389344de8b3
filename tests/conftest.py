import configs.process  # noqa: F401  before torch
