"""The embedded engine: SGLang's HTTP surface on a small torch model."""
