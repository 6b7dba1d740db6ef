"""Scripts that run in SGLang's interpreter. They import nothing from kvgate and so need none of its dependencies."""
